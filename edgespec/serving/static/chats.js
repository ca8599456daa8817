// Conversations, kept in this browser: an entry of its storage for each, so that tabs do not overwrite each other's.

const PREFIX = "edgespec-chat-";
const OPEN = "edgespec-open-chat";
const TITLE_CHARS = 60;

// {id, at: milliseconds since 1970, settings, turns: [{role, content, thought, note, problem, unfinished}]}
export function freshChat(settings) {
  const id = crypto.getRandomValues(new Uint32Array(2)).join("-"); // randomUUID needs https
  return { id, at: Date.now(), settings: { ...settings, system: "" }, turns: [], answer: null };
}

export function titleOf(chat) {
  const first = chat.turns.find((turn) => turn.role === "user");
  const words = first ? first.content.replace(/\s+/g, " ").trim() : "New chat";
  return words.length > TITLE_CHARS ? `${words.slice(0, TITLE_CHARS - 1)}…` : words;
}

function isText(value) {
  return typeof value === "string";
}

function read(key) {
  try {
    const { id, at, settings, turns } = JSON.parse(localStorage.getItem(key));
    const right = turns.every((turn) => (turn.role === "user" || turn.role === "assistant") && isText(turn.content) && isText(turn.thought || ""));
    const texts = Object.fromEntries(Object.entries(settings).filter(([, value]) => isText(value)));
    if (!right || !turns.length || key !== PREFIX + id) return null;
    return { id, at: Number(at) || 0, settings: texts, turns, answer: null };
  } catch {
    return null; // of another version of this page, or a browser that keeps nothing
  }
}

/** The kept conversations, the newest first. */
export function keptChats() {
  let keys = [];
  try {
    keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  } catch {
    // None.
  }
  return keys.map(read).filter(Boolean).sort((a, b) => b.at - a.at);
}

export function isChat(key) {
  return key === null || key.startsWith(PREFIX);
}

/** Keep a conversation; if there is no room, the oldest others go. Returns what to tell the user. */
export function keepChat(chat) {
  const { id, at, settings, turns } = chat;
  const text = JSON.stringify({ id, at, settings, turns });
  let removed = 0;
  for (;;) {
    try {
      localStorage.setItem(PREFIX + id, text);
      return removed ? `This browser had no room left: the ${removed === 1 ? "oldest chat was" : `${removed} oldest chats were`} removed.` : "";
    } catch {
      const oldest = keptChats().filter((other) => other.id !== id).pop();
      if (!oldest) return "This browser does not keep this chat: copy what you need.";
      forgetChat(oldest);
      removed += 1;
    }
  }
}

export function forgetChat(chat) {
  try {
    localStorage.removeItem(PREFIX + chat.id);
  } catch {
    // It was not kept.
  }
}

/** The conversation that this tab had open, for when it is loaded again. */
export function openChat() {
  try {
    return read(PREFIX + sessionStorage.getItem(OPEN));
  } catch {
    return null;
  }
}

export function noteOpen(chat) {
  try {
    sessionStorage.setItem(OPEN, chat.id);
  } catch {
    // A new chat, then.
  }
}
