// Takes the place of server.js in a page that was written to a file: what the views ask is answered from the data in the page.

import { byId } from "./dom.js";

const data = JSON.parse(byId("frozen").textContent);

/** What the page cannot answer. `status`: as the dashboard's, where there is no such thing. */
export class ServerError extends Error {
  constructor(message, status = 404) {
    super(message);
    this.status = status;
  }

  get needsToken() { return false; }
}

export const keepToken = () => {};
export const takeToken = () => {};

/** The view of an address that names none: the run, or the comparison of several. */
export function firstView() {
  const names = Object.keys(data.runs).map(encodeURIComponent);
  return data.compare ? `#/compare/${data.compare.results.map((run) => encodeURIComponent(run.name)).join("/")}` : `#/run/${names[0]}/curves`;
}

/** Nothing changes in a page that was written. */
export async function follow() {}

function runOf(name) {
  if (!Object.hasOwn(data.runs, name)) throw new ServerError(`There is no run '${name}' in this page.`);
  return data.runs[name];
}

const notHere = (what) => new ServerError(`${what} not in this page; 'tandem dashboard' has them all.`);

/** Returns the points of curves between two places of the horizontal axis, and one more at each side, so that a line goes on. */
function between(curves, axis, { key: keys, from = null, to = null }) {
  const x = axis ? curves.x[axis] : curves.x;
  let start = 0;
  let stop = x.length;
  if (from !== null) while (start < x.length && x[start] < from) start += 1;
  if (to !== null) while (stop > 0 && x[stop - 1] > to) stop -= 1;
  start = Math.max(0, start - (from !== null));
  stop = Math.max(start, Math.min(x.length, stop + (to !== null)));
  const series = {};
  for (const key of keys) {
    if (!Object.hasOwn(curves.series, key)) continue;
    series[key] = Object.fromEntries(Object.entries(curves.series[key]).map(([name, values]) => [name, values.length ? values.slice(start, stop) : values]));
  }
  return { ...curves, x: x.slice(start, stop), whole: axis ? curves.whole[axis] : curves.whole, series };
}

/** Returns the bars of a part of the timeline: of the newest phases one each, of the whole run those that can be seen. */
function phases(known, { from, to, step }) {
  if (!known) throw new ServerError("The journal of the run could not be read when this page was written.");
  const { parts } = known;
  let [low, high] = [from ?? known.from, to ?? known.to];
  if (step !== undefined) {
    const bars = parts.flatMap((part) => part.lanes.flatMap((lane) => lane.bars)).filter((bar) => bar[3] === Number(step));
    if (!bars.length) throw notHere(`The phases of step ${step} are`);
    low = Math.min(...bars.map((bar) => bar[0]));
    high = Math.max(...bars.map((bar) => bar[1]));
  }
  const part = [...parts].reverse().find((each) => each.from <= low) ?? parts[0];
  const lanes = part.lanes.map((lane) => ({ ...lane, bars: lane.bars.filter((bar) => bar[1] >= low && bar[0] <= high) }));
  return { ...part, lanes: lanes.filter((lane) => lane.bars.length), from: low, to: Math.max(high, low + 1e-6) };
}

const FITS = {
  "": () => true, correct: (sample) => sample.correct === true, wrong: (sample) => sample.correct === false, unscored: (sample) => sample.reward === null,
  truncated: (sample) => sample.finish === "length",
};

function fits(sample, prompt, { text = "", only = "" }) {
  const wanted = text.toLowerCase();
  return FITS[only](sample) && (!wanted || sample.text.toLowerCase().includes(wanted) || prompt.toLowerCase().includes(wanted));
}

let before = null;

/** Returns the samples of the step that is asked for, or of the nearest that is here, in the direction in which the reader goes. */
function samples(steps, wanted) {
  const at = wanted.step === undefined || wanted.step === "" || wanted.step === null ? Infinity : Number(wanted.step);
  const later = steps.find((each) => each.step >= at);
  const earlier = steps.findLast((each) => each.step <= at);
  const nearest = (before !== null && at > before ? later ?? earlier : earlier ?? later) ?? steps[0];
  before = nearest.step;
  const prompts = nearest.prompts.map((each) => ({ ...each, samples: each.samples.filter((sample) => fits(sample, each.prompt, wanted)) })).filter((each) => each.samples.length);
  const matched = prompts.reduce((sum, each) => sum + each.samples.length, 0);
  return { ...nearest, matched, total: prompts.length, prompts: prompts.slice(wanted.offset, wanted.offset + wanted.limit) };
}

function search(steps, wanted) {
  const same = wanted.same_id ? steps.find((each) => each.step === Number(wanted.same_step))?.prompts.find((each) => each.samples.some((sample) => sample.id === wanted.same_id)) : null;
  const matching = [...steps].reverse().flatMap((each) => each.prompts.filter((prompt) => !same || prompt.prompt === same.prompt).flatMap((prompt) => (
    prompt.samples.filter((sample) => fits(sample, prompt.prompt, wanted)).map((sample) => ({ ...sample, step: each.step, prompt: same ? "" : prompt.prompt })))));
  return { found: matching, next: null, looked_at: steps.length };
}

function log(run, { file, text = "" }) {
  const part = run.log[file];
  if (!part) throw notHere(`The lines of ${file} are`);
  return { ...part, lines: part.lines.filter((line) => line.toLowerCase().includes(text.toLowerCase())) };
}

const ANSWERS = {
  run: (run) => run.run, nodes: (run) => run.nodes, curves: (run, wanted) => between(run.curves, wanted.axis ?? "step", wanted), phases: (run, wanted) => phases(run.phases, wanted),
  hardware: (run) => run.hardware, hardware_curves: (run, wanted) => between(run.hardware_curves, null, wanted), samples: (run, wanted) => samples(run.samples, wanted),
  search: (run, wanted) => search(run.samples, wanted), logs: (run) => run.logs, log,
  phase: (run, { id }) => run.phase[id] ?? (() => { throw notHere("The journal's details of this phase are"); })(),
  trace: (run, { step }) => run.trace[step],
  sample: (run, { step, id }) => run.sample[`${step} ${id}`] ?? (() => { throw notHere("The tokens of this sample are"); })(),
};

/** Returns what the page knows of `name`. Throws `ServerError`. */
export async function ask(name, parameters = {}) {
  if (name === "runs") return data.listed;
  if (name === "compare") {
    if (!data.compare) throw notHere("Comparisons of these runs are");
    return data.compare;
  }
  return ANSWERS[name](runOf(parameters.run), parameters);
}
