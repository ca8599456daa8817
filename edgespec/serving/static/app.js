// The page: puts its parts together and keeps the stream of events open while somebody looks.

import { isAnswering, noteStatus, prepareChat } from "./chat.js";
import { chosenRequest, isWatched, prepareRing, showHealth, showRing, troubleOf } from "./ring.js";
import { noteUsual, prepareSettings, prepareTheme } from "./settings.js";
import { noteSegments } from "./picture.js";
import { ask, eventsOf, forgetKey, isKeyKept, keepKey, key, problemOf, takeKeyOfAddress } from "./stream.js";
import { addRuns, prepareTimeline, showStages } from "./timeline.js";
import { showTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const AGAIN = [500, 1000, 2000, 4000]; // milliseconds before the stream is opened again

let status = null;
let isTroubled = false;

// --- the key ---

let keyAsked = null;
let linkProblem = ""; // why the key of the address is none

function askKey(words) {
  keyAsked = keyAsked || new Promise((resolve, reject) => {
    $("key-note").textContent = words;
    $("key-note").hidden = !words;
    $("key-text").value = "";
    showKey(false);
    $("key-kept").checked = isKeyKept() || matchMedia("(pointer: coarse)").matches;
    const dialog = $("key");
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      keyAsked = null;
      const text = $("key-text").value.trim();
      $("key-text").value = "";
      if (!text) reject(new Error("this ring asks for a key"));
      else resolve(keepKey(text, $("key-kept").checked));
    }, { once: true });
    dialog.showModal();
  });
  return keyAsked;
}

async function withKey(path, options) {
  for (;;) {
    const response = await ask(path, options);
    if (response.status !== 401) return response;
    await askKey(linkProblem || (key() ? "This key counts not, or no longer." : ""));
    linkProblem = "";
  }
}

function showKey(isShown) {
  $("key-shown").checked = isShown;
  $("key-text").type = isShown ? "text" : "password";
}

$("key-shown").addEventListener("change", () => showKey($("key-shown").checked));
$("open-settings").addEventListener("click", () => { $("forget-key").hidden = !isKeyKept(); });
$("forget-key").addEventListener("click", () => {
  forgetKey();
  location.reload();
});

// --- what is going on ---

function showTrouble() {
  const text = status ? troubleOf(status, isAnswering()) : "";
  $("banner").hidden = !text;
  $("banner-text").textContent = text;
  document.body.dataset.troubled = String(Boolean(text));
  if (Boolean(text) === isTroubled) return;
  isTroubled = Boolean(text);
  // Once, not with every second that passes.
  $("alarm").textContent = text || "The ring is up again.";
}

function onStatus(news) {
  status = news;
  noteStatus(news);
  if (news.usual) noteUsual(news);
  if (news.reachable) $("no-draft").hidden = news.draft !== "";
  showHealth(news);
  showRing(news);
  showStages(news);
  showTrouble();
}

function onScene(scene) {
  if (!isWatched(scene)) return;
  showTree(scene);
  addRuns(scene);
  noteSegments(scene.segments.length);
  document.body.dataset.scene = scene.state;
}

function onEvent({ name, data }) {
  if (name === "status") onStatus(JSON.parse(data));
  if (name === "scene") onScene(JSON.parse(data));
}

let looking = null;

async function look() {
  if (looking) return;
  for (let failures = 0; document.visibilityState === "visible"; failures += 1) {
    looking = new AbortController();
    try {
      const response = await withKey(chosenRequest() ? `/events?request=${chosenRequest()}` : "/events", { signal: looking.signal });
      if (!response.ok) throw new Error((await problemOf(response)).text);
      for await (const event of eventsOf(response)) {
        failures = 0;
        onEvent(event);
      }
      throw new Error("The server of this page has ended the connection");
    } catch (error) {
      if (looking.signal.aborted) break;
      const text = error instanceof TypeError ? "The server of this page cannot be reached" : error.message;
      onStatus({ reachable: false, text });
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN[Math.min(failures, AGAIN.length - 1)]));
  }
  looking = null;
  if (document.visibilityState === "visible") look(); // it was hidden for a moment only
}

// A page that nobody sees costs the ring nothing.
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") look();
  else if (looking) looking.abort();
});

// --- views, on a narrow screen one at a time ---

function show(view) {
  document.querySelector("main").dataset.view = view;
  $("show-chat").setAttribute("aria-pressed", String(view === "chat"));
  $("show-ring").setAttribute("aria-pressed", String(view === "ring"));
}

$("show-chat").addEventListener("click", () => show("chat"));
$("show-ring").addEventListener("click", () => show("ring"));
document.querySelector(".skip").addEventListener("click", () => show("chat"));

// Another request is to be shown: the stream begins again, with that one.
function watchAnother() {
  if (status) onStatus(status);
  if (looking) looking.abort();
}

prepareTheme();
prepareRing(watchAnother);
prepareSettings();
prepareTimeline();
prepareChat(withKey, showTrouble);
linkProblem = await takeKeyOfAddress().catch(() => "");
look();
