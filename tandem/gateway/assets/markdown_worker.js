// Reads markdown in a thread of its own: for some texts that takes very long, and whoever waits for them ends this thread.

import { Marked } from "./vendor/marked.js";

const SAFE_ADDRESS = /^(?:https?:|mailto:)/i;
const DEEPEST_HEADING = 6;

const escaped = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  async: false,
  // The page has the levels above.
  walkTokens: (token) => { if (token.type === "heading") token.depth = Math.min(DEEPEST_HEADING, token.depth + 2); },
  renderer: {
    html: ({ text }) => escaped(text),
    // An image would tell a host of the model's choice that it is seen, and whatever the model writes into the address.
    image: ({ href, text }) => (SAFE_ADDRESS.test(href) ? `<a href="${escaped(href)}">${escaped(text || href)}</a>` : escaped(text)),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

self.onmessage = ({ data }) => {
  let html = null;
  try {
    html = marked.parse(data);
  } catch { /* Too many brackets within each other, for example. */ }
  self.postMessage({ html });
};
self.postMessage({ isReady: true });
