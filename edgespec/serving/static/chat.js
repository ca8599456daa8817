// The chat: several turns, streamed; stop and regenerate.

import { element } from "./ring.js";
import { parameters } from "./settings.js";
import { eventsOf, problemOf } from "./stream.js";

const $ = (id) => document.getElementById(id);

const turns = []; // {role, content}
let running = null; // the AbortController of the answer that comes
let plain = false; // the model has no chat template
let request = null; // sends with the key
let scenes = { tokens: 0, trips: 0 };
let announceChange = () => {};

export const isAnswering = () => running !== null;

export function noteScene(scene) {
  if (running && scene.tokens > 0) scenes = { tokens: scene.tokens, trips: scene.trips };
}

function article(role, text) {
  const made = element("article", `turn ${role}`);
  made.append(element("h3", "who", role === "user" ? "You" : "Answer"));
  const body = element("div", "text");
  body.append(document.createTextNode(text));
  made.append(body);
  $("turns").append(made);
  $("empty").hidden = true;
  return { made, body, node: body.firstChild };
}

function atEnd() {
  const box = $("turns");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function toEnd() {
  $("turns").scrollTop = $("turns").scrollHeight;
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("clear").disabled = controller !== null || turns.length === 0;
  announceChange();
}

function body() {
  const common = { stream: true, stream_options: { include_usage: true }, ...parameters() };
  if (!plain) return ["/v1/chat/completions", { messages: turns, ...common }];
  return ["/v1/completions", { prompt: turns.map((turn) => turn.content).join("\n"), ...common }];
}

// The response; a model without a chat template is asked to go on with the text instead.
async function opened(signal) {
  const response = await request(body()[0], { body: body()[1], signal });
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (!plain && response.status === 400 && /template/i.test(problem.text)) {
    plain = true;
    return opened(signal);
  }
  throw new Error(problem.text);
}

async function answer() {
  for (const button of document.querySelectorAll(".again")) button.remove();
  const controller = new AbortController();
  setRunning(controller);
  scenes = { tokens: 0, trips: 0 };
  const view = article("assistant", "");
  const note = element("p", "note doing", "waiting for the first token");
  view.made.append(note);
  toEnd();
  const told = { text: "", usage: null, reason: "", first: 0, last: 0, problem: "" };
  try {
    const response = await opened(controller.signal);
    for await (const event of eventsOf(response)) take(event, told, view, note);
    if (!told.reason && !told.problem) told.problem = "the connection to the server broke";
  } catch (error) {
    if (controller.signal.aborted) told.reason = "stopped";
    else told.problem = error.message || String(error);
  }
  note.remove();
  finish(view, told);
}

function take(event, told, view, note) {
  if (event.comment) {
    note.textContent = event.comment;
    view.made.dataset.waits = "true";
  }
  if (!event.data || event.data === "[DONE]") return;
  const piece = JSON.parse(event.data);
  if (piece.error) {
    told.problem = String(piece.error.message);
    return;
  }
  if (piece.usage) told.usage = piece.usage;
  const choice = piece.choices && piece.choices[0];
  if (!choice) return;
  if (choice.finish_reason) told.reason = choice.finish_reason;
  const text = (choice.delta ? choice.delta.content : choice.text) || "";
  if (!text) return;
  const follow = atEnd();
  delete view.made.dataset.waits;
  note.textContent = "answering";
  told.last = performance.now();
  told.first = told.first || told.last;
  view.node.appendData(told.text.trim() ? text : text.trimStart());
  told.text += text;
  if (follow) toEnd();
}

function figures(told) {
  const parts = [];
  if (told.reason === "stopped") parts.push("stopped");
  if (told.reason === "length") parts.push("cut at the limit of tokens");
  const { usage } = told;
  if (!usage) return parts.join(" · ");
  const ring = usage.edgespec || {};
  const seconds = ring.seconds || (told.last - told.first) / 1000;
  const trips = ring.trips || scenes.trips;
  const tokens = ring.trips ? usage.completion_tokens : scenes.tokens;
  parts.push(`${usage.completion_tokens} tokens`);
  if (seconds > 0) parts.push(`${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
  if (trips > 0) parts.push(`${(tokens / trips).toFixed(2)} tokens a trip`);
  const cached = usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
  parts.push(`${usage.prompt_tokens} prompt tokens, ${cached} of them cached`);
  if (ring.recoveries) parts.push(`the ring was lost ${ring.recoveries === 1 ? "once" : `${ring.recoveries} times`} meanwhile`);
  return parts.join(" · ");
}

function finish(view, told) {
  const last = turns[turns.length - 1];
  if (told.text) turns.push({ role: "assistant", content: told.text });
  if (told.problem) view.made.append(element("p", "warning", `The answer failed: ${told.problem}`));
  const words = figures(told);
  if (words) view.made.append(element("p", "note figures", words));
  if (last && last.role === "user") {
    const again = element("button", "quiet again", "Regenerate");
    again.type = "button";
    again.addEventListener("click", () => regenerate(view.made));
    view.made.append(again);
  }
  const ending = told.problem ? `The answer failed: ${told.problem}` : `Answer${told.reason === "stopped" ? ", stopped" : ""}: ${told.text}`;
  $("said").textContent = ending.slice(0, 4000);
  setRunning(null);
  toEnd();
}

function regenerate(made) {
  if (running) return;
  if (turns.length && turns[turns.length - 1].role === "assistant") turns.pop();
  made.remove();
  answer();
  $("prompt").focus();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  // An answer that gave no text leaves two questions in a row, which templates refuse.
  if (turns.length && turns[turns.length - 1].role === "user") turns.pop();
  $("prompt").value = "";
  turns.push({ role: "user", content: text });
  article("user", text);
  answer();
}

export function stop() {
  if (!running) return;
  running.abort();
  $("prompt").focus();
}

export function prepareChat(withKey, changed) {
  request = withKey;
  announceChange = changed;
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  $("clear").addEventListener("click", () => {
    turns.length = 0;
    for (const old of document.querySelectorAll(".turn")) old.remove();
    $("empty").hidden = false;
    $("clear").disabled = true;
    $("prompt").focus();
  });
}
