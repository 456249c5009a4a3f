// Several runs side by side: their curves in the same charts, their results, and what differs in their recipes.

import { make } from "./dom.js";
import { Board, boardTools } from "./board.js";
import { grids } from "./part_curves.js";
import { ask, follow } from "./server.js";
import { badge, count, figure, liveBadge, runAddress, seconds, section, table } from "./words.js";

/** Differences that are shown without being asked for. */
const MOST_OPEN = 12;

export async function compareView(page, names, signal) {
  page.title(`Comparison of ${names.length} runs`);
  const compared = await ask("compare", { run: names }, signal);
  const board = new Board(names, page, signal);
  const results = compared.results.map((run, number) => {
    const swatch = make("i", { className: "swatch" });
    swatch.style.setProperty("--hue", `var(--c${number % 8})`);
    const state = run.live ? liveBadge() : badge(run.status[0], run.status[1]);
    return [make("span", { className: "run-name" }, swatch, make("a", { href: runAddress(run.name) }, run.name)), state, count(run.steps), seconds(run.seconds),
      run.speed === null ? "–" : figure(run.speed), run.problem || run.headline];
  });
  const differences = compared.differences.map(([key, values]) => [make("code", {}, key), ...values.map((value) => make("code", {}, value))]);
  const phases = [...new Set(compared.results.flatMap((run) => Object.keys(run.phase_times)))];
  page.show(
    section("Results", table("Results", [["Run"], ["State"], ["Steps", "number"], ["Time", "number"], ["Tokens/s", "number"], ["Evaluation", "wide"]], results, "")),
    section("Differences of the recipes", make("details", { open: differences.length <= MOST_OPEN }, make("summary", {}, `${differences.length} keys differ`),
      table("Differences", [["Key"], ...names.map((name) => [name])], differences, "The recipes are the same, or cannot be read."))),
    section("Median time of each phase", table("Median time of each phase", [["Phase"], ...names.map((name) => [name, "number"])],
      phases.map((phase) => [phase, ...compared.results.map((run) => seconds(run.phase_times[phase]))]), "No step was completed.")),
    boardTools(board), ...grids(board, compared.sections));
  follow(names, () => board.refresh(), signal);
}
