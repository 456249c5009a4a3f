// Charts that share their horizontal axis: each asks for the points that it can show when it comes onto the screen.

import uPlot from "./vendor/uplot.js";
import { button, make } from "./dom.js";
import { ask } from "./server.js";
import { bytes, byteTicks, figure, seconds } from "./words.js";

const HEIGHT = 214;
const PADDING = 0.06;
const COLOURS = 8;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const GAPS_STAY = 1;
const MOST_KEYS = 60;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (number) => resolved(`var(--c${number % COLOURS})`);

/** Colours of the theme that is shown: to ask for one makes the browser lay out the page. */
const known = new Map();
document.addEventListener("theme", () => known.clear());

/** Returns a colour that the canvas can draw: `light-dark()` is known to style sheets alone. */
function resolved(value) {
  if (!known.has(value)) {
    const probe = make("span", {});
    probe.style.color = value;
    document.body.append(probe);
    known.set(value, getComputedStyle(probe).color);
    probe.remove();
  }
  return known.get(value);
}

const faded = (value, share) => value.replace(/^rgba?\(([^)]+)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")},${share})`);

/** Returns `values` as a mean in which each earlier value counts `weight` times as much as the next. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let sum = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}

export class Board {
  /** `runs`: the names of the runs whose curves are drawn in the same charts. `source`: the answer that has the curves. `axis`: "step" or "time". */
  constructor(runs, page, signal, source = "curves", axis = "step") {
    Object.assign(this, { runs, page, signal, source, axis, range: null, smoothing: 0, charts: [], marks: [], waiting: false, isThinned: false, whole: [0, 1] });
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.find((each) => each.figure === entry.target);
        chart.isVisible = entry.isIntersecting;
        if (chart.isVisible && chart.isStale) this.load();
      }
    }, { rootMargin: "200px" });
    this.sized = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
    const redraw = () => this.charts.forEach((chart) => chart.draw(true));
    document.addEventListener("theme", redraw, { signal });
    signal.addEventListener("abort", () => {
      this.seen.disconnect();
      this.sized.disconnect();
      this.charts.forEach((chart) => chart.plot?.destroy());
    });
  }

  /** Returns the element of a new chart. `definition`: as the server defines it. */
  add(definition) {
    const chart = new Chart(this, definition);
    this.charts.push(chart);
    this.seen.observe(chart.figure);
    this.sized.observe(chart.figure);
    return chart.figure;
  }

  /** Asks for all curves again: those on the screen now, the others when they come onto it. */
  refresh() {
    for (const chart of this.charts) chart.isStale = true;
    this.load();
  }

  zoom(range) {
    this.range = range;
    this.zoomed?.(range);
    this.refresh();
  }

  set(values) {
    Object.assign(this, values);
    if ("axis" in values) this.zoom(null);
    else this.charts.forEach((chart) => chart.draw());
  }

  /** Returns charts on the screen that need their curves, and the metrics of these, as many as one request may name. */
  next() {
    const charts = [];
    const keys = new Set();
    for (const chart of this.charts.filter((each) => each.isVisible && each.isStale)) {
      const own = chart.definition.series.map((each) => each.key);
      if (charts.length && keys.size + own.length > MOST_KEYS) break;
      charts.push(chart);
      own.forEach((key) => keys.add(key));
    }
    return [charts, [...keys]];
  }

  /** Asks once for the curves of all charts that need them, one request for each run. */
  async load() {
    if (this.waiting) { this.again = true; return; }
    this.waiting = true;
    try {
      do {
        this.again = false;
        await new Promise((drawn) => { requestAnimationFrame(drawn); });
        const [charts, keys] = this.next();
        if (!charts.length) break;
        const points = Math.max(200, Math.round(Math.max(...charts.map((chart) => chart.width)) * 1.5));
        const [from, to] = this.range ?? [null, null];
        const answers = await Promise.all(this.runs.map((run) => ask(this.source, { run, key: keys, from, to, points, axis: this.axis }, this.signal)));
        // The evaluation after the last step is drawn beside it.
        const evaluated = this.axis === "step" ? this.charts.flatMap((chart) => chart.definition.points.flatMap((each) => each.x)) : [];
        this.whole = [Math.min(...answers.map((each) => each.whole[0])), evaluated.reduce((most, x) => Math.max(most, x), Math.max(...answers.map((each) => each.whole[1])))];
        for (const chart of charts) {
          chart.isStale = false;
          chart.answers = answers;
          chart.draw();
        }
        this.isThinned = answers.some((each) => each.rows_each > 1);
        this.page.worked();
        this.again = this.again || this.charts.some((chart) => chart.isVisible && chart.isStale);
      } while (this.again);
    } catch (error) {
      this.page.failed(error);
    } finally {
      this.waiting = false;
    }
  }
}

class Chart {
  constructor(board, definition) {
    Object.assign(this, { board, definition, isVisible: false, isStale: true, answers: null, plot: null, shape: "", hidden: new Set() });
    this.isBytes = definition.unit.startsWith("bytes");
    this.words = this.isBytes ? bytes : figure;
    this.keys = make("div", { className: "keys" });
    this.place = make("div", { className: "plot", attributes: { role: "img" }, aria: { label: definition.title } });
    const caption = make("figcaption", {}, definition.title, definition.unit ? make("span", {}, definition.unit) : null);
    this.figure = make("figure", { className: "chart" }, caption, this.keys, this.place);
  }

  get width() { return Math.max(160, this.place.clientWidth || 400); }

  resize() {
    if (this.plot && this.plot.width !== this.width) this.plot.setSize({ width: this.width, height: HEIGHT });
  }

  /** Returns what is drawn: `{label, x, y, low, high, colour, dash, points}` of each line. */
  lines() {
    const { runs } = this.board;
    const found = [];
    this.answers.forEach((answer, run) => this.definition.series.forEach(({ key, name }, place) => {
      const part = answer.series[key];
      if (!part || !part.y.some((value) => value !== null)) return;
      const isAlone = runs.length === 1;
      const label = isAlone ? name : this.definition.series.length > 1 ? `${runs[run]}, ${name}` : runs[run];
      found.push({ label, x: answer.x, y: part.y, low: part.low, high: part.high, hue: isAlone ? place : run, dash: isAlone ? Math.floor(place / COLOURS) : place, points: false });
    }));
    const first = this.definition.series.length;
    this.definition.points.forEach((each, place) => {
      if (this.board.axis !== "step") return;
      const isAlone = runs.length === 1;
      const name = isAlone ? each.name : `${runs[each.run]}, ${each.name}`;
      const [from, to] = this.board.range ?? [-Infinity, Infinity];
      const inside = each.x.map((x, at) => [x, each.y[at]]).filter(([x]) => x >= from && x <= to);
      if (inside.length) {
        found.push({
          label: name, x: inside.map(([x]) => x), y: inside.map(([, y]) => y), hue: isAlone ? first + place : each.run, dash: isAlone ? 0 : 1 + place % 3, points: true,
        });
      }
    });
    return found;
  }

  draw(anew = false) {
    if (!this.answers) return;
    const lines = this.lines();
    const tables = [];
    const series = [{}];
    const bands = [];
    for (const line of lines) {
      const drawn = colour(line.hue);
      const isHidden = this.hidden.has(line.label);
      const y = line.points ? line.y : smoothed(line.y, this.board.smoothing);
      tables.push([line.x, y, ...(line.low?.length ? [line.low, line.high] : [])]);
      line.at = series.length;
      series.push({
        label: line.label, stroke: drawn, width: 1.6, dash: DASHES[line.dash % DASHES.length], show: !isHidden, points: line.points ? { show: true, size: 6, fill: drawn } : { size: 4 },
      });
      if (line.low?.length) {
        const hidden = { stroke: "transparent", width: 0, points: { show: false }, show: !isHidden };
        bands.push({ series: [series.length + 1, series.length], fill: faded(drawn, 0.16) });
        series.push({ ...hidden }, { ...hidden });
      }
    }
    const data = tables.length ? uPlot.join(tables, tables.map((parts) => parts.map(() => GAPS_STAY))) : [[], []];
    const shape = JSON.stringify([lines.map((line) => [line.label, line.hue, Boolean(line.low?.length)]), [...this.hidden], this.board.axis]);
    this.drawn = lines;
    if (!this.plot || anew || shape !== this.shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(series, bands), data, this.place);
    } else this.plot.setData(data);
    this.drawKeys();
    this.say();
  }

  options(series, bands) {
    const { board, definition } = this;
    const quiet = resolved("var(--quiet)");
    const grid = { stroke: resolved("var(--soft)"), width: 1 };
    const font = `11px ${style("--sans")}`;
    const limits = (low, high) => {
      let least = definition.floor ?? low;
      let most = definition.ceiling ?? high;
      for (const line of definition.lines) { least = Math.min(least ?? line.y, line.y); most = Math.max(most ?? line.y, line.y); }
      if (low !== null) { least = Math.min(least, low); most = Math.max(most, high); }
      if (least === null || most === null) return [0, 1];
      if (most <= least) return [least - (Math.abs(least) * 0.1 || (definition.floor === 0 ? 0 : 1)), most + (Math.abs(most) * 0.1 || 1)];
      const pad = PADDING * (most - least);
      return [least === definition.floor ? least : least - pad, most === definition.ceiling ? most : most + pad];
    };
    return {
      width: this.width, height: HEIGHT, series, bands, legend: { show: false }, padding: [8, 10, 0, 0],
      scales: {
        x: { time: false, range: () => { const [low, high] = board.range ?? board.whole; return high > low ? [low, high] : [low - 0.5, low + 0.5]; } },
        y: { range: (_, low, high) => limits(low, high) },
      },
      axes: [
        { stroke: quiet, grid: { show: false }, ticks: { stroke: grid.stroke, size: 4 }, font, size: 26, values: (_, values) => values.map((value) => (
          board.axis === "time" ? value ? seconds(value) : "0 s" : Number.isInteger(value) ? figure(value) : "")), space: 60,
        label: board.axis === "time" ? "time" : "step", labelSize: 14, labelGap: 0, labelFont: font },
        { stroke: quiet, grid, ticks: { show: false }, font, size: 56, values: (_, values) => values.map(this.words), space: 34,
          ...(this.isBytes ? { splits: (_, __, low, high) => byteTicks(low, high, HEIGHT / 34 - 1) } : {}) },
      ],
      cursor: {
        drag: { x: true, y: false, setScale: false }, sync: { key: "board", scales: ["x", null] }, points: { size: 6 },
        bind: { dblclick: () => () => { board.zoom(null); return null; } },
      },
      hooks: {
        setCursor: [() => this.drawKeys()],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 4) board.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        draw: [(plot) => { this.drawTargets(plot, quiet); this.drawMarks(plot); }],
      },
    };
  }

  drawTargets(plot, stroke) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = stroke;
    ctx.fillStyle = stroke;
    ctx.font = `${11 * devicePixelRatio}px ${style("--sans")}`;
    ctx.textAlign = "left";
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const line of this.definition.lines) {
      const y = plot.valToPos(line.y, "y", true);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(`${line.name} ${figure(line.y)}`, bbox.left + 4 * devicePixelRatio, y - 4 * devicePixelRatio);
    }
    ctx.restore();
  }

  /** Draws a triangle at the axis for each event that belongs to a step; the part of faults and recoveries says which. */
  drawMarks(plot) {
    if (this.board.axis !== "step" || !this.board.marks.length) return;
    const { ctx, bbox } = plot;
    const size = 4 * devicePixelRatio;
    ctx.save();
    ctx.fillStyle = resolved("var(--bad)");
    for (const [step] of this.board.marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const y = bbox.top + bbox.height;
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x - size, y + 2 * size);
      ctx.lineTo(x + size, y + 2 * size);
      ctx.fill();
    }
    ctx.restore();
  }

  /** Writes the names of the lines with the values at the cursor, or the last ones. */
  drawKeys() {
    const at = this.plot?.cursor.idx;
    const values = this.drawn.map((line) => {
      const column = this.plot?.data[line.at] ?? [];
      return (at !== null && at !== undefined ? near(column, at) : null) ?? lastOf(column);
    });
    if (!this.drawn.length) {
      this.keys.replaceChildren("No value yet.");
      return;
    }
    if (this.keys.querySelectorAll("button").length !== this.drawn.length) {
      this.keys.replaceChildren(...this.drawn.map((_, place) => button("", () => this.toggle(this.drawn[place].label), { className: "key" })));
    }
    this.drawn.forEach((line, place) => {
      const key = this.keys.children[place];
      key.setAttribute("aria-pressed", String(!this.hidden.has(line.label)));
      if (key.dataset.label !== line.label) {
        const swatch = make("i", { className: line.dash ? "dashed" : "" });
        swatch.style.setProperty("--hue", `var(--c${line.hue % COLOURS})`);
        key.replaceChildren(swatch, make("span", {}, line.label), make("b", {}));
        key.dataset.label = line.label;
      }
      key.lastElementChild.textContent = this.words(values[place]);
    });
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.draw(true);
  }

  /** Says in words what the picture shows. */
  say() {
    const parts = this.drawn.map((line) => {
      const known = line.y.filter((value) => value !== null && value !== undefined);
      return `${line.label}: first ${this.words(known[0])}, last ${this.words(known[known.length - 1])}`;
    });
    this.place.setAttribute("aria-label", `${this.definition.title}. ${parts.join("; ") || "No value yet."}`);
  }
}

const lastOf = (column) => { for (let at = column.length - 1; at >= 0; at -= 1) if (column[at] !== null && column[at] !== undefined) return column[at]; return null; };

/** Returns the value at a place or the nearest before or after it: lines with points of their own have none at the others'. */
function near(column, at) {
  for (let away = 0; away < column.length; away += 1) {
    for (const place of [at - away, at + away]) if (column[place] !== null && column[place] !== undefined) return column[place];
  }
  return null;
}

/** Returns the tools of a board: axis, smoothing, and the range, which a drag across a chart sets too. */
export function boardTools(board) {
  const low = make("input", { type: "number", min: 0, aria: { label: "From" }, placeholder: "first" });
  const high = make("input", { type: "number", min: 0, aria: { label: "To" }, placeholder: "last" });
  const reset = button("All", () => board.zoom(null), { hidden: true });
  const apply = () => {
    const range = [low.value === "" ? board.whole[0] : Number(low.value), high.value === "" ? board.whole[1] : Number(high.value)];
    board.zoom(range[1] > range[0] ? range : null);
  };
  low.addEventListener("change", apply);
  high.addEventListener("change", apply);
  board.zoomed = (range) => {
    reset.hidden = !range;
    low.value = range ? Math.round(range[0]) : "";
    high.value = range ? Math.round(range[1]) : "";
  };
  // What is measured beside the steps is over time alone.
  const axis = board.source !== "curves" ? null : make("select", { on: { change: (event) => board.set({ axis: event.target.value }) } },
    make("option", { value: "step" }, "steps"), make("option", { value: "time" }, "time"));
  const smoothing = make("input", { type: "range", min: 0, max: 0.98, step: 0.01, value: 0, on: { input: (event) => board.set({ smoothing: Number(event.target.value) }) } });
  return make("div", { className: "toolbar" }, axis && make("label", {}, "x axis ", axis), make("label", { className: "range" }, "range ", low, " – ", high), reset,
    make("label", {}, "smoothing ", smoothing));
}
