// The samples of a run: of one step by prompt, found over all steps, and one with its tokens.

import { announce, button, make } from "./dom.js";
import { command } from "./part_recipe.js";
import { ask } from "./server.js";
import { tokenView } from "./sample_tokens.js";
import { count, figure } from "./words.js";

const WAIT_MS = 300;
const PROMPTS = 20;
const ONLY = [["", "all"], ["correct", "correct"], ["wrong", "wrong"], ["unscored", "not scored"], ["truncated", "truncated"]];
const ENDS = { length: ", truncated", repetition: ", ended because it repeats itself", abort: ", aborted" };

/** Returns what is known of a sample in one line. */
function facts(sample) {
  const parts = Object.entries(sample.parts);
  return [
    sample.reward === null ? "not scored" : `reward ${figure(sample.reward)}`, ...(parts.length > 1 ? parts.map(([name, value]) => `${name} ${figure(value)}`) : []),
    ...(sample.advantage === null ? [] : [`advantage ${figure(sample.advantage)}`]), `${count(sample.tokens)} tokens${ENDS[sample.finish] ?? ""}`,
    ...(sample.reason ? [sample.reason] : []),
  ].join(" · ");
}

export async function samplesPart({ page, name, run, place, signal }) {
  if (run.samples === null) {
    place.replaceChildren(make("p", { className: "quiet" }, "The run has no samples: it is on data, or its first rollout has not ended."));
    const part = {
      async overview(now) {
        if (now.samples === null) return;
        delete part.overview;
        Object.assign(part, await samplesPart({ page, name, run: now, place, signal }));
      },
    };
    return part;
  }
  let last = run.samples;
  let follows = true;
  let shown = 0;
  const step = make("input", { type: "number", min: 0, value: last, aria: { label: "Step" } });
  const slide = make("input", { type: "range", min: 0, max: last, value: last, aria: { label: "Step" } });
  const text = make("input", { type: "search", placeholder: "Text in prompt or completion", aria: { label: "Text in prompt or completion" } });
  const only = make("select", { aria: { label: "Which samples" } }, ...ONLY.map(([value, title]) => make("option", { value }, title)));
  const said = make("p", { className: "quiet" });
  const list = make("div", { className: "samples" });
  const more = button("More prompts", () => load(true).catch(page.failed), { hidden: true });
  let asked = new AbortController();

  const filter = () => ({ text: text.value, only: only.value });

  async function load(isMore = false) {
    asked.abort();
    asked = new AbortController();
    signal.addEventListener("abort", () => asked.abort());
    const offset = isMore ? shown : 0;
    const found = await ask("samples", { run: name, step: step.value, offset, limit: PROMPTS, ...filter() }, asked.signal);
    ({ last } = found);
    slide.max = last;
    slide.value = found.step;
    if (document.activeElement !== step) step.value = found.step;
    shown = offset + found.prompts.length;
    more.hidden = shown >= found.total;
    const isAll = found.matched === found.count;
    said.textContent = `Step ${found.step}: ${isAll ? "" : `${count(found.matched)} of `}${count(found.count)} samples, ${
      found.mean === null ? "none has a reward" : `mean reward ${figure(found.mean)} of all`}.`;
    const made = found.prompts.map((prompt) => make("article", { className: "prompt" }, make("pre", {}, prompt.prompt),
      make("div", { className: "group" }, ...prompt.samples.map((sample) => sampleView(sample, found.step)))));
    if (isMore) list.append(...made);
    else list.replaceChildren(...(made.length ? made : [make("p", { className: "quiet" }, "No sample of this step fits. Search all steps looks at the others.")]));
    page.worked();
  }

  function sampleView(sample, at, title = null) {
    const kind = sample.correct === null ? "" : sample.correct ? "right" : "wrong";
    const detail = make("div", { className: "detail", hidden: true });
    const opened = button("Tokens", async () => {
      detail.hidden = !detail.hidden;
      opened.setAttribute("aria-expanded", String(!detail.hidden));
      opened.closest(".sample").classList.toggle("wide", !detail.hidden);
      if (detail.hidden || detail.childElementCount) return;
      try {
        detail.replaceChildren(...whole(await ask("sample", { run: name, step: at, id: sample.id }, signal)));
      } catch (error) { page.failed(error); }
    }, { aria: { expanded: "false" } });
    const verdict = kind ? make("span", { className: `verdict ${kind === "right" ? "good" : "bad"}` }, kind === "right" ? "✓ " : "✗ ") : null;
    return make("div", { className: `sample ${kind}` }, title, make("pre", {}, sample.text || "(empty)"),
      make("p", {}, verdict, facts(sample), " ", opened, button("Same prompt", () => sameAs(sample, at), { aria: { label: "The same prompt in all steps" } })), detail);
  }

  function whole(sample) {
    const versions = sample.versions.length ? `weights ${sample.versions.join(", ")}` : "no weight version";
    const extra = Object.entries(sample.extra).map(([key, value]) => `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
    return [tokenView(sample), make("p", { className: "quiet" }, [`sample ${sample.id}`, versions, ...(sample.branches ? [`${sample.branches} branches`] : []), ...extra].join(" · ")),
      command(sample.replay)];
  }

  /** Shows what a search over steps finds, as far as it has looked; a button goes on. */
  async function over(title, parameters) {
    asked.abort();
    follows = false;
    const results = make("div", {});
    const state = make("p", { className: "quiet" });
    let next = null;
    let looked = 0;
    let found = 0;
    const on = button("Search on", () => go().catch(page.failed));
    const go = async () => {
      on.disabled = true;
      const answer = await ask("search", { run: name, before: next, limit: 40, ...parameters }, signal);
      ({ next } = answer);
      looked += answer.looked_at;
      found += answer.found.length;
      results.append(...answer.found.map((sample) => sampleView(sample, sample.step, make("p", { className: "of" }, make("b", {}, `step ${sample.step}`), sample.prompt ? ` ${sample.prompt}` : ""))));
      state.textContent = `${count(found)} samples in ${count(looked)} steps${next === null ? "." : `; it goes on at step ${next}.`}`;
      on.disabled = false;
      on.hidden = next === null;
      announce(state.textContent);
    };
    more.hidden = true;
    said.textContent = title;
    list.replaceChildren(make("p", {}, button("Back to the step", () => { follows = Number(step.value) === last; load().catch(page.failed); })), state, results, on);
    await go();
  }

  const sameAs = (sample, at) => over("The same prompt, the newest step first.", { same_step: at, same_id: sample.id }).catch(page.failed);
  const choose = (value) => {
    step.value = Math.max(0, Math.min(last, value));
    follows = Number(step.value) === last;
    load().catch(page.failed);
  };
  let waiting = null;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(() => load().catch(page.failed), WAIT_MS); };
  step.addEventListener("change", () => choose(Math.trunc(Number(step.value)) || 0));
  slide.addEventListener("input", () => { step.value = slide.value; follows = Number(slide.value) === last; soon(); });
  text.addEventListener("input", soon);
  only.addEventListener("change", () => load().catch(page.failed));
  const search = () => over("Samples of all steps that fit, the newest first.", filter()).catch(page.failed);
  place.replaceChildren(
    make("div", { className: "toolbar" }, make("label", {}, "step ", button("‹", () => choose(Number(step.value) - 1), { aria: { label: "The step before" } }), step,
      button("›", () => choose(Number(step.value) + 1), { aria: { label: "The next step" } })), make("div", { className: "slide" }, slide),
    make("div", { className: "find" }, text), only, button("Search all steps", search)), said, list, more);
  await load();
  // A reader who looks at the newest step is shown the next one; tokens that are open stay.
  return { changed: () => { if (follows && !list.querySelector(".detail:not([hidden])")) { step.value = ""; load().catch(page.failed); } } };
}
