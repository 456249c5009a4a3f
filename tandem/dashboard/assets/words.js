// Numbers and times as the pages write them, and parts that several pages have.

import { make } from "./dom.js";

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];

/** Returns `value` with four digits. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, sign] of UNITS) if (size >= unit) return `${+(value / (sign === "k" ? 1e3 : unit)).toPrecision(3)}${sign}`;
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return `${+value.toPrecision(4)}`;
}

export const count = (value) => value.toLocaleString("en-GB");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 1e-3) return `${+(value * 1e6).toPrecision(3)} µs`;
  if (size < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
  if (size < 120) return `${+value.toPrecision(4)} s`;
  return size < 7200 ? `${+(value / 60).toPrecision(3)} min` : `${+(value / 3600).toPrecision(3)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let size = value;
  while (Math.abs(size) >= 1024 && at < units.length - 1) { size /= 1024; at += 1; }
  return `${+size.toPrecision(3)} ${units[at]}`;
}

/** Returns at most `most` sizes between two that are whole in their unit: 1, 2 or 5 of it, 10, 20, 50 and so on. */
export function byteTicks(low, high, most) {
  const least = Math.max(1, (high - low) / Math.max(1, most));
  let unit = 1;
  while (unit * 1024 <= least) unit *= 1024;
  const step = unit * ([1, 2, 5, 10, 20, 50, 100, 200, 500].find((each) => each * unit >= least) ?? 1024);
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
  return ticks;
}

/** Returns a time of day with its date, both of this place. */
export function when(unix) {
  if (!unix) return "–";
  const date = new Date(unix * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Returns how long ago a time was. */
export function ago(unix) {
  if (!unix) return "–";
  const past = Math.max(0, Date.now() / 1000 - unix);
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  return past < 172800 ? `${Math.round(past / 3600)} h ago` : `${Math.round(past / 86400)} days ago`;
}

/** Returns a table in a frame that scrolls. `columns`: `[title, class]`; cells are text or nodes. */
export function table(label, columns, rows, empty) {
  if (!rows.length) return make("p", { className: "quiet" }, empty);
  const head = make("tr", {}, ...columns.map(([title, kind]) => make("th", { scope: "col", className: kind ?? "" }, title)));
  const body = rows.map((cells) => make("tr", { className: cells.kind ?? "" }, ...cells.map((cell, column) => (
    make(column ? "td" : "th", { className: columns[column][1] ?? "", ...(column ? {} : { scope: "row" }) }, cell)))));
  return make("div", { className: "scroll panel", tabIndex: 0, attributes: { role: "group" }, aria: { label } },
    make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

export const badge = (text, kind = "quiet") => make("span", { className: `badge ${kind}` }, text);

export const liveBadge = () => make("span", { className: "badge live" }, "live");

export const section = (title, ...parts) => make("section", {}, make("h2", {}, title), ...parts);

/** Returns the address of a part of a run. */
export const runAddress = (name, tab = "curves") => `#/run/${encodeURIComponent(name)}/${tab}`;
