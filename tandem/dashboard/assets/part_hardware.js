// The hardware of a run over time: its machine, its processes and GPUs.

import { make } from "./dom.js";
import { Board, boardTools } from "./board.js";
import { ask } from "./server.js";
import { when } from "./words.js";

export async function hardwarePart({ page, name, place, signal }) {
  const { charts, began_s: began } = await ask("hardware", { run: name }, signal);
  if (!charts.length) {
    place.replaceChildren(make("p", { className: "quiet" }, "The run has no metrics database. Section 'metrics' of its recipe keeps one: tandem train … --metrics.port=0"));
    return {};
  }
  const board = new Board([name], page, signal, "hardware_curves", "time");
  place.replaceChildren(make("p", { className: "quiet" }, `Time since ${when(began)}, when the first sample was taken.`), boardTools(board),
    make("div", { className: "charts" }, ...charts.map((each) => board.add(each))));
  return { changed: () => board.refresh() };
}
