// The resolved recipe, the commands that go on from the run, and the replay of a step.

import { button, copy, make } from "./dom.js";
import { badge, count, section, table, when } from "./words.js";

/** Returns a command with a button that copies it. */
export function command(text) {
  return make("p", { className: "command" }, make("code", {}, text), button("Copy", (event) => copy(text, event.target), { aria: { label: `Copy ${text}` } }));
}

/** Returns a table of what replays of the run's steps found. */
function replayed(replays) {
  const rows = replays.flatMap((each) => each.parts.map((part) => [when(each.time_s), count(each.step), part.part,
    part.unequal ? badge(`${count(part.unequal)} of ${count(part.count)} differ`, "bad") : badge(`all ${count(part.count)} ${part.how}`, "good"),
    part.differences.length ? make("details", {}, make("summary", {}, "Differences"), ...part.differences.map((line) => make("p", {}, make("code", {}, line)))) : "",
    each.version]));
  return table("Replays", [["Time"], ["Step", "number"], ["Part"], ["Result"], ["Differences", "wide"], ["Tandem"]], rows, "No step of this run was replayed yet.");
}

export function recipePart({ run, place }) {
  const shown = make("div", {});
  const results = make("div", {});
  const drawResults = (now) => results.replaceChildren(replayed(now.replays));
  drawResults(run);
  const step = make("input", { type: "number", min: 0, value: Math.max(0, run.rows - 1), on: { input: () => draw() } });
  const draw = () => shown.replaceChildren(command(`tandem replay ${run.path} --step ${Math.max(0, Math.trunc(Number(step.value)) || 0)}`));
  draw();
  const row = (cells) => cells.map((cell) => make("code", {}, cell));
  const recipe = run.recipe
    ? [table("Keys that are not the default", [["Key"], ["Value", "wide"], ["Default", "wide"]], run.recipe.changed.map(row), "All keys have their default."),
      make("details", {}, make("summary", {}, `${run.recipe.same.length} keys have their default`), table("Keys that have their default", [["Key"], ["Value", "wide"]], run.recipe.same.map(row), ""))]
    : [make("p", { className: "quiet" }, "config.yaml cannot be read by this version of Tandem.")];
  place.replaceChildren(
    section("Replay", make("p", {}, "Repeats a recorded step on this machine and compares every number with the record. The run's files are only read; the result is added below."),
      make("div", { className: "toolbar" }, make("label", {}, "step ", step)), shown, results),
    section("Try the model", ...(run.commands.length ? run.commands.map(command) : [make("p", { className: "quiet" }, "The run has not finished.")])),
    section("Recipe", ...recipe));
  return { overview: drawResults };
}
