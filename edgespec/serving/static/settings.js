// Settings and the colour scheme, kept in the browser.

const $ = (id) => document.getElementById(id);
const KEPT = "edgespec-settings";
const THEME = "edgespec-theme";
const DEFAULTS = { policy: "", temperature: "0", seed: "0", tokens: "256" };
const FIELDS = Object.keys(DEFAULTS);

export const settings = { ...DEFAULTS, ...kept() };

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT)) || {};
    return Object.fromEntries(FIELDS.filter((f) => typeof found[f] === "string").map((f) => [f, found[f]]));
  } catch {
    return {};
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
    if (input.checkValidity() && (input.value !== "" || field === "seed" || field === "policy")) {
      settings[field] = input.value;
    }
  }
  keep(KEPT, JSON.stringify(settings));
}

// What they mean in a request.
export function parameters() {
  const wanted = { temperature: Number(settings.temperature), max_tokens: Number(settings.tokens) };
  if (settings.policy) wanted.policy = settings.policy;
  if (settings.seed !== "") wanted.seed = Number(settings.seed);
  return wanted;
}

export function prepareSettings() {
  show();
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
