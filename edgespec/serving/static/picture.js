// The ring as a picture: the boards in a circle, what each has in use, and what goes from one to the next.

import { nameOf, words } from "./boards.js";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const WIDE = { width: 640, height: 304, across: 238, down: 90, radius: 37 };
const NARROW = { width: 340, height: 384, across: 118, down: 134, radius: 33 };
const LABEL_CHARS = { wide: 18, narrow: 13 };
const MORE = 24; // half of what a ring of many boards is higher
const LABEL = { half: 46, down: 32 }; // below a board
const MARKS = { missing: "✕", loading: "↻", waiting: "…" };
const TURN = 2 * Math.PI;

function svg(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(text, room) {
  return text.length > room ? `${text.slice(0, room - 1)}…` : text;
}

// A part of a circle from its top, clockwise.
function arc(radius, share) {
  const part = Math.min(Math.max(share, 0), 0.9999);
  const x = radius * Math.sin(TURN * part);
  const y = -radius * Math.cos(TURN * part);
  return `M0 ${-radius}A${radius} ${radius} 0 ${part > 0.5 ? 1 : 0} 1 ${x.toFixed(2)} ${y.toFixed(2)}`;
}

function board(node, at, radius, room) {
  const group = svg("g", { class: "board", transform: `translate(${at.x.toFixed(1)} ${at.y.toFixed(1)})` });
  group.dataset.state = node.state;
  const isThere = node.state !== "missing";
  const used = isThere && node.memory > 0 && node.free > 0 ? 1 - node.free / node.memory : 0;
  const inner = radius - 7;
  group.append(svg("title", {}, words(node)), svg("circle", { class: "face", r: inner }));
  if (isThere && node.busy > 0) {
    // What it computes fills it from below, like water.
    const level = Math.min(node.busy, 1);
    const half = Math.acos(2 * level - 1); // the angle from the top to where its surface ends
    const x = inner * Math.sin(half);
    const large = level > 0.5 ? 1 : 0;
    const top = inner * (1 - 2 * level);
    if (level >= 0.995) group.append(svg("circle", { class: "busy", r: inner }));
    else group.append(svg("path", { class: "busy", d: `M${-x} ${top}A${inner} ${inner} 0 ${large} 0 ${x} ${top}Z` }));
  }
  group.append(svg("circle", { class: "memory-track", r: radius }));
  if (used > 0) group.append(svg("path", { class: "memory", d: arc(radius, used), "data-level": used > 0.95 ? "high" : "" }));
  const place = node.isHome ? "D0" : node.stage ? `V${node.stage}` : "S";
  group.append(svg("text", { class: "board-place", y: -1 }, place));
  const heat = node.temperature > 0 ? `${Math.round(node.temperature)} °C` : "";
  const line = MARKS[node.state] || `${node.throttled ? "▲ " : ""}${heat}`;
  group.append(svg("text", { class: "board-heat", y: 14, "data-level": node.throttled ? "high" : "" }, line));
  group.append(svg("text", { class: "board-name", y: radius + 17 }, short(nameOf(node) || (node.isHome ? "coordinator" : "nobody"), room)));
  const held = node.stage ? `layers ${node.first}–${node.end - 1}` : "spare";
  const layers = node.isHome ? "draft and tree" : MARKS[node.state] ? `${node.state}, ${held}` : held;
  group.append(svg("text", { class: "board-layers", y: radius + 31 }, `${node.warning ? "! " : ""}${layers}`));
  return group;
}

// The way from one board to the next one, without what lies under them.
function link(from, to, shape, gap) {
  const point = (angle) => [shape.cx + shape.across * Math.cos(angle), shape.cy + shape.down * Math.sin(angle)];
  const steps = 24;
  const points = [];
  for (let step = 0; step <= steps; step += 1) points.push(point(from + ((to - from) * step) / steps));
  const [ax, ay] = point(from);
  const [bx, by] = point(to);
  const isFree = (x, y) => Math.hypot(x, y) > gap && !(Math.abs(x) < LABEL.half && y > 0 && y < gap + LABEL.down);
  const outside = points.filter(([x, y]) => isFree(x - ax, y - ay) && isFree(x - bx, y - by));
  return outside.length > 1 ? `M${outside.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}` : "";
}

let segments = 0; // that are on the ring, of the request that is shown

/** What is on its way now. */
export function noteSegments(count) {
  segments = count;
  for (const line of document.querySelectorAll("#ring-picture .link")) line.dataset.live = String(count > 0 && line.dataset.whole === "true");
}

function speedOf(status) {
  const speeds = status.live.map((one) => one.tokens_per_second);
  return speeds.reduce((sum, speed) => sum + speed, 0);
}

function middle(status, shape) {
  // Between the name of D0 and the board at the bottom.
  const group = svg("g", { class: "middle", transform: `translate(${shape.cx} ${shape.cy + 16})` });
  const speed = speedOf(status);
  const isAnswering = status.running && speed > 0;
  if (isAnswering) group.append(svg("text", { class: "speed", y: 2 }, speed.toFixed(1)));
  const doing = isAnswering ? "tokens a second" : status.running ? "reading" : status.ready ? "idle" : "not up";
  const waits = status.waiting ? `, ${status.waiting} waiting` : "";
  group.append(svg("text", { class: "unit", y: isAnswering ? 20 : 4 }, doing + waits));
  return group;
}

/** Draw the ring of a status. */
export function showPicture(status) {
  const isNarrow = $("ring-picture").parentElement.clientWidth < 480;
  const shape = { ...(isNarrow ? NARROW : WIDE) };
  const home = { ...status.home, isHome: true, state: "ready", stage: 0 };
  const places = [home, ...status.nodes.filter((node) => node.stage > 0)];
  const spares = status.nodes.filter((node) => !node.stage);
  if (places.length > 4) {
    shape.down += MORE;
    shape.height += 2 * MORE;
  }
  shape.cx = shape.width / 2;
  shape.cy = shape.radius + 8 + shape.down;
  const height = shape.height + (spares.length ? 92 : 0);
  const around = Math.PI * (shape.across + shape.down);
  const radius = Math.max(Math.min(shape.radius, around / places.length / 2.9), 22);
  const angle = (index) => -TURN / 4 + (TURN * index) / places.length;
  const picture = $("ring-picture");
  picture.setAttribute("viewBox", `0 0 ${shape.width} ${height}`);
  const room = isNarrow ? LABEL_CHARS.narrow : LABEL_CHARS.wide;
  const head = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 13, markerHeight: 13, orient: "auto", markerUnits: "userSpaceOnUse" });
  head.append(svg("path", { d: "M0 0L8 4L0 8Z" }));
  const drawn = [head];
  places.forEach((node, index) => {
    if (places.length < 2) return;
    const next = places[(index + 1) % places.length];
    const isWhole = node.state === "ready" && next.state === "ready";
    const line = svg("path", { class: "link", d: link(angle(index), angle(index + 1), shape, radius + 6), "marker-end": "url(#arrow)" });
    line.dataset.whole = String(isWhole);
    line.dataset.live = String(isWhole && segments > 0 && status.running > 0);
    if (next.trip > 0 && !next.isHome) line.append(svg("title", {}, `to ${nameOf(next) || `V${next.stage}`}: ${(1000 * next.trip).toFixed(1)} ms there and back from D0`));
    drawn.push(line);
  });
  places.forEach((node, index) => {
    const at = { x: shape.cx + shape.across * Math.cos(angle(index)), y: shape.cy + shape.down * Math.sin(angle(index)) };
    drawn.push(board(node, at, radius, room));
  });
  spares.forEach((node, index) => {
    const x = (shape.width * (index + 1)) / (spares.length + 1);
    drawn.push(board(node, { x, y: shape.height + 26 }, 24, room));
  });
  drawn.push(middle(status, shape));
  picture.replaceChildren(...drawn);
  picture.setAttribute("aria-label", `The ring: ${[...places, ...spares].map(words).join("; ")}`);
}
