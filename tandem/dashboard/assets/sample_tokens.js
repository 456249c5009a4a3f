// The tokens of a sample, coloured by what is chosen.

import { make } from "./dom.js";
import { figure } from "./words.js";

const VISIBLE = { " ": "␣", "\n": "⏎\n", "\t": "⇥" };
const shown = (text) => (text === "" ? "·" : text.trim() === "" ? [...text].map((letter) => VISIBLE[letter] ?? letter).join("") : text);
const quoted = (text) => JSON.stringify(text).slice(1, -1);
const percent = (logprob) => (logprob === null ? "–" : `${+(Math.exp(logprob) * 100).toPrecision(3)} %`);
const FULL = 65;
const STRONG_ADVANTAGE = 2;
/** Nats: as of seven tokens with the same probability. */
const STRONG_ENTROPY = 2;

/** What is coloured, how strongly (from 0 to 1) and whether it is good, and what the colours mean. */
const COLOURS = {
  logprob: ["log-probability", (token) => [token.logprob === null ? 0 : 1 - Math.exp(token.logprob), "doubt"], "The stronger, the less likely the model thought the token."],
  advantage: ["advantage", (token, sample) => [Math.min(1, Math.abs(sample.advantage ?? 0) / STRONG_ADVANTAGE), sample.advantage > 0 ? "good" : "bad"],
    `Green: made more likely, red: less likely; full at an advantage of ${STRONG_ADVANTAGE}.`],
  entropy: ["entropy", (token) => [Math.min(1, (token.entropy ?? 0) / STRONG_ENTROPY), "doubt"], `The stronger, the less sure the policy was; full at ${STRONG_ENTROPY} nats.`],
  difference: ["model – sampling", (token) => [token.logprob === null || token.sampling === null ? 0 : Math.min(1, 2 * Math.abs(Math.exp(token.logprob) - Math.exp(token.sampling))), "doubt"],
    "The stronger, the further the token's probability is from that with which it was drawn; full at a half."],
};
let chosen = "logprob";

/** Returns why a colour is not one of this sample, or nothing. */
const missing = (colour, sample) => (colour === "advantage" && sample.advantage === null ? "not of one sample" : colour === "entropy" ? sample.entropy_missing : "");

/** Returns the tokens as a row of buttons, of which one is reached by Tab and the others by the arrows, and below it what is known of the chosen one. */
export function tokenView(sample) {
  const tokens = sample.token_list.map(([text, id, logprob, sampling, isSampled, entropy]) => ({ text, id, logprob, sampling, isSampled: Boolean(isSampled), entropy }));
  const detail = make("p", { className: "token-detail quiet" }, "Choose a token.");
  const row = make("div", { className: "tokens", attributes: { role: "group" }, aria: { label: "Tokens of the completion" } });
  const parts = tokens.map((token, number) => make("button", {
    type: "button", className: `token${token.isSampled ? "" : " given"}`, tabIndex: number ? -1 : 0, data: { number },
    aria: { label: `${quoted(token.text) || "part of a letter"}, ${token.isSampled ? percent(token.logprob) : "not sampled"}` },
  }, shown(token.text)));
  row.append(...parts);
  const meaning = make("span", { className: "quiet" });
  const paint = () => { meaning.textContent = COLOURS[chosen][2]; parts.forEach((part, number) => {
    const [share, hue] = tokens[number].isSampled ? COLOURS[chosen][1](tokens[number], sample) : [0, "doubt"];
    part.style.setProperty("--share", `${Math.round(share * FULL)}%`);
    part.style.setProperty("--hue", `var(--${hue === "doubt" ? "doubt-hue" : hue})`);
  }); };
  const select = make("select", { on: { change: () => { chosen = select.value; paint(); } } }, ...Object.entries(COLOURS).map(([value, [title]]) => {
    const why = missing(value, sample);
    return make("option", { value, disabled: Boolean(why) }, why ? `${title} (${why})` : title);
  }));
  if (missing(chosen, sample)) chosen = "logprob";
  select.value = chosen;
  paint();
  let current = 0;

  const choose = (number, focus) => {
    parts[current].tabIndex = -1;
    parts[current].removeAttribute("aria-current");
    current = number;
    parts[current].tabIndex = 0;
    parts[current].setAttribute("aria-current", "true");
    if (focus) parts[current].focus();
    const token = tokens[number];
    detail.textContent = token.isSampled
      ? `Token ${number + 1}, id ${token.id}: log-probability ${figure(token.logprob)} (${percent(token.logprob)}), when it was drawn ${figure(token.sampling)} (${percent(token.sampling)}), advantage ${figure(sample.advantage)}${token.entropy === null ? "" : `, entropy of the policy ${figure(token.entropy)} nats`}.`
      : `Token ${number + 1}, id ${token.id}: an observation, which the model has not sampled.`;
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
  const cut = sample.left_out ? make("p", { className: "quiet" }, `${sample.left_out} more tokens are not shown.`) : null;
  return make("div", {}, make("p", { className: "colour" }, make("label", {}, "Colour by ", select), " ", meaning), row, cut, detail);
}
