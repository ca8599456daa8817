// The chat: conversations whose answers are streamed, each into its own, also while another one is shown.

import { forgetChat, freshChat, isChat, keepChat, keptChats, noteOpen, openChat, titleOf } from "./chats.js";
import { copyButton } from "./copy.js";
import { showMarkdown } from "./markdown.js";
import { element } from "./ring.js";
import { latestSettings, parameters, showSettingsOf } from "./settings.js";
import { eventsOf, problemOf } from "./stream.js";

const $ = (id) => document.getElementById(id);
const KEEP_MS = 1000; // between two times that an answer is kept while it comes

let current = null; // the conversation that is shown
const running = new Map(); // by id: the conversations that are being answered
const views = new Map(); // by turn: its elements, of the conversation that is shown
let plain = false; // the model has no chat template
let plainSpeed = 0; // tokens a second of plain decoding, 0: not known
let request = null; // sends with the key
let leaving = false; // the page is closed or loaded again: what breaks now is no failure
let announceChange = () => {};

export const isAnswering = () => running.size > 0;

/** What the ring says once a second. */
export function noteStatus(status) {
  if (!status.reachable) return;
  plainSpeed = status.plain || 0;
  $("hello-model").textContent = status.model || "the model";
  if (status.running > 1) for (const chat of running.values()) chat.answer.beside = true;
}

// --- what is asked ---

// Without answers that gave no text: templates refuse two questions in a row.
function messagesOf(chat) {
  const told = [];
  for (const { role, content, thought } of chat.turns) {
    if (!content) continue;
    if (told.length && told[told.length - 1].role === role) told.pop();
    // The model's template keeps what it thought, or drops it.
    told.push(thought ? { role, content, reasoning_content: thought } : { role, content });
  }
  const { system } = chat.settings;
  return system ? [{ role: "system", content: system }, ...told] : told;
}

function body(chat) {
  const common = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...parameters(chat.settings) };
  const messages = messagesOf(chat);
  if (!plain) return ["/v1/chat/completions", { messages, ...common }];
  return ["/v1/completions", { prompt: messages.map((turn) => turn.content).join("\n"), ...common }];
}

// The response; a model without a chat template is asked to go on with the text instead.
async function opened(chat, signal) {
  const [path, asked] = body(chat);
  const response = await request(path, { body: asked, signal });
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (!plain && response.status === 400 && /no chat template/i.test(problem.text)) {
    plain = true;
    return opened(chat, signal);
  }
  throw new Error(problem.text);
}

async function answer(chat) {
  const controller = new AbortController();
  const told = { controller, usage: null, reason: "", first: 0, last: 0, doing: "waiting for the first token", waits: false, beside: false, kept: 0 };
  const question = [...chat.turns];
  const turn = { role: "assistant", content: "", thought: "", note: "", problem: "", unfinished: true };
  const asking = { ...chat, turns: question };
  chat.turns.push(turn);
  chat.answer = told;
  chat.at = Date.now();
  running.set(chat.id, chat);
  keep(chat);
  if (chat === current) render();
  showState();
  try {
    const response = await opened(asking, controller.signal);
    for await (const event of eventsOf(response)) take(event, told, turn, chat);
    if (!told.reason && !turn.problem) turn.problem = "the connection to the server broke";
  } catch (error) {
    if (controller.signal.aborted) told.reason = "stopped";
    else turn.problem = error.message || String(error);
  }
  finish(chat, told, turn);
}

function take(event, told, turn, chat) {
  if (event.comment) {
    told.doing = event.comment;
    told.waits = true;
    paintSoon(turn);
  }
  if (!event.data || event.data === "[DONE]") return;
  const piece = JSON.parse(event.data);
  if (piece.error) {
    turn.problem = String(piece.error.message);
    return;
  }
  if (piece.usage) told.usage = piece.usage;
  const choice = piece.choices && piece.choices[0];
  if (!choice) return;
  if (choice.finish_reason) told.reason = choice.finish_reason;
  const text = (choice.delta ? choice.delta.content : choice.text) || "";
  const thought = (choice.delta && choice.delta.reasoning_content) || "";
  if (!text && !thought) return;
  told.last = performance.now();
  told.first = told.first || told.last;
  told.doing = text ? "answering" : "thinking";
  told.waits = false;
  turn.content += text;
  turn.thought += thought;
  paintSoon(turn);
  if (told.last - told.kept > KEEP_MS) {
    told.kept = told.last;
    keep(chat);
  }
}

// While it comes, by this browser's clock.
function doingWords(told) {
  const tokens = told.usage ? told.usage.completion_tokens : 0;
  const seconds = (told.last - told.first) / 1000;
  if (told.waits || tokens < 2 || !(seconds > 0)) return told.doing;
  return `${told.doing} · ${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)} a second`;
}

// A person's words first: how fast, and what it would be without guesses.
function speedWords(usage, told) {
  const ring = usage.edgespec || {};
  const tokens = usage.completion_tokens - 1; // behind the first, for which the prompt is read
  const seconds = ring.seconds ? ring.seconds - ring.first_token_seconds : (told.last - told.first) / 1000;
  if (tokens < 1 || !(seconds > 0)) return "";
  const speed = tokens / seconds;
  const words = `${speed.toFixed(1)} tokens a second`;
  if (!plainSpeed || ring.policy === "autoregressive" || told.beside) return told.beside ? `${words}, beside other answers` : words;
  return `${words}, about ${(speed / plainSpeed).toFixed(1)} times plain decoding (${plainSpeed.toFixed(1)}, estimated)`;
}

function figures(told) {
  const parts = [];
  if (told.reason === "stopped") parts.push("stopped");
  if (told.reason === "length") parts.push("cut at the limit of tokens");
  const { usage } = told;
  if (!usage) return parts.join(" · ");
  const ring = usage.edgespec || {};
  const speed = speedWords(usage, told);
  if (speed) parts.push(speed);
  const trips = ring.trips > 0 ? `, ${(usage.completion_tokens / ring.trips).toFixed(2)} a trip` : "";
  parts.push(`${usage.completion_tokens} ${usage.completion_tokens === 1 ? "token" : "tokens"}${trips}`);
  const cached = usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
  parts.push(`prompt of ${usage.prompt_tokens} tokens, ${cached} of them cached`);
  if (ring.sampled) parts.push(ring.sampled);
  if (ring.looped) parts.push(ring.looped);
  if (ring.recoveries) parts.push(`the ring was lost ${ring.recoveries === 1 ? "once" : `${ring.recoveries} times`} meanwhile`);
  return parts.join(" · ");
}

function finish(chat, told, turn) {
  if (leaving) return;
  turn.unfinished = false;
  turn.note = figures(told);
  chat.answer = null;
  chat.at = Date.now();
  running.delete(chat.id);
  keep(chat);
  if (chat === current) {
    const follow = atEnd();
    paint(turn);
    if (follow) toEnd();
    const ending = turn.problem ? `The answer failed: ${turn.problem}` : `Answer${told.reason === "stopped" ? ", stopped" : ""}: ${turn.content}`;
    $("said").textContent = ending.slice(0, 4000);
  }
  showState();
}

function keep(chat) {
  if (chat.forgotten) return;
  const problem = keepChat(chat);
  if (problem) $("chats-problem").textContent = problem;
  $("chats-problem").hidden = !$("chats-problem").textContent;
}

// --- what is shown ---

function article(turn) {
  const isUser = turn.role === "user";
  const made = element("article", `turn ${turn.role}`);
  made.append(element("h3", "who", isUser ? "You" : "Answer"));
  const thought = element("details", "thought");
  thought.append(element("summary", "", "What it thought"), element("p", "", ""));
  const text = element("div", isUser ? "text" : "text markdown");
  if (!isUser) made.append(thought);
  made.append(text);
  $("turns").append(made);
  views.set(turn, { made, thought, text, end: null });
  if (!isUser) {
    paint(turn);
    return;
  }
  text.textContent = turn.content;
  made.append(action("Edit", "this question", () => edit(turn, made)));
}

function action(words, about, whenClicked) {
  const button = element("button", `quiet ${words.toLowerCase()}`, words);
  button.type = "button";
  button.append(element("span", "hidden", ` ${about}`));
  button.addEventListener("click", whenClicked);
  return button;
}

// The question as a text to change. What comes of it is another chat: nothing of this one is lost.
function edit(turn, made) {
  const form = element("form", "editing");
  const text = element("textarea");
  text.value = turn.content;
  text.rows = Math.min(10, 1 + turn.content.split("\n").length);
  text.setAttribute("aria-label", "The question, changed");
  const row = element("div", "actions");
  const back = action("Cancel", "the change", () => {
    form.replaceWith(...before);
    made.querySelector(".edit").focus();
  });
  const again = element("button", "primary", "Ask in a new chat");
  row.append(again, back);
  form.append(text, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!text.value.trim()) return;
    branch(current.turns.indexOf(turn));
    send(text.value);
  });
  const before = [...made.childNodes].slice(1);
  before[0].replaceWith(form);
  for (const part of before.slice(1)) part.remove();
  text.focus();
}

/** Another chat that begins with the first so many turns of this one. */
function branch(count) {
  const begun = current.turns.slice(0, count).map((turn) => ({ ...turn, unfinished: false }));
  const made = { ...freshChat(current.settings), turns: begun };
  made.settings.system = current.settings.system || "";
  if (begun.length) keep(made);
  show(made);
  $("prompt").focus();
}

function paint(turn) {
  const view = views.get(turn);
  if (!view) return; // another conversation is shown
  view.thought.hidden = !turn.thought;
  view.thought.lastChild.textContent = turn.thought || "";
  showMarkdown(view.text, turn.content.trimStart());
  const told = current.answer && current.turns[current.turns.length - 1] === turn ? current.answer : null;
  view.made.dataset.waits = String(Boolean(told && told.waits));
  if (told && view.end) {
    view.end.firstChild.textContent = doingWords(told);
    return;
  }
  if (view.end) view.end.remove();
  view.end = told ? coming(told) : ended(turn);
  view.made.append(view.end);
}

function coming(told) {
  const box = element("div", "end");
  box.append(element("p", "note doing", told.doing));
  return box;
}

function ended(turn) {
  const box = element("div", "end");
  if (turn.problem) box.append(element("p", "warning", `The answer failed: ${turn.problem}`));
  const cut = turn.unfinished ? "cut: the page was closed meanwhile" : "";
  if (cut || turn.note) box.append(element("p", "note figures", cut || turn.note));
  const row = element("div", "actions");
  if (turn.content) {
    row.append(copyButton("the answer", () => turn.content.trim()));
    row.append(action("Branch", "a new chat from here", () => branch(current.turns.indexOf(turn) + 1)));
  }
  if (turn === current.turns[current.turns.length - 1]) {
    const again = element("button", "quiet again", "Regenerate");
    again.type = "button";
    again.addEventListener("click", regenerate);
    row.append(again);
  }
  if (row.childNodes.length) box.append(row);
  return box;
}

const waiting = new Set(); // turns that are painted with the next frame

function paintSoon(turn) {
  if (!waiting.size) {
    requestAnimationFrame(() => {
      const follow = atEnd();
      const turns = [...waiting];
      waiting.clear();
      for (const one of turns) paint(one);
      if (follow) toEnd();
    });
  }
  waiting.add(turn);
}

function atEnd() {
  const box = $("turns");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function toEnd() {
  $("turns").scrollTop = $("turns").scrollHeight;
}

function render() {
  views.clear();
  for (const old of document.querySelectorAll(".turn")) old.remove();
  for (const turn of current.turns) article(turn);
  $("empty").hidden = current.turns.length > 0;
  $("chat-title").textContent = titleOf(current);
  toEnd();
}

function showState() {
  const answering = current.answer !== null;
  $("send").hidden = answering;
  $("stop").hidden = !answering;
  $("clear").disabled = current.turns.length === 0;
  const others = keptChats().filter((chat) => chat.id !== current.id).length;
  $("open-chats").textContent = others ? `Chats (${others + (current.turns.length ? 1 : 0)})` : "Chats";
  announceChange();
}

// --- what the user does ---

function show(chat) {
  current = running.get(chat.id) || chat;
  noteOpen(current);
  showSettingsOf(current.settings, () => { if (current.turns.length) keep(current); });
  render();
  showState();
}

function regenerate() {
  if (current.answer) return;
  if (current.turns[current.turns.length - 1].role === "assistant") current.turns.pop();
  answer(current);
  $("prompt").focus();
}

function send(words) {
  const text = words.trim();
  if (!text || current.answer) return;
  $("prompt").value = "";
  $("chats-problem").textContent = "";
  current.turns.push({ role: "user", content: text });
  answer(current);
}

export function stop() {
  if (!current.answer) return;
  current.answer.controller.abort();
  $("prompt").focus();
}

function forget(chat) {
  const known = running.get(chat.id);
  if (known) {
    known.forgotten = true;
    known.answer.controller.abort();
  }
  forgetChat(chat);
  if (chat.id === current.id) show(freshChat(latestSettings()));
  else showState();
}

// Two presses, so that one by mistake deletes nothing.
function deleteButton(words, about, whenSure) {
  const button = element("button", "quiet");
  button.type = "button";
  let isSure = false;
  const say = (sure) => {
    isSure = sure;
    button.replaceChildren(sure ? "Really?" : words, element("span", "hidden", ` ${about}`));
  };
  button.addEventListener("click", () => (isSure ? whenSure() : say(true)));
  button.addEventListener("blur", () => say(false));
  say(false);
  return button;
}

// A part of the first turn that has the words, around them; "" if none has.
function foundIn(chat, words) {
  for (const { content } of chat.turns) {
    const at = content.toLowerCase().indexOf(words);
    if (at < 0) continue;
    const from = Math.max(at - 20, 0);
    return `${from ? "…" : ""}${content.slice(from, at + words.length + 40).replace(/\s+/g, " ")}…`;
  }
  return "";
}

function listChats() {
  const list = $("chat-list");
  const words = $("search").value.trim().toLowerCase();
  const all = keptChats();
  const chats = words ? all.filter((chat) => foundIn(chat, words)) : all;
  list.replaceChildren(...chats.map((chat) => {
    const item = element("li");
    const open = element("button", "open", titleOf(chat));
    open.type = "button";
    open.setAttribute("aria-current", String(chat.id === current.id));
    const when = running.has(chat.id) ? "is being answered" : new Date(chat.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(element("span", "note", words ? `${when} · ${foundIn(chat, words)}` : when));
    open.addEventListener("click", () => {
      $("chats").close();
      if (chat.id !== current.id) show(chat);
      $("prompt").focus();
    });
    const remove = deleteButton("Delete", `“${titleOf(chat)}”`, () => {
      forget(chat);
      listChats();
      $("chats-done").focus();
    });
    item.append(open, remove);
    return item;
  }));
  $("no-chats").hidden = chats.length > 0;
  $("no-chats").textContent = all.length ? "None has these words." : "There are none yet.";
  $("forget-all").replaceChildren(...(chats.length > 1 && !words ? [deleteButton("Delete all", "chats", () => {
    for (const chat of chats) forget(chat);
    listChats();
    $("chats-done").focus();
  })] : []));
}

export function prepareChat(withKey, changed) {
  request = withKey;
  announceChange = changed;
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send($("prompt").value);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send($("prompt").value);
  });
  $("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  for (const idea of document.querySelectorAll("#ideas button")) {
    idea.addEventListener("click", () => {
      send(idea.textContent);
      $("prompt").focus();
    });
  }
  $("clear").addEventListener("click", () => {
    show(freshChat(latestSettings()));
    $("prompt").focus();
  });
  $("search").addEventListener("input", listChats);
  $("open-chats").addEventListener("click", () => {
    $("search").value = "";
    listChats();
    $("chats").showModal();
  });
  addEventListener("storage", (event) => {
    if (isChat(event.key)) showState(); // another tab has one more, or one less
  });
  addEventListener("pagehide", () => {
    leaving = true;
    for (const chat of running.values()) keep(chat);
  });
  addEventListener("pageshow", (event) => {
    if (event.persisted) location.reload(); // its answers were cut
  });
  show(openChat() || freshChat(latestSettings()));
}
