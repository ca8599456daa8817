// Requests with the key, which a tab or this device keeps, and server-sent events read from a response (EventSource
// sends no key).

const KEY = "edgespec-key";

export function key() {
  try {
    return sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}

/** Keep a key for this tab, or for this device. */
export function keepKey(text, onDevice) {
  try {
    forgetKey();
    (onDevice ? localStorage : sessionStorage).setItem(KEY, text);
  } catch {
    // A browser that keeps nothing asks again after the next load.
  }
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
}

/** Whether this device keeps one. */
export function isKeyKept() {
  try {
    return Boolean(localStorage.getItem(KEY));
  } catch {
    return false;
  }
}

/** If the address brings a key for one use, exchange it for one that this device keeps; returns why it is none. */
export async function takeKeyOfAddress() {
  const found = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!found) return "";
  history.replaceState(null, "", location.pathname);
  const response = await fetch("/key", { method: "POST", headers: { authorization: `Bearer ${found}` }, cache: "no-store" });
  if (!response.ok) return (await problemOf(response)).text;
  keepKey((await response.json()).key, true);
  return "";
}

export function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  return fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
}

// What the server says about a request that failed, in words.
export async function problemOf(response) {
  try {
    const { error } = await response.json();
    return { text: String(error.message), code: String(error.code) };
  } catch {
    return { text: `the server answered ${response.status}`, code: "" };
  }
}

// Every event of a response: {name, data, comment}.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const event = { name: "", data: "", comment: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith(":")) event.comment = line.slice(1).trim();
    else if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
