// The draft tree: accepted tokens on the left, guesses behind them, what was pruned beside.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

const COLUMN = 112;
const ROW = 27;
const BOX = { width: 98, height: 21 };
const MOST_ROWS = 8;
const PRUNED_ROWS = 3;
const SHOWN_CHARS = { accepted: 11, others: 6 };

const SOURCES = {
  prompt: { mark: "¶", name: "the prompt" },
  model: { mark: "◆", name: "the model itself" },
  levels: { mark: "≡", name: "draft model, level by level" },
  expansion: { mark: "▸", name: "draft model, expansion" },
};
const STATES = { accepted: "accepted", sent: "in flight", waiting: "waiting", pruned: "pruned" };

const EMPTY = {
  idle: "No request runs. When one does, the guesses for its next tokens appear here.",
  reading: "The prompt is being read.",
  paused: "Paused: the guesses of the ring that was lost are forgotten, the tokens of the answer are kept.",
};

const shown = new Map(); // by id: the elements of a node that is in the picture

function named([id, parent, text, state, probability, source, sent]) {
  return { id, parent, text, state, probability, source, sent, children: [] };
}

export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
}

// Which nodes are shown, each with its column and row; the straight line is the likeliest path.
function laidOut(scene, trunkShown) {
  const nodes = scene.nodes.map(named);
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const trunk = nodes.filter((node) => node.state === "accepted").slice(-trunkShown);
  if (!trunk.length) return [];
  const chosen = new Set();
  let rows = 1;
  const take = (node, most) => {
    const parent = byId.get(node.parent);
    if (!parent || !chosen.has(parent)) return;
    const opensRow = parent.children.length > 0;
    if (opensRow && rows >= most) return;
    rows += opensRow ? 1 : 0;
    parent.children.push(node);
    chosen.add(node);
  };
  trunk.forEach((node, index) => {
    const parent = trunk[index - 1];
    if (parent) parent.children.push(node);
    chosen.add(node);
  });
  const live = nodes.filter((node) => node.state === "sent" || node.state === "waiting");
  live.sort((a, b) => b.probability - a.probability || a.id - b.id);
  for (const node of live) take(node, MOST_ROWS - PRUNED_ROWS);
  for (const node of nodes.filter((one) => one.state === "pruned").reverse()) {
    if (trunk.some((one) => one.id === node.parent)) take(node, MOST_ROWS);
  }
  const first = trunk[0];
  let nextRow = 0;
  const place = (node, column) => {
    node.column = column;
    node.row = node.children.length ? place(node.children[0], column + 1) : nextRow++;
    for (const child of node.children.slice(1)) place(child, column + 1);
    return node.row;
  };
  place(first, 0);
  return [...chosen];
}

function svg(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function made(picture, node) {
  const line = svg("path", { class: "edge" });
  const group = svg("g", { class: "node" });
  const title = svg("title");
  const box = svg("rect", { width: BOX.width, height: BOX.height, rx: 5, y: -BOX.height / 2 });
  const mark = svg("text", { class: "source", x: 6, y: 4 });
  const text = svg("text", { class: "token", x: 19, y: 4 });
  const chance = svg("text", { class: "chance", x: BOX.width - 5, y: 4 });
  group.append(title, box, mark, text, chance);
  picture.prepend(line);
  picture.append(group);
  const parts = { line, group, title, mark, text, chance };
  shown.set(node.id, parts);
  return parts;
}

function draw(picture, node, byId, root) {
  const parts = shown.get(node.id) || made(picture, node);
  const x = node.column * COLUMN + 2;
  const y = node.row * ROW + ROW / 2;
  const text = visible(node.text);
  const percent = node.probability < 0.005 ? "<1%" : `${Math.round(100 * node.probability)}%`;
  const source = SOURCES[node.source] || { mark: "?", name: node.source };
  parts.group.setAttribute("transform", `translate(${x} ${y})`);
  parts.group.dataset.state = node.state;
  parts.group.dataset.id = node.id;
  parts.group.dataset.root = String(node.id === root);
  parts.mark.textContent = { sent: "→", waiting: "…", pruned: "✕", accepted: source.mark }[node.state];
  const room = node.state === "accepted" ? SHOWN_CHARS.accepted : SHOWN_CHARS.others;
  parts.text.textContent = text.length > room ? `${text.slice(0, room - 1)}…` : text;
  parts.chance.textContent = node.state === "accepted" ? "" : percent;
  const wasted = node.state === "pruned" && node.sent ? ", its row was wasted" : "";
  parts.title.textContent = `“${text}”: ${STATES[node.state]}${wasted}, ${percent}, from ${source.name}`;
  const parent = byId.get(node.parent);
  if (parent === undefined || parent.row === undefined || node.column === 0) {
    parts.line.setAttribute("d", "");
  } else {
    const fromX = parent.column * COLUMN + 2 + BOX.width;
    const fromY = parent.row * ROW + ROW / 2;
    const bend = COLUMN - BOX.width;
    parts.line.setAttribute("d", `M${fromX} ${fromY}h${bend / 2}V${y}H${x}`);
  }
  parts.line.dataset.state = node.state;
}

function showCounts(scene) {
  const counts = { accepted: 0, sent: 0, waiting: 0, pruned: 0 };
  const sources = new Map();
  for (const [, , , state, , source] of scene.nodes) {
    counts[state] += 1;
    sources.set(source, (sources.get(source) || 0) + 1);
  }
  for (const [state, count] of Object.entries(counts)) $(`count-${state}`).textContent = count;
  const told = Object.entries(SOURCES)
    .filter(([name]) => sources.has(name))
    .map(([name, { mark, name: words }]) => `${mark} ${words}: ${sources.get(name)}`);
  $("tree-sources").textContent = told.length ? `From ${told.join(" · ")}` : "";
  return counts;
}

export function showTree(scene) {
  const picture = $("tree-picture");
  const counts = showCounts(scene);
  const narrow = $("tree").clientWidth < 520;
  const nodes = laidOut(scene, narrow ? 1 : 3);
  const byId = new Map(nodes.map((node) => [node.id, node]));
  for (const [id, parts] of shown) {
    if (byId.has(id)) continue;
    parts.line.remove();
    parts.group.remove();
    shown.delete(id);
  }
  for (const node of nodes) draw(picture, node, byId, scene.root);
  const columns = Math.max(...nodes.map((node) => node.column + 1), 1);
  picture.setAttribute("width", columns * COLUMN);
  picture.setAttribute("height", ($("no-draft").hidden ? MOST_ROWS : 2) * ROW);
  const words = { idle: "No request runs", reading: "Reading the prompt", answering: "Answering", paused: "Paused" };
  const about = Object.entries(counts).map(([state, count]) => `${count} ${STATES[state]}`);
  picture.setAttribute("aria-label", `${words[scene.state] || scene.state}: ${about.join(", ")}`);
  const trip = scene.trips > 0 && scene.tokens > 0 ? ` · ${(scene.tokens / scene.trips).toFixed(2)} tokens a trip` : "";
  $("tree-empty").hidden = nodes.length > 0;
  $("tree-empty").textContent = EMPTY[scene.state] || "";
  const running = scene.state === "answering" || scene.state === "reading";
  $("tree-note").textContent = running ? `${scene.policy}${trip}` : (words[scene.state] || "").toLowerCase();
}
