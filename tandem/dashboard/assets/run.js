// A run: what stands above its parts, and which part is shown.

import { make } from "./dom.js";
import { ask, follow } from "./server.js";
import { count, badge, liveBadge, runAddress } from "./words.js";
import { curvesPart } from "./part_curves.js";
import { eventsPart } from "./part_events.js";
import { hardwarePart } from "./part_hardware.js";
import { logsPart } from "./part_logs.js";
import { memoryPart } from "./part_memory.js";
import { nodesPart } from "./part_nodes.js";
import { recipePart } from "./part_recipe.js";
import { samplesPart } from "./part_samples.js";
import { timelinePart } from "./part_timeline.js";

const PARTS = {
  curves: ["Curves", curvesPart], samples: ["Samples", samplesPart], timeline: ["Timeline", timelinePart], memory: ["Memory and machine", memoryPart],
  hardware: ["Hardware", hardwarePart], nodes: ["Nodes", nodesPart], events: ["Faults and recoveries", eventsPart], logs: ["Logs", logsPart], recipe: ["Recipe and replay", recipePart],
};
/** What a live run says above its curves is asked for again at most so often. */
const OVERVIEW_MS = 4000;
const READING_MS = 400;

export async function runView(page, name, wanted, signal) {
  const tab = wanted in PARTS ? wanted : "curves";
  page.title(name);
  page.tabs(...Object.entries(PARTS).map(([key, [title]]) => (
    make("a", { href: runAddress(name, key), ...(key === tab ? { aria: { current: "page" } } : {}) }, title))));
  // Of a long run the first answer takes a moment; a part that is left for another keeps the page as it is.
  const wait = setTimeout(() => page.show(make("p", { className: "quiet" }, "The run is being read …")), READING_MS);
  let run;
  try {
    run = await ask("run", { run: name }, signal);
  } finally {
    clearTimeout(wait);
  }

  function head() {
    const state = run.live ? liveBadge() : badge(run.status[0], run.status[1]);
    page.title(name, state);
    page.summary(`${count(run.rows)} steps · ${run.path}`);
  }

  head();
  const alerts = make("div", {});
  const frozen = run.frozen ? make("p", { className: "notice" }, run.frozen) : "";
  const place = make("div", {});
  const warn = () => alerts.replaceChildren(...[...(run.problem ? [run.problem] : []), ...run.alerts].map((line) => make("p", { className: "notice bad" }, line)));
  warn();
  page.show(frozen, alerts, place);
  const part = await PARTS[tab][1]({ page, name, run, place, signal });

  let asked = Date.now();
  let later = null;
  const again = async () => {
    later = null;
    asked = Date.now();
    try {
      run = await ask("run", { run: name }, signal);
      page.worked();
      head();
      warn();
      part?.overview?.(run);
    } catch (error) { page.failed(error); }
  };
  signal.addEventListener("abort", () => clearTimeout(later));
  follow([name], () => {
    part?.changed?.();
    if (!later) later = setTimeout(again, Math.max(0, asked + OVERVIEW_MS - Date.now()));
  }, signal);
}
