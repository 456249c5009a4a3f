// The list of runs in the folder, which keeps up with it.

import { button, make } from "./dom.js";
import { ask, follow } from "./server.js";
import { ago, badge, count, figure, liveBadge, runAddress, table } from "./words.js";

const FIGURES = [["reward/mean", "Reward"], ["accuracy", "Accuracy"], ["train/loss", "Loss"], ["timing_s/step", "Step, s"], ["perf/tokens_per_s", "Tokens/s"]];
const STATES = { finished: "good", "target reached": "good" };

export async function listView(page, signal) {
  page.title("Runs");
  const chosen = new Set();
  let listed = { runs: [], folder: "" };
  const wanted = make("input", { type: "search", placeholder: "Name", aria: { label: "Show runs whose name has" }, on: { input: () => draw() } });
  const compare = button("Compare", () => { location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join("/")}`; }, { disabled: true });
  const place = make("div", {});

  function choose(name, isChosen) {
    if (isChosen) chosen.add(name);
    else chosen.delete(name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
  }

  function row(run) {
    const box = make("input", {
      type: "checkbox", checked: chosen.has(run.name), aria: { label: `Compare ${run.name}` }, on: { change: (event) => choose(run.name, event.target.checked) },
    });
    const state = run.live ? liveBadge() : run.problem ? badge("cannot be read", "bad") : badge(run.state, STATES[run.state] ?? "quiet");
    const name = make("span", { className: "run-name" }, box, make("a", { href: runAddress(run.name) }, run.name));
    const figures = FIGURES.filter(([key]) => listed.runs.some((each) => key in each.figures)).map(([key]) => figure(run.figures[key]));
    return [name, make("span", { title: run.problem }, state), run.steps === null ? "–" : count(run.steps), ...figures, ago(run.changed_s), run.problem];
  }

  function draw() {
    const runs = listed.runs.filter((run) => run.name.toLowerCase().includes(wanted.value.toLowerCase()));
    runs.sort((one, other) => other.live - one.live || other.changed_s - one.changed_s);
    const figures = FIGURES.filter(([key]) => listed.runs.some((run) => key in run.figures)).map(([, title]) => [title, "number"]);
    const problems = runs.some((run) => run.problem);
    const columns = [["Run"], ["State"], ["Steps", "number"], ...figures, ["Last change"], ...(problems ? [["Problem", "wide"]] : [])];
    const empty = listed.runs.length ? "No run has that in its name." : `There are no runs in ${listed.folder}. 'tandem train' makes one; this page shows it by itself.`;
    // A box that has the focus keeps it.
    const focus = document.activeElement?.getAttribute("aria-label");
    place.replaceChildren(table("Runs", columns, runs.map((run) => row(run).slice(0, columns.length)), empty));
    if (focus?.startsWith("Compare ")) [...place.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focus)?.focus();
    const live = listed.runs.filter((run) => run.live).length;
    const all = listed.count ?? listed.runs.length;
    page.summary(`${all > listed.runs.length ? `the newest ${count(listed.runs.length)} of ` : ""}${count(all)} in ${listed.folder}${live ? `, ${live} live` : ""}`);
  }

  async function load() {
    listed = await ask("runs", {}, signal);
    page.worked();
    draw();
  }

  page.show(make("div", { className: "toolbar" }, make("div", { className: "find" }, wanted), compare), place);
  await load();
  follow([], () => load().catch(page.failed), signal);
}
