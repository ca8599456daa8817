// The timeline: when each stage computed which segment, and how many of its rows were wasted.

import { element } from "./ring.js";

const $ = (id) => document.getElementById(id);
const DELAY = 0.45; // seconds that a run takes to be told of
const KEPT = 1500;
const still = matchMedia("(prefers-reduced-motion: reduce)");

let runs = []; // {stage, seq, start, end, rows, wasted}, times in seconds of performance.now()
let span = 2;
let lanes = new Map(); // by stage: {canvas, text}
let colours = {};
let awake = false;

const now = () => performance.now() / 1000;

function readColours() {
  const probe = element("span"); // a canvas takes colours alone, not what they depend on
  document.body.append(probe);
  for (const name of ["useful", "wasted", "line", "muted"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

function laneOf(stage) {
  if (lanes.has(stage)) return lanes.get(stage);
  const item = element("li", "lane");
  const canvas = element("canvas");
  canvas.setAttribute("aria-hidden", "true");
  const text = element("span", "lane-text");
  item.append(element("span", "place", `V${stage}`), canvas, text);
  lanes.set(stage, { item, canvas, text });
  lanes = new Map([...lanes].sort((a, b) => a[0] - b[0]));
  $("stages").replaceChildren(...[...lanes.values()].map((lane) => lane.item));
  return lanes.get(stage);
}

export function showStages(status) {
  if (!status.reachable) return;
  const wanted = new Set(status.nodes.filter((node) => node.stage > 0).map((node) => node.stage));
  for (const stage of lanes.keys()) {
    if (!wanted.has(stage)) {
      lanes.get(stage).item.remove();
      lanes.delete(stage);
    }
  }
  for (const stage of wanted) laneOf(stage);
  if (!awake) draw();
}

export function addRuns(scene) {
  const at = now();
  for (const [stage, , seq, ago, took, rows, wasted] of scene.runs) {
    if (stage > 0) runs.push({ stage, seq, start: at - ago - took, end: at - ago, rows, wasted });
  }
  runs = runs.slice(-KEPT);
  showSegments(scene);
  if (!scene.runs.length) return;
  const times = runs.slice(-60).map((run) => run.end - run.start).sort((a, b) => a - b);
  const wanted = Math.min(Math.max(60 * times[Math.floor(times.length / 2)], 1), 10);
  if (wanted > 1.5 * span || wanted < span / 1.5) span = wanted;
  if (!awake) {
    awake = true;
    frame();
  }
}

function showSegments(scene) {
  const told = scene.segments.slice(-6).map(([seq, rows, dead]) => {
    const lost = dead ? `, ${dead} pruned` : "";
    return `#${seq} (${rows} ${rows === 1 ? "row" : "rows"}${lost})`;
  });
  const more = scene.segments.length > 6 ? ` and ${scene.segments.length - 6} more` : "";
  $("segments").textContent = told.length ? `On the ring: ${told.join(", ")}${more}` : "Nothing is on the ring.";
}

// As long as something moves; then the picture stays as it is.
function frame() {
  const last = runs.length ? runs[runs.length - 1].end : 0;
  draw();
  if (now() - last > DELAY + 0.3) {
    awake = false;
    return;
  }
  if (still.matches) setTimeout(frame, 500);
  else requestAnimationFrame(frame);
}

function draw() {
  const last = runs.length ? Math.max(...runs.slice(-20).map((run) => run.end)) : now();
  const right = Math.min(now() - DELAY, last + 0.02 * span);
  const left = right - span;
  let any = false;
  for (const [stage, lane] of lanes) {
    const seen = runs.filter((run) => run.stage === stage && run.end > left && run.start < right);
    any = any || seen.length > 0;
    paint(lane.canvas, seen, left, right);
    const rows = seen.reduce((sum, run) => sum + run.rows, 0);
    const wasted = seen.reduce((sum, run) => sum + run.wasted, 0);
    const text = `${rows} rows, ${wasted} wasted`;
    if (lane.text.textContent !== text) lane.text.textContent = text;
  }
  const note = any ? `last ${span < 2 ? span.toFixed(1) : Math.round(span)} s of work` : "no work yet";
  if ($("time-note").textContent !== note) $("time-note").textContent = note;
}

function paint(canvas, seen, left, right) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.fillStyle = colours.line;
  pen.fillRect(0, height - 1, width, 1);
  for (const run of seen) {
    const x = ((run.start - left) / (right - left)) * width;
    const wide = Math.max(((run.end - run.start) / (right - left)) * width - 1, 1.5);
    const tall = height - 4;
    const bad = tall * (run.rows ? run.wasted / run.rows : 0);
    pen.fillStyle = colours.useful;
    pen.fillRect(x, 2, wide, tall - bad);
    if (bad > 0) hatch(pen, x, 2 + tall - bad, wide, bad);
    if (wide > 26) {
      pen.fillStyle = colours.muted;
      pen.font = "10px sans-serif";
      if (bad < tall / 2) pen.fillText(String(run.rows), x + 4, 13);
    }
  }
}

function hatch(pen, x, y, wide, tall) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, wide, tall);
  pen.clip();
  pen.globalAlpha = 0.35;
  pen.fillStyle = colours.wasted;
  pen.fillRect(x, y, wide, tall);
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.wasted;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let at = Math.floor((x - tall) / 5) * 5; at < x + wide; at += 5) {
    pen.moveTo(at, y + tall);
    pen.lineTo(at + tall, y);
  }
  pen.stroke();
  pen.strokeRect(x + 0.5, y + 0.5, Math.max(wide - 1, 1), Math.max(tall - 1, 1));
  pen.restore();
}

export function prepareTimeline() {
  readColours();
  const again = () => {
    readColours();
    draw();
  };
  document.addEventListener("themechange", again);
  new ResizeObserver(() => draw()).observe($("stages"));
}
