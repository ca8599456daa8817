// The ring: its picture, a card for every device, and what to say when one is missing.

import { gigabytes, nameOf } from "./boards.js";
import { showPicture } from "./picture.js";

const $ = (id) => document.getElementById(id);

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const MARKS = { ready: "✓", missing: "✕", loading: "↻", waiting: "…", "standing by": "◦" };

export function seconds(number) {
  if (number < 90) return `${Math.round(number)} s`;
  if (number < 5400) return `${Math.round(number / 60)} min`;
  return `${Math.round(number / 3600)} h`;
}

function meter(name, share, text, isBad = false) {
  const row = element("div", "meter");
  row.append(element("span", "meter-name", name));
  const track = element("span", "track");
  const fill = element("span", "fill");
  fill.style.width = `${Math.round(100 * Math.min(Math.max(share, 0), 1))}%`;
  if (isBad) fill.dataset.level = "high";
  track.append(fill);
  row.append(element("span", "meter-text", text), track);
  return row;
}

function figures(node) {
  const rows = [];
  if (node.memory > 0 && node.free > 0) {
    const used = node.memory - node.free;
    const share = used / node.memory;
    rows.push(meter("Memory", share, `${gigabytes(used)}/${gigabytes(node.memory)} GiB`, share > 0.95));
  } else {
    rows.push(meter("Memory", 0, node.memory > 0 ? `${gigabytes(node.memory)} GiB` : "not known"));
  }
  if (node.stage || node.state === "standing by") rows.push(meter("Busy", node.busy, `${Math.round(100 * node.busy)} %`));
  const hot = node.temperature > 0;
  const limit = node.limit > 0 ? node.limit : 100;
  rows.push(meter("Heat", hot ? node.temperature / limit : 0, hot ? `${Math.round(node.temperature)} °C` : "not known", node.throttled));
  return rows;
}

function card(node) {
  const item = element("li", "device");
  item.dataset.state = node.state;
  const head = element("div", "device-head");
  head.append(element("span", "place", node.stage ? `V${node.stage}` : "Spare"));
  head.append(element("strong", "name", nameOf(node) || "nobody"));
  const state = element("span", "state");
  const mark = element("i", "", MARKS[node.state] || "…");
  mark.setAttribute("aria-hidden", "true");
  const words = node.state === "loading" || !node.stage ? node.words : node.state;
  state.append(mark, ` ${words}`);
  head.append(state);
  item.append(head);
  const where = node.with_coordinator ? ", on D0's machine" : "";
  if (node.stage) item.append(element("p", "layers", `Layers ${node.first} to ${node.end - 1}${where}`));
  if (node.state === "missing") {
    if (node.losses) item.append(element("p", "warning", `${node.last_loss}, ${seconds(node.lost_ago)} ago`));
  } else {
    item.append(...figures(node));
    if (node.warning) item.append(element("p", "warning", node.warning));
  }
  return item;
}

let chosen = 0; // the request that the user wants to watch, 0: the oldest
let chose = () => {};

/** Have `whenChosen()` called when the user chooses another request to watch. */
export function prepareRing(whenChosen) {
  chose = whenChosen;
}

/** The number of the request that the user has chosen; 0: none. */
export function chosenRequest() {
  return chosen;
}

function choose(number) {
  if (number === chosen) return;
  chosen = number;
  chose();
}

/** Whether the tree shows this scene, of the chosen request or, without one, of the oldest. */
export function isWatched(scene) {
  return chosen ? scene.request === chosen : scene.place === 0;
}

const items = new Map(); // by request: what stays there from status to status, so that it can be clicked

/** The requests that run, of which the tree shows one: if there are several, the user may choose. */
function showAnswers(list, live) {
  for (const [number, item] of items) {
    if (live.some((one) => one.number === number)) continue;
    item.remove();
    items.delete(number);
  }
  for (const one of live) {
    if (!items.has(one.number)) items.set(one.number, answer(list, one.number));
    const button = items.get(one.number).firstChild;
    const speed = one.tokens > 1 ? `, ${one.tokens_per_second.toFixed(1)} a second` : "";
    const tokens = one.tokens === 1 ? "1 token" : `${one.tokens} tokens`;
    const watched = one.number === (chosen || live[0].number);
    const several = live.length > 1;
    button.textContent = `${one.policy}: ${tokens}${speed}${several && watched ? " (shown below)" : ""}`;
    button.disabled = !several;
    button.setAttribute("aria-pressed", String(watched));
  }
}

function answer(list, number) {
  const item = element("li", "");
  const button = element("button", "watch");
  button.type = "button";
  button.id = `watch-${number}`;
  button.title = "Show this request in the draft tree";
  button.addEventListener("click", () => choose(number));
  item.append(button);
  list.append(item);
  return item;
}

function head() {
  const item = element("li", "device");
  item.dataset.state = "ready";
  const title = element("div", "device-head");
  title.append(element("span", "place", "D0"), element("strong", "name", "coordinator"));
  const meters = element("div", "meters");
  item.append(title, element("p", "layers", "Draft source and draft tree"), meters, element("p", "warning"), element("p", "note"));
  return item;
}

const home = head();

export function showRing(status) {
  if (!status.reachable) return;
  if (chosen && !status.live.some((one) => one.number === chosen)) choose(0); // it is over
  const waits = status.waiting ? `, ${status.waiting} waiting` : "";
  home.querySelector(".note").textContent = status.running ? `${status.running} running${waits}` : `idle${waits}`;
  const machine = status.home;
  home.querySelector(".name").textContent = machine.name || "coordinator";
  home.querySelector(".meters").replaceChildren(...figures(machine));
  home.querySelector(".warning").textContent = machine.warning;
  showPicture(status);
  showAnswers($("answers"), status.live);
  const warned = [{ ...machine, name: machine.name || "coordinator" }, ...status.nodes].filter((node) => node.warning);
  $("warnings").replaceChildren(...warned.map((node) => element("li", "warning", `${nameOf(node) || `V${node.stage}`}: ${node.warning}`)));
  const ring = $("ring");
  if (ring.firstChild !== home) ring.replaceChildren(home);
  while (ring.lastChild !== home) ring.lastChild.remove();
  ring.append(...status.nodes.map(card));
  $("ring-note").textContent = status.up_for > 0 ? `up for ${seconds(status.up_for)}` : "not up";
}

function clock(ago) {
  const at = new Date(Date.now() - 1000 * ago);
  return at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

function trouble(node) {
  const name = nameOf(node);
  const who = `Stage ${node.stage}${name ? ` (${name})` : ""}`;
  if (node.state === "missing" && node.losses) {
    return `${who} is down since ${clock(node.lost_ago)} (${seconds(node.lost_ago)}): ${node.last_loss}.`;
  }
  if (node.state === "missing") return `${who} has not joined yet.`;
  return `${who} is ${node.state}${node.words && node.words !== node.state ? `: ${node.words}` : ""}.`;
}

// What is wrong, and what happens to the answer; "" if all is well.
export function troubleOf(status, isAnswering) {
  if (!status.reachable) {
    return `${status.text}. ${isAnswering ? "The answer cannot go on." : "Questions cannot be answered until it is back."}`;
  }
  if (status.ready) return "";
  const places = status.nodes.filter((node) => node.stage > 0);
  const missing = places.filter((node) => node.state === "missing");
  const named = (missing.length ? missing : places.filter((node) => node.state !== "ready")).map(trouble);
  const until = missing.length ? "when it is back or a spare has its place" : "when all stages are ready";
  const answer = isAnswering ? `The answer is paused; nothing of it is lost, and it goes on ${until}.` : `A question waits, and is answered ${until}.`;
  return [...named, answer].join(" ");
}

export function showHealth(status) {
  const state = !status.reachable ? "down" : status.ready ? "up" : "partial";
  const places = status.reachable ? status.nodes.filter((node) => node.stage > 0) : [];
  const ready = places.filter((node) => node.state === "ready").length;
  $("health").dataset.state = state;
  $("health-text").textContent = {
    down: "no coordinator",
    up: `ring up, ${places.length} ${places.length === 1 ? "stage" : "stages"}`,
    partial: `ring down, ${ready} of ${places.length} stages ready`,
  }[state];
  if (status.reachable) $("model").textContent = status.model;
}
