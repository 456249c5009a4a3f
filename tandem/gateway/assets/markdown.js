// Markdown of a model, whom nobody trusts, as a piece of the document in which nothing runs and nothing is loaded.
//
// Four walls, each enough alone: HTML in the markdown is shown as text, DOMPurify keeps a short list of elements and attributes, the page's Content
// Security Policy runs no script but the gateway's own files and loads nothing from elsewhere, and Trusted Types forbid every other way to parse HTML.

import DOMPurify from "./vendor/purify.js";
import { button, copy, make } from "./dom.js";

/** Characters of text, and of HTML made of it, beyond which it is shown as it is. */
const MOST_CHARACTERS = 200_000;
const MOST_HTML = 4_000_000;
/** Characters of a block of text that is shown as it is. */
const BLOCK = 10_000;
/** Time for one text. */
const LONGEST_MS = 5000;
const PURIFY = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A" && node.hasAttribute("href")) {
    node.setAttribute("rel", "noopener noreferrer nofollow");
    node.setAttribute("target", "_blank");
  }
  const name = node.getAttribute?.("class");
  if (name && !(node.nodeName === "CODE" && /^language-[\w+#.-]{1,40}$/.test(name))) node.removeAttribute("class");
});

const policy = globalThis.trustedTypes?.createPolicy("worker", { createScriptURL: () => new URL("markdown_worker.js", import.meta.url).href });
let worker = null;
let last = Promise.resolve();

/** Resolves with the next message of the thread, or with null after `limit` milliseconds. */
const message = (limit) => new Promise((resolve) => {
  const timer = limit ? setTimeout(() => resolve(null), limit) : 0;
  worker.onmessage = ({ data }) => { clearTimeout(timer); resolve(data); };
});

/** Returns the HTML of `text`, which is not safe yet; null if it has none or it takes too long. */
async function parse(text) {
  if (!worker) {
    worker = new Worker(policy ? policy.createScriptURL("") : new URL("markdown_worker.js", import.meta.url), { type: "module" });
    await message();
  }
  worker.postMessage(text);
  const answer = await message(LONGEST_MS);
  if (answer === null) {
    worker.terminate();
    worker = null;
  }
  return answer?.html ?? null;
}

/** Returns a fragment that shows `text`, or null if it cannot be read as markdown in a reasonable time. */
export async function markdown(text) {
  if (text.length > MOST_CHARACTERS) return null;
  // One after the other, so that the time of each is its own.
  const mine = last.then(() => parse(text));
  last = mine.catch(() => {});
  const html = await mine;
  if (html === null || html.length > MOST_HTML) return null;
  const fragment = DOMPurify.sanitize(html, PURIFY);
  fragment.querySelectorAll("pre").forEach(dress);
  for (const table of fragment.querySelectorAll("table")) {
    // A wide table scrolls by itself.
    const frame = make("div", { className: "scroll", tabIndex: 0, attributes: { role: "group" }, aria: { label: "Table" } });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** Returns an element that shows `text` as it is. A long one is cut into blocks, so that the browser lays out only what is on the screen. */
export function plain(text) {
  const blocks = [];
  for (let at = 0; at < text.length;) {
    const line = text.lastIndexOf("\n", at + BLOCK) + 1;
    const end = at + BLOCK >= text.length ? text.length : line > at ? line : at + BLOCK;
    blocks.push(make("p", { className: "plain" }, text.slice(at, end)));
    at = end;
  }
  return blocks.length === 1 ? blocks[0] : make("div", { className: "blocks" }, ...blocks);
}

/** Puts a block of code into a frame with its language and a button that copies it. */
function dress(block) {
  const code = block.querySelector("code");
  const language = code?.className.replace("language-", "") || "text";
  const frame = make("div", { className: "code" },
    make("div", { className: "code-head" },
      make("span", {}, language),
      button("Copy", (event) => copy(block.textContent, event.target), { aria: { label: `Copy the code (${language})` } })));
  block.replaceWith(frame);
  block.tabIndex = 0;
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", `Code (${language})`);
  frame.append(block);
}
