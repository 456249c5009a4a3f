// The page of the administration: what the gateway says of itself every two seconds, and the buttons that change it.

import { call } from "./api.js";
import { announce, applyTheme, button, byId, make } from "./dom.js";
import { settings } from "./settings.js";

const EVERY_MS = 2000;
/** How long a notice stays at least. */
const READ_MS = 8000;
let shown = -READ_MS;
/** The key is kept as long as the tab; without one, that of the chat page is tried. */
const KEPT = "tandem.admin";
const key = () => sessionStorage.getItem(KEPT) ?? settings.key;

const date = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
const count = (number) => number.toLocaleString("en-GB");

/** Returns a table. `columns`: `[title, class]`. */
function table(columns, rows, empty) {
  if (!rows.length) return make("p", { className: "quiet" }, empty);
  const head = make("tr", {}, ...columns.map(([title, kind]) => make("th", { scope: "col", className: kind }, title)));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, column) => (
    column ? make("td", { className: columns[column][1] }, cell) : make("th", { scope: "row" }, cell)))));
  return make("div", { className: "scroll", tabIndex: 0, attributes: { role: "group" }, aria: { label: columns[0][0] } },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

const HEALTH = { ready: ["ready", "good"], not_ready: ["not ready", "bad"], down: ["down", "bad"], unknown: ["not probed yet", "quiet"] };

function backends(state) {
  const columns = [
    ["Backend", ""], ["Health", ""], ["Models", "wide"], ["Weights", ""], ["In flight", "number"], ["Tokens outstanding", "number"], ["Breaker", ""], ["Change", ""],
  ];
  const rows = state.backends.map((each) => {
    const [words, kind] = each.is_leaving ? ["ends", "quiet"] : each.is_drained ? [each.in_flight ? "drains" : "drained", "quiet"] : HEALTH[each.health];
    const action = each.is_drained ? "undrain" : "drain";
    return [
      make("span", { title: each.url }, each.name), make("span", { className: `state ${kind}` }, words), each.models.join(", ") || "–", each.weight_version ?? "–",
      `${count(each.in_flight)} of ${count(each.max_requests)}`, count(each.outstanding_tokens), each.breaker.replace("_", " "),
      button(action === "drain" ? "Drain" : "Undrain", () => change(action, each.name), { id: `change ${each.name}`, aria: { label: `${action} ${each.name}` } }),
    ];
  });
  return table(columns, rows, "There is none.");
}

const OUTCOMES = { runs: "taking", goes_back: "going back from", done: "took", failed: "went back from", stuck: "stuck between this and" };

function servers(state) {
  const rows = state.servers.map((each) => {
    const [last] = each.decisions;
    return [
      each.role === "both" ? each.model : `${each.model} (${each.role})`, make("span", { title: `${each.path} · weights ${each.weight_version}` }, each.version), each.update ? make("span", { title: each.update.reason },
        `${OUTCOMES[each.update.outcome]} ${each.update.to}`) : "–", `${count(each.ready)} of ${count(each.wanted)}`,
      each.min_count === each.max_count ? "–" : `${count(each.min_count)} to ${count(each.max_count)}`, count(each.loading), count(each.leaving),
      make("span", { title: each.last_death }, count(each.restarts)),
      last ? `${date(last.time)}: ${count(last.to)} instead of ${count(last.from)}: ${last.reason}` : "–",
    ];
  });
  const columns = [["Model", ""], ["Version", ""], ["Last update", ""], ["Ready", "number"], ["Range", ""], ["Loading", "number"], ["Ending", "number"], ["Died", "number"], ["Last change (UTC)", "wide"]];
  return table(columns, rows, "There is none.");
}

function queue({ queue: { waiting, oldest_s: oldest, max_waiting: most } }) {
  const rows = Object.entries(waiting).map(([model, number]) => [model, count(number)]);
  return make("div", {}, table([["Model", ""], ["Waiting", "number"]], rows, "Nobody waits."),
    rows.length ? make("p", { className: "quiet" }, `The oldest has waited ${oldest.toFixed(1)} s; at most ${count(most)} may wait.`) : null);
}

function limits(state) {
  const rows = state.limits.map((each) => [each.who, each.limit.replaceAll("_", " "), each.used === null ? "counted in Redis" : count(each.used), count(each.most)]);
  return table([["Who", ""], ["Limit", ""], ["Used", "number"], ["Most", "number"]], rows, "There is none.");
}

function keys(state) {
  if (!state.keys) return make("p", { className: "quiet" }, "No key is needed: the gateway has no keys_file.");
  const rows = state.keys.map((each) => [
    make("code", {}, each.id), each.tenant, each.role, each.models.join(", ") || "all", date(each.created),
    each.expires ? make("span", { className: each.is_expired ? "bad" : "" }, `${date(each.expires)}${each.is_expired ? " (expired)" : ""}`) : "never",
  ]);
  return table([["Key", ""], ["Tenant", ""], ["Role", ""], ["Models", "wide"], ["Made", ""], ["Ends (UTC)", ""]], rows, "There is none.");
}

function draw(state) {
  // What has the focus is drawn anew, and has it again.
  const focused = document.activeElement?.id;
  for (const [id, drawn] of Object.entries({ backends, servers, queue, limits, keys })) byId(id).replaceChildren(drawn(state));
  if (focused) byId(focused)?.focus();
  byId("summary").textContent = `Tandem ${state.version}, since ${date(state.started)} UTC · ${count(state.open_requests)} requests in flight · balance: ${
    state.balance.replaceAll("_", " ")}${state.is_draining ? " · shutting down" : ""}`;
}

async function load() {
  try {
    draw(await (await call("admin/api/state", key())).json());
    byId("state").hidden = false;
    byId("key-form").hidden = true;
    byId("reload").hidden = false;
    if (performance.now() - shown > READ_MS) byId("notice").hidden = true;
  } catch (error) {
    byId("key-form").hidden = error.status !== 401 && !(error.status === 403 && key());
    byId("state").hidden = error.status !== 0;
    notice(error.message);
  }
  document.body.dataset.ready = "true";
}

function notice(text, kind = "notice bad") {
  shown = performance.now();
  byId("notice").className = kind;
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

async function change(action, backend) {
  try {
    await call(`admin/api/${action}`, key(), { method: "POST", body: { backend } });
    announce(`${backend}: ${action}ed`);
    await load();
  } catch (error) {
    notice(error.message);
  }
}

/** Has the gateway read its file again, and says what has changed. */
async function reload() {
  const button = byId("reload");
  button.disabled = true;
  try {
    const { changed } = await (await call("admin/api/reload", key(), { method: "POST", body: {} })).json();
    await load();
    notice(changed.length ? `Changed: ${changed.join(", ")}.` : "Nothing has changed.", "notice");
  } catch (error) {
    notice(error.message);
  }
  button.disabled = false;
}

byId("reload").addEventListener("click", reload);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEPT, byId("key").value.trim());
  byId("key").value = "";
  load();
});
applyTheme(settings.theme);
load();
// A page that nobody looks at asks nothing; one that has no key does not ask again without one.
setInterval(() => { if (!document.hidden && byId("key-form").hidden) load(); }, EVERY_MS);
