// Memory of each phase, predicted and measured, and what is known of the machine.

import { make } from "./dom.js";
import { Board, boardTools } from "./board.js";
import { bytes, count, seconds, section, table } from "./words.js";

const MACHINE = [
  ["Memory of the controller", "bytes", [["controller/rss_bytes", "resident"]]], ["Lag of the controller's loop", "seconds", [["controller/loop_lag_s", "lag"]]],
  ["Model FLOPs utilization", "share", [["perf/mfu", "MFU"]]], ["Model operations", "10¹² per second", [["perf/model_tflops", "operations"]]],
  ["Traffic between ranks", "bytes", [["comm/sent_bytes", "sent"]]],
];

function bars(memory) {
  const most = Math.max(1, ...memory.flatMap((each) => [each.predicted ?? 0, each.measured ?? 0]));
  const bar = (value, kind) => {
    const made = make("i", { className: `amount ${kind}` });
    made.style.setProperty("--share", `${(100 * (value ?? 0)) / most}%`);
    return made;
  };
  return memory.map((each) => [each.phase.replaceAll("_", " "), bytes(each.predicted), bytes(each.measured),
    each.predicted && each.measured ? (each.measured / each.predicted).toFixed(2) : "–", make("span", { className: "amounts" }, bar(each.predicted, "predicted"), bar(each.measured, "measured"))]);
}

/** Returns what was moved between device, memory and disk, over all steps. */
function moved(moves) {
  if (!moves.length) return make("div", {});
  const rows = moves.map((each) => [each.resident, each.move, count(each.steps), bytes(each.bytes), seconds(each.seconds)]);
  return section("Moves of residents", table("Moves of residents", [["Resident"], ["Move"], ["Steps", "number"], ["In all", "number"], ["Time in all", "number"]], rows, ""));
}

/** Returns what was predicted of each phase of a step beside what was measured, once the run has ended. */
function compared([header, ...rows]) {
  if (!rows.length) return make("div", {});
  const columns = header.map((name, place) => (place ? [name, "number"] : [name]));
  return section("Predicted and measured", table("Predicted and measured", columns, rows, ""));
}

export function memoryPart({ page, name, run, place, signal }) {
  const board = new Board([name], page, signal);
  const chart = (title, unit, series) => ({ title, unit, floor: 0, ceiling: null, series: series.map(([key, label]) => ({ key, name: label })), points: [], lines: [] });
  const phases = run.memory.map((each) => chart(each.phase.replaceAll("_", " "), "bytes", [[`memory/${each.phase}/measured`, "measured"], [`memory/${each.phase}/predicted`, "predicted"]]));
  const memory = make("div", {});
  const columns = [["Phase"], ["Predicted", "number"], ["Measured, most", "number"], ["Measured / predicted", "number"], ["Predicted above measured", "wide"]];
  const draw = (now) => memory.replaceChildren(table("Memory of each phase", columns, bars(now.memory), "Nothing was measured yet."), compared(now.compared));
  draw(run);
  const there = new Set(run.sections.flatMap((each) => each.charts.flatMap(({ series }) => series.map(({ key }) => key))));
  const machine = Object.entries(run.machine).map(([key, value]) => [key, value]);
  place.replaceChildren(section("Memory of each phase", memory), boardTools(board),
    make("div", { className: "charts" }, ...phases.map((each) => board.add(each))),
    moved(run.moves),
    section("Machine", table("Machine", [["Of the machine"], ["Value", "wide"]], machine, "The journal says nothing of the machine."),
      make("div", { className: "charts" }, ...MACHINE.filter(([, , series]) => series.some(([key]) => there.has(key))).map((each) => board.add(chart(...each))))));
  return { overview: draw, changed: () => board.refresh() };
}
