// How turns of a conversation look.

import { button, copy, make } from "./dom.js";
import { markdown, plain } from "./markdown.js";
import { tokenView } from "./tokens.js";

const SHORTEST_WAIT_MS = 33;
const LONGEST_WAIT_MS = 1000;
const REASONS = {
  length: "Ended at the limit of tokens.", content_filter: "Ended by a filter.", stopped: "Stopped.", interrupted: "The page was closed before the end.",
};

/** Returns the element of a user's turn. `edited(text)` is called with a new text. */
export function userTurn(turn, edited) {
  const body = make("div", { className: "bubble prose" }, plain(turn.text));
  const actions = make("div", { className: "actions" },
    button("Edit", () => edit(element, turn.text, edited), { className: "edit" }),
    button("Copy", (event) => copy(turn.text, event.target)));
  const element = make("article", { className: "turn user", aria: { label: "You" } }, body, actions);
  return element;
}

function edit(element, text, edited) {
  const before = [...element.childNodes];
  const field = make("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), aria: { label: "Your message" } });
  const close = () => { element.replaceChildren(...before); element.querySelector(".edit").focus(); };
  const form = make("form", { className: "editor", on: {
    submit: (event) => { event.preventDefault(); if (field.value.trim()) edited(field.value); },
    keydown: (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    },
  } }, field, make("div", { className: "actions" }, make("button", { type: "submit", className: "primary" }, "Send"), button("Cancel", close)));
  element.replaceChildren(form);
  field.focus();
}

/** One answer: `element`, and `draw(answer, isRunning)`, which shows it as far as it has come. */
export class AnswerView {
  /** `again` is called to draw the answer once more. */
  constructor(answer, again) {
    this.showsTokens = false;
    this.timer = 0;
    this.drawing = 0;
    this.cost = 0;
    this.body = make("div", { className: "prose" });
    this.note = make("p", { className: "note" });
    this.facts = make("p", { className: "facts" });
    this.probabilities = button("Probabilities", () => this.toggle(), { aria: { pressed: "false" } });
    this.actions = make("div", { className: "actions" },
      button("Copy", (event) => copy(this.answer.text, event.target)), button("Regenerate", again, { className: "again" }), this.probabilities);
    this.element = make("div", { className: "answer", attributes: { role: "group" }, aria: { label: `Answer of ${answer.model}` } },
      make("h2", {}, answer.model), this.body, this.note, this.actions, this.facts);
  }

  toggle() {
    this.showsTokens = !this.showsTokens;
    return this.draw(this.answer, false);
  }

  /** Draws soon, at most as often as leaves most of the time to the rest of the page: a long text takes longer each time. */
  drawSoon(answer) {
    this.answer = answer;
    if (this.timer) return;
    this.timer = setTimeout(async () => {
      const drawn = this.answer.text.length;
      await this.draw(this.answer, true);
      this.timer = 0;
      if (this.isRunning && this.answer.text.length > drawn) this.drawSoon(this.answer);
    }, Math.min(LONGEST_WAIT_MS, Math.max(SHORTEST_WAIT_MS, 4 * this.cost)));
  }

  /** Shows `answer`. Of two drawings at once, the later one is seen. */
  async draw(answer, isRunning) {
    if (isRunning && this.isRunning === false) return;
    this.answer = answer;
    this.isRunning = isRunning;
    this.drawing += 1;
    const drawing = this.drawing;
    this.element.setAttribute("aria-busy", "true");
    const showsTokens = this.showsTokens && answer.tokens.length > 0 && !isRunning;
    const reasoning = answer.reasoning ? await this.read(answer.reasoning) : null;
    const text = showsTokens ? tokenView(answer.tokens) : await this.read(answer.text);
    if (drawing !== this.drawing) return;
    const began = performance.now();
    this.body.replaceChildren(
      ...(reasoning ? [make("details", { className: "reasoning", open: isRunning && !answer.text }, make("summary", {}, "Reasoning"), reasoning)] : []), text);
    this.element.classList.toggle("running", isRunning);
    this.probabilities.hidden = answer.tokens.length === 0;
    this.probabilities.setAttribute("aria-pressed", String(showsTokens));
    this.actions.hidden = isRunning;
    this.note.className = answer.error ? "note bad" : "note";
    this.note.textContent = answer.error || (isRunning ? "" : REASONS[answer.finish] ?? (answer.text || answer.reasoning ? "" : "The answer is empty."));
    this.note.hidden = !this.note.textContent;
    this.facts.textContent = isRunning ? "" : factsOf(answer).join(" · ");
    this.element.setAttribute("aria-busy", String(isRunning));
    this.cost = performance.now() - began;
  }

  /** Returns `text` as markdown. One that once took too long is shown as it is from then on, while more of it comes. */
  async read(text) {
    const fragment = this.isPlain ? null : await markdown(text);
    this.isPlain = fragment === null;
    return fragment ?? plain(text);
  }
}

/** Returns a few words on how an answer came to be. */
function factsOf(answer) {
  const count = answer.usage?.completion_tokens;
  const seconds = answer.seconds && answer.firstS !== null ? answer.seconds - answer.firstS : 0;
  return [
    answer.versions.length ? `weights ${answer.versions.join(", ")}` : "",
    count ? `${count} tokens` : "",
    answer.firstS === null ? "" : `first after ${answer.firstS.toFixed(2)} s`,
    count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(0)} tokens/s` : "",
    answer.isPlain ? "plain text, as the model has no chat template" : "",
  ].filter(Boolean);
}
