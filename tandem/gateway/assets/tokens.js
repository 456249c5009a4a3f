// The tokens of an answer, each with its probability and what the model could have said instead.

import { make } from "./dom.js";

const VISIBLE = { " ": "␣", "\n": "⏎\n", "\t": "⇥" };
const shown = (text) => (text === "" ? "∅" : text.trim() === "" ? [...text].map((letter) => VISIBLE[letter] ?? letter).join("") : text);
const quoted = (text) => JSON.stringify(text).slice(1, -1);
const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return `${value >= 99.95 ? 100 : value >= 0.1 ? value.toFixed(1) : value >= 0.001 ? value.toFixed(3) : "< 0.001"} %`;
};

/** Returns the tokens as a row of buttons, of which one is reached by Tab and the others by the arrows, and below it what is known of the chosen one. */
export function tokenView(tokens) {
  const detail = make("div", { className: "token-detail" }, "Choose a token to see its probability.");
  const row = make("div", { className: "tokens", attributes: { role: "group" }, aria: { label: "Tokens of the answer, by probability" } });
  const parts = tokens.map((token, number) => {
    const each = make("button", {
      type: "button", className: "token", tabIndex: number ? -1 : 0, data: { number },
      aria: { label: `${quoted(token.text) || "empty"}, ${percent(token.logprob)}` },
    }, shown(token.text));
    each.style.setProperty("--doubt", `${Math.round((1 - Math.exp(token.logprob)) * 55)}%`);
    return each;
  });
  row.append(...parts);
  let current = 0;

  const choose = (number, focus) => {
    if (number < 0 || number >= parts.length) return;
    parts[current].tabIndex = -1;
    parts[current].removeAttribute("aria-current");
    current = number;
    parts[current].tabIndex = 0;
    parts[current].setAttribute("aria-current", "true");
    if (focus) parts[current].focus();
    detail.replaceChildren(describe(tokens[number], number));
  };
  row.addEventListener("click", (event) => {
    const pressed = event.target.closest(".token");
    if (pressed) choose(Number(pressed.dataset.number), false);
  });
  row.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -parts.length, End: parts.length }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(parts.length - 1, current + step)), true);
  });
  return make("div", {}, row, detail);
}

function describe(token, number) {
  const rows = token.top.map(([text, logprob]) => make("tr", { className: text === token.text ? "drawn" : "" },
    make("td", {}, make("code", {}, quoted(text))), make("td", {}, percent(logprob)), make("td", {}, logprob.toFixed(3))));
  const head = make("tr", {}, ...["Token", "Probability", "Log-probability"].map((text) => make("th", { scope: "col" }, text)));
  return make("div", {},
    make("p", {}, `Token ${number + 1}: `, make("code", {}, quoted(token.text)), ` was drawn with ${percent(token.logprob)}.`),
    rows.length ? make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)) : null);
}
