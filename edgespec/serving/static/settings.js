// The settings of a conversation, and the colour scheme; what was set last is kept for new ones.

const $ = (id) => document.getElementById(id);
const KEPT = "edgespec-settings-2";
const THEME = "edgespec-theme";
const DEFAULTS = { system: "", policy: "", temperature: "", top_p: "", seed: "0", tokens: "512" };
const FIELDS = Object.keys(DEFAULTS);
const UNSET = { temperature: 0, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1 }; // says nothing
const MAY_BE_EMPTY = ["system", "policy", "temperature", "top_p", "seed"];

let settings = { ...DEFAULTS }; // of the conversation that is shown
let changed = () => {};

/** What a new conversation begins with. */
export function latestSettings() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT)) || {};
    const texts = FIELDS.filter((f) => typeof found[f] === "string").map((f) => [f, found[f]]);
    return { ...DEFAULTS, ...Object.fromEntries(texts) };
  } catch {
    return { ...DEFAULTS };
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // A browser that keeps nothing has the defaults after the next load.
  }
}

function show() {
  for (const field of FIELDS) $(field).value = settings[field];
}

function take() {
  for (const field of FIELDS) {
    const input = $(field);
    if (input.checkValidity() && (input.value !== "" || MAY_BE_EMPTY.includes(field))) {
      settings[field] = input.value;
    }
  }
  settings.system = settings.system.trim();
  keep(KEPT, JSON.stringify({ ...settings, system: "" }));
  changed();
}

/** Show and change these settings from now on; `whenChanged()` is called when the user did. */
export function showSettingsOf(its, whenChanged) {
  settings = Object.assign(its, { ...DEFAULTS, ...its });
  changed = whenChanged;
  show();
}

/** What settings mean in a request; what is empty is as the model publishes it. */
export function parameters({ policy, temperature, top_p, seed, tokens }) {
  const wanted = { max_tokens: Number(tokens) };
  if (policy) wanted.policy = policy;
  for (const [name, value] of Object.entries({ temperature, top_p, seed })) {
    if (value !== "") wanted[name] = Number(value);
  }
  return wanted;
}

/** How the model samples where a setting is empty. */
export function noteUsual({ usual, model, context_length: context, thinking, tools, draft }) {
  const set = Object.entries(usual).filter(([name, value]) => value !== UNSET[name]);
  const own = set.map(([name, value]) => `${name.replaceAll("_", " ")} ${Number(value.toPrecision(6))}`);
  const can = [thinking ? "thinks before it answers" : "", tools ? "calls tools" : "", draft ? `guesses by ${draft}` : "no draft"];
  $("own-settings").textContent = `${model}: ${own.length ? own.join(", ") : "no settings of its own"}; ${context} tokens of context; ${can.filter(Boolean).join(", ")}.`;
  $("temperature").placeholder = `${usual.temperature}, the model’s own`;
  $("top_p").placeholder = `${usual.top_p}, the model’s own`;
}

export function prepareSettings() {
  $("open-settings").addEventListener("click", () => {
    show();
    $("settings").showModal();
  });
  for (const field of FIELDS) $(field).addEventListener("change", take);
  $("settings").addEventListener("close", take);
  $("defaults").addEventListener("click", () => {
    Object.assign(settings, DEFAULTS);
    show();
    take();
  });
}

// --- light and dark ---

const CYCLE = { auto: "light", light: "dark", dark: "auto" };

export function prepareTheme() {
  let theme = "auto";
  try {
    theme = CYCLE[localStorage.getItem(THEME)] ? localStorage.getItem(THEME) : "auto";
  } catch {
    // As the system has it.
  }
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
    document.dispatchEvent(new Event("themechange"));
  };
  $("theme").addEventListener("click", () => {
    theme = CYCLE[theme];
    keep(THEME, theme);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
