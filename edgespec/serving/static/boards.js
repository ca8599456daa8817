// What boards are called and how they are, in words: for pictures, cards and messages.

const names = new Map(); // by stage: who had the place last

/** A board's name; a place that nobody holds is known by who had it. */
export function nameOf(node) {
  if (node.stage && node.name) names.set(node.stage, node.name);
  return node.name || names.get(node.stage) || "";
}

export function gigabytes(bytes) {
  const whole = bytes / 2 ** 30;
  return whole >= 10 ? whole.toFixed(0) : whole.toFixed(1);
}

/** One line about a board. */
export function words(node) {
  const place = node.isHome ? "D0, the coordinator" : node.stage ? `V${node.stage}` : "spare";
  const parts = [`${place}${node.name ? ` ${node.name}` : ""}`];
  if (node.stage) parts.push(`layers ${node.first} to ${node.end - 1}`);
  if (!node.isHome) parts.push(node.words || node.state);
  if (node.memory > 0 && node.free > 0) parts.push(`memory ${gigabytes(node.memory - node.free)} of ${gigabytes(node.memory)} GiB`);
  if (node.busy > 0) parts.push(`busy ${Math.round(100 * node.busy)} %`);
  if (node.temperature > 0) parts.push(`${Math.round(node.temperature)} °C`);
  if (node.warning) parts.push(node.warning);
  return parts.join(", ");
}
