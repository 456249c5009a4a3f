// The curves of a run, below its figures.

import { make } from "./dom.js";
import { Board, boardTools } from "./board.js";
import { seconds, section, table } from "./words.js";

export function card({ name, value, before, limit, state }) {
  return make("div", {}, make("b", {}, before ? make("s", {}, `${before} → `) : null, make("span", { className: state }, value), limit ? make("s", {}, ` of ${limit}`) : null),
    make("small", {}, name));
}

/** Returns the sections of a board. */
export function grids(board, sections) {
  return sections.map(({ title, charts }) => section(title, make("div", { className: "charts" }, ...charts.map((chart) => board.add(chart)))));
}

export function curvesPart({ page, name, run, place, signal }) {
  const board = new Board([name], page, signal);
  const figures = make("div", { className: "cards" });
  const headline = make("p", { className: "quiet" });
  const curves = make("div", {});
  const times = make("div", {});
  let shape = "";

  function draw(now) {
    board.marks = now.marks;
    figures.replaceChildren(...now.cards.map(card));
    headline.textContent = now.headline;
    times.replaceChildren(phaseTimes(now));
    const phases = { title: "Time of each phase", unit: "seconds", floor: 0, ceiling: null, series: now.phases.slice(0, 12), points: [], lines: [] };
    const sections = [...now.sections, ...(now.phases.length ? [{ title: "Phases", charts: [phases] }] : [])];
    const names = JSON.stringify(sections.map(({ title, charts }) => [title, charts.map((chart) => [chart.title, chart.series])]));
    if (names !== shape) {
      shape = names;
      for (const chart of board.charts) { board.seen.unobserve(chart.figure); board.sized.unobserve(chart.figure); chart.plot?.destroy(); }
      board.charts = [];
      curves.replaceChildren(...(sections.length ? grids(board, sections) : [make("p", { className: "quiet" }, "No step was completed yet.")]));
    } else {
      // Evaluations come with the overview, not with the curves.
      const charts = sections.flatMap((each) => each.charts);
      board.charts.forEach((chart, number) => { chart.definition = charts[number]; chart.draw(); });
    }
  }

  draw(run);
  place.replaceChildren(headline, figures, boardTools(board), curves, times, examples(run));
  // A row more hardly changes a curve whose points are many rows: it is drawn again as rarely as what stands above it.
  return {
    overview(now) {
      draw(now);
      if (board.isThinned) board.refresh();
    },
    changed() { if (!board.isThinned) board.refresh(); },
  };
}

function phaseTimes(run) {
  if (!run.phase_times.length) return make("div", {});
  const rows = run.phase_times.map(([name, total, median, longest]) => [name, seconds(total), seconds(median), seconds(longest)]);
  return section("Seconds of each phase", table("Seconds of each phase", [["Phase"], ["All steps", "number"], ["Median", "number"], ["Longest", "number"]], rows, ""));
}

function examples(run) {
  if (!run.examples.length) return make("div", {});
  const completion = (each) => (each ? make("code", { className: each.correct ? "good" : "bad" }, each.text) : "–");
  const rows = run.examples.map((each) => [make("code", {}, each.prompt), completion(each.before), completion(each.after)]);
  return section("Completions before and after", table("Completions before and after", [["Prompt"], ["Before", "wide"], ["After", "wide"]], rows, ""));
}
