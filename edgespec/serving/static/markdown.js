// Markdown of an answer, as elements: a model's text makes only those that are named here, and no HTML.

import MarkdownIt from "./markdown-it.esm.min.mjs";

import { copyButton } from "./copy.js";
import { element } from "./ring.js";

const parser = new MarkdownIt({ html: false, linkify: false, breaks: true });

const TAGS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li",
  table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td",
  strong: "strong", em: "em", s: "s",
};
const SAFE_LINK = /^(https?|mailto):/i;

// One block of the answer: its tokens, from the one that opens it to the one that closes it.
function blocksOf(tokens) {
  const blocks = [];
  let begun = 0;
  tokens.forEach((token, index) => {
    if (token.level > 0 || token.nesting > 0) return;
    blocks.push(tokens.slice(begun, index + 1));
    begun = index + 1;
  });
  return blocks;
}

const shown = new WeakMap(); // by element: the source of each block in it

/** Show an answer so far. Blocks that did not change stay, with what is selected in them. */
export function showMarkdown(body, text) {
  const lines = text.split("\n");
  const blocks = blocksOf(parser.parse(text, {}));
  const sources = blocks.map(([first]) => `${first.type}\n${lines.slice(...(first.map || [0])).join("\n")}`);
  const before = shown.get(body) || [];
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same += 1;
  while (body.childNodes.length > same) body.lastChild.remove();
  for (const block of blocks.slice(same)) body.append(built(block));
  shown.set(body, sources);
}

function built(tokens) {
  const box = document.createDocumentFragment();
  const open = [box];
  for (const token of tokens) {
    const at = open[open.length - 1];
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) open.push(begun(token, at));
    else if (token.type === "inline") at.append(built(token.children));
    else at.append(leaf(token));
  }
  return box;
}

function begun(token, at) {
  const kind = token.type.replace(/_open$/, "");
  if (token.hidden) return at; // a paragraph of a tight list
  if (kind === "link") return link(token.attrGet("href") || "", at);
  // The page's own headings are above those of an answer.
  const tag = kind === "heading" ? `h${Math.min(Number(token.tag.slice(1)) + 3, 6)}` : TAGS[kind] || "span";
  const made = element(tag);
  if (kind === "ordered_list" && token.attrGet("start")) made.start = Number(token.attrGet("start"));
  const align = /text-align:(\w+)/.exec(token.attrGet("style") || "");
  if (align) made.style.textAlign = align[1];
  if (kind === "table") {
    const box = element("div", "table");
    box.tabIndex = 0;
    box.append(made);
    at.append(box);
  } else {
    at.append(made);
  }
  return made;
}

function link(address, at) {
  const made = SAFE_LINK.test(address) ? element("a") : element("span");
  if (SAFE_LINK.test(address)) {
    made.href = address;
    made.target = "_blank";
    made.rel = "noopener noreferrer";
    made.title = address;
  }
  at.append(made);
  return made;
}

function leaf(token) {
  switch (token.type) {
    case "text":
      return document.createTextNode(token.content);
    case "softbreak":
    case "hardbreak":
      return element("br");
    case "hr":
      return element("hr");
    case "code_inline":
      return element("code", "", token.content);
    case "fence":
    case "code_block":
      return code(token.content.replace(/\n$/, ""), token.info.trim().split(/\s+/)[0]);
    case "image": { // nothing is fetched: where it is, in place of it
      const box = document.createDocumentFragment();
      link(token.attrGet("src") || "", box).textContent = token.content || "picture";
      return box;
    }
    default:
      return document.createTextNode(token.content);
  }
}

function code(text, language) {
  const box = element("figure", "code");
  const bar = element("figcaption", "", language || "code");
  bar.append(copyButton("the code", () => text));
  const pre = element("pre");
  pre.tabIndex = 0;
  pre.append(element("code", "", text));
  box.append(bar, pre);
  return box;
}
