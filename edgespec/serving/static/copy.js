// Buttons that copy a text.

import { element } from "./ring.js";

const SAID_MS = 1500;

// Browsers give the clipboard to pages of https and of this machine; for others the old way works.
function copiedByHand(text) {
  const field = element("textarea", "hidden");
  field.value = text;
  (document.querySelector("dialog[open]") || document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedByHand(text);
  }
}

/** A button that copies `text()`, which is `what` in words, and says whether it did. */
export function copyButton(what, text) {
  const button = element("button", "quiet copy");
  button.type = "button";
  const say = (words) => button.replaceChildren(words, element("span", "hidden", ` ${what}`));
  button.addEventListener("click", async () => {
    say((await copied(text())) ? "Copied" : "Not copied");
    button.focus();
    setTimeout(say, SAID_MS, "Copy");
  });
  say("Copy");
  return button;
}
