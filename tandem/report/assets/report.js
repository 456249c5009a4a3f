"use strict";
// Draws the charts of the page from the data in the element "data". Texts are set as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const HEIGHT = 210, LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 22;
  const state = { axis: "step", smooth: 0, zoom: null, outliers: false };
  const charts = [];
  const many = data.runs.length > 1;
  const DASHES = ["", "5 3", "1.5 3", "8 3 2 3"];

  const element = (tag, attributes = {}, text = null) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;
    return made;
  };

  function format(value) {
    if (value === null || value === undefined || !isFinite(value)) return "-";
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return `${+(value / (sign === "k" ? 1e3 : unit)).toPrecision(3)}${sign}`;
    if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return `${+value.toPrecision(4)}`;
  }

  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 2.5, 5, 10].find(factor => factor * power >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return found;
  }

  // -- the values of a series ------------------------------------------------------------------------------------------

  function at(from, to, x) {
    let right = from.findIndex(value => value >= x);
    if (right < 0) return to.length ? to[to.length - 1] : 0;
    if (right === 0) return x <= 0 ? 0 : to[0];
    const share = (x - from[right - 1]) / (from[right] - from[right - 1] || 1);
    return to[right - 1] + share * (to[right] - to[right - 1]);
  }

  function positions(series) {
    const run = data.runs[series.run];
    if (state.axis === "step" || series.own) return series.x || run.steps;
    return series.x ? series.x.map(x => at(run.steps, run.seconds, x)) : run.seconds;
  }

  function smoothed(values) {
    if (!state.smooth) return values;
    let mean = 0, weight = 0;
    return values.map(value => {
      if (value === null) return null;
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return mean / weight;
    });
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return high >= 0 && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : Math.max(low, 0);
  }

  const time = (seconds, span) => span < 120 ? `${+seconds.toPrecision(3)} s` : span < 7200 ? `${+(seconds / 60).toPrecision(3)} min` : `${+(seconds / 3600).toPrecision(3)} h`;

  // -- a chart of curves or of areas -----------------------------------------------------------------------------------

  function draw(chart) {
    const width = Math.max(chart.plot.clientWidth, 160), shown = chart.series.filter(series => !series.hidden);
    for (const series of shown) { series.px = positions(series); series.py = series.points ? series.y : smoothed(series.y); }
    if (chart.kind === "stack") {
      const below = [];
      for (const series of shown) { series.base = series.py.map((_, i) => below[i] || 0); series.py.forEach((y, i) => { below[i] = (below[i] || 0) + (y || 0); }); series.top = below.slice(); }
    }
    let x0 = Infinity, x1 = -Infinity;
    for (const series of shown) for (const x of series.px) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
    if (state.zoom && !chart.own) [x0, x1] = state.zoom;
    if (!(x1 > x0)) { x0 = (isFinite(x0) ? x0 : 0) - 0.5; x1 = x0 + 1; }
    let y0 = chart.floor ?? Infinity, y1 = chart.ceiling ?? -Infinity;
    const heights = [], take = y => { if (y !== null && y !== undefined) heights.push(y); };
    for (const series of shown) series.px.forEach((x, i) => {
      if (x < x0 || x > x1) return;
      if (chart.kind === "stack") { take(series.top[i]); return; }
      take(series.py[i]);
      if (!state.smooth && series.high) { take(series.low[i]); take(series.high[i]); }
      if (series.error) { take(series.y[i] + series.error[i]); take(series.y[i] - series.error[i]); }
    });
    for (const line of chart.lines || []) take(line.y);
    heights.sort((a, b) => a - b);
    const cut = state.outliers ? Math.floor(heights.length * 0.03) : 0;
    if (heights.length) { y0 = Math.min(y0, heights[cut]); y1 = Math.max(y1, heights[heights.length - 1 - cut]); }
    if (!isFinite(y0) || !isFinite(y1)) { y0 = 0; y1 = 1; }
    if (y1 <= y0) { const pad = Math.abs(y0) * 0.1 || 1; if (chart.floor === undefined || chart.floor < y0) y0 -= pad; y1 += pad; }
    else { const pad = 0.06 * (y1 - y0); if (chart.floor !== y0) y0 -= pad; if (chart.ceiling !== y1) y1 += pad; }
    const X = x => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT), Y = y => TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const y of ticks(y0, y1, 4)) parts.push(`<line class="gridline" x1="${LEFT}" x2="${width - RIGHT}" y1="${Y(y)}" y2="${Y(y)}"/><text x="${LEFT - 6}" y="${Y(y) + 4}" text-anchor="end">${format(y)}</text>`);
    const clock = state.axis === "time" && !chart.own, unit = clock ? (x1 < 120 ? 1 : x1 < 7200 ? 60 : 3600) : 1;
    for (const x of ticks(x0 / unit, x1 / unit, Math.max(2, Math.floor(width / 90))))
      if (clock || Number.isInteger(x)) parts.push(`<text x="${X(x * unit)}" y="${HEIGHT - 6}" text-anchor="middle">${clock ? time(x * unit, x1) : format(x)}</text>`);
    parts.push(`<line class="axis" x1="${LEFT}" x2="${width - RIGHT}" y1="${HEIGHT - BOTTOM}" y2="${HEIGHT - BOTTOM}"/>`);
    for (const line of chart.lines || []) parts.push(`<line x1="${LEFT}" x2="${width - RIGHT}" y1="${Y(line.y)}" y2="${Y(line.y)}" stroke="var(--quiet)" stroke-dasharray="2 4"/><text x="${LEFT + 4}" y="${Y(line.y) - 4}">${line.name} ${format(line.y)}</text>`);
    parts.push(`<g clip-path="url(#clip${chart.number})">`);
    const path = (xs, ys) => { let d = "", pen = "M"; ys.forEach((y, i) => { if (y === null || y === undefined) { pen = "M"; return; } d += `${pen}${X(xs[i]).toFixed(1)} ${Y(y).toFixed(1)}`; pen = "L"; }); return d; };
    const area = (xs, low, high) => { const kept = xs.map((_, i) => i).filter(i => low[i] !== null && high[i] !== null); return kept.length ? "M" + kept.map(i => `${X(xs[i]).toFixed(1)} ${Y(high[i]).toFixed(1)}`).join("L") + "L" + kept.reverse().map(i => `${X(xs[i]).toFixed(1)} ${Y(low[i]).toFixed(1)}`).join("L") + "Z" : ""; };
    for (const series of shown) {
      const colour = series.colour;
      if (chart.kind === "stack") { parts.push(`<path d="${area(series.px, series.base, series.top)}" fill="${colour}" fill-opacity=".8"/>`); continue; }
      if (series.high) parts.push(`<path d="${area(series.px, series.low, series.high)}" fill="${colour}" fill-opacity=".14"/>`);
      if (state.smooth && !series.points) parts.push(`<path d="${path(series.px, series.y)}" fill="none" stroke="${colour}" stroke-opacity=".25"/>`);
      if (series.error) series.y.forEach((y, i) => parts.push(`<line x1="${X(series.px[i])}" x2="${X(series.px[i])}" y1="${Y(y - series.error[i])}" y2="${Y(y + series.error[i])}" stroke="${colour}" stroke-opacity=".5"/>`));
      parts.push(`<path d="${path(series.px, series.py)}" fill="none" stroke="${colour}" stroke-width="1.8" stroke-linejoin="round" stroke-dasharray="${series.dash}"/>`);
      series.py.forEach((y, i) => {
        const alone = y !== null && (i === 0 || series.py[i - 1] === null) && (i === series.py.length - 1 || series.py[i + 1] === null);
        if (y !== null && (series.points || alone)) parts.push(`<circle cx="${X(series.px[i]).toFixed(1)}" cy="${Y(y).toFixed(1)}" r="2.7" fill="${colour}"/>`);
      });
    }
    parts.push("</g>");
    if (!many && !chart.own) for (const [step, name] of data.marks || []) {
      const x = X(state.axis === "step" ? step : at(data.runs[0].steps, data.runs[0].seconds, step)), y = HEIGHT - BOTTOM;
      if (x >= LEFT && x <= width - RIGHT) parts.push(`<path d="M${x} ${y - 1}l-4 7h8z" fill="var(--bad)"><title>${name}, step ${step}</title></path>`);
    }
    parts.push('<g class="cursor"></g>');
    chart.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    chart.svg.setAttribute("height", HEIGHT);
    chart.svg.innerHTML = `<clipPath id="clip${chart.number}"><rect x="${LEFT - 3}" y="${TOP - 4}" width="${width - LEFT - RIGHT + 6}" height="${HEIGHT - BOTTOM - TOP + 7}"/></clipPath>` + parts.join("");
    Object.assign(chart, { X, Y, x0, x1, width, shown, cursor: chart.svg.querySelector(".cursor") });
  }

  function point(chart, x, tip) {
    if (!chart.cursor) return;
    if (x === null || x < chart.x0 || x > chart.x1) { chart.cursor.innerHTML = ""; chart.tip.style.display = "none"; return; }
    const marks = [`<line x1="${chart.X(x)}" x2="${chart.X(x)}" y1="${TOP}" y2="${HEIGHT - BOTTOM}" stroke="var(--quiet)" stroke-opacity=".5"/>`];
    const lines = [];
    for (const series of chart.shown) {
      if (!series.px.length) continue;
      const i = nearest(series.px, x), y = series.py[i];
      // Evaluations are few: one that is far away says nothing of this place.
      if (y === null || y === undefined || Math.abs(series.px[i] - x) > 0.1 * (chart.x1 - chart.x0)) continue;
      marks.push(`<circle cx="${chart.X(series.px[i])}" cy="${chart.Y(chart.kind === "stack" ? series.top[i] : y)}" r="3.2" fill="${series.colour}" stroke="var(--card)"/>`);
      lines.push([series, y, series.px[i]]);
    }
    chart.cursor.innerHTML = marks.join("");
    if (!tip || !lines.length) { chart.tip.style.display = "none"; return; }
    const first = lines.reduce((a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a)[2];
    chart.tip.replaceChildren(element("div", { class: "quiet" }, state.axis === "time" && !chart.own ? time(first, chart.x1) : `step ${format(Math.round(first))}`));
    for (const [series, y] of chart.kind === "stack" ? lines.reverse() : lines) {
      const row = element("div"), name = element("span");
      name.append(element("i", { class: "swatch", style: `background:${series.colour}` }), series.label || chart.title);
      row.append(name, element("b", {}, format(y)));
      chart.tip.append(row);
    }
    chart.tip.style.display = "block";
    const left = chart.X(x) / chart.width * chart.plot.clientWidth, room = chart.tip.offsetWidth + 14;
    chart.tip.style.left = `${left + room > chart.plot.clientWidth ? Math.max(0, left - room) : left + 14}px`;
    chart.tip.style.top = "8px";
  }

  function listen(chart) {
    let from = null;
    const where = event => { const box = chart.svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * chart.width; return chart.x0 + (px - LEFT) / (chart.width - LEFT - RIGHT) * (chart.x1 - chart.x0); };
    const others = chart.own ? [] : charts.filter(other => other !== chart && !other.own && other.kind !== "gantt");
    chart.svg.addEventListener("pointermove", event => {
      const x = Math.min(Math.max(where(event), chart.x0), chart.x1);
      point(chart, x, true);
      for (const other of others) point(other, x, false);
      if (from !== null) chart.cursor.insertAdjacentHTML("beforeend", `<rect x="${Math.min(chart.X(from), chart.X(x))}" y="${TOP}" width="${Math.abs(chart.X(x) - chart.X(from))}" height="${HEIGHT - TOP - BOTTOM}" fill="var(--accent)" fill-opacity=".15"/>`);
    });
    chart.svg.addEventListener("pointerleave", () => { from = null; for (const each of [chart, ...others]) point(each, null, false); });
    chart.svg.addEventListener("pointerdown", event => { if (event.pointerType === "mouse" && !chart.own) from = where(event); });
    chart.svg.addEventListener("pointerup", event => {
      if (from === null) return;
      const to = where(event), range = [Math.min(from, to), Math.max(from, to)];
      if (Math.abs(chart.X(to) - chart.X(from)) > 6) zoom(range);
      from = null;
    });
    chart.svg.addEventListener("dblclick", () => zoom(null));
  }

  function keys(chart) {
    chart.keys.replaceChildren();
    if (chart.kind === "gantt") return;
    for (const series of chart.series) {
      const button = element("button", { type: "button", "aria-pressed": String(!series.hidden) });
      button.insertAdjacentHTML("afterbegin", `<svg width="16" height="8"><line x1="0" x2="16" y1="4" y2="4" stroke="${series.colour}" stroke-width="${chart.kind === "stack" ? 8 : 2.4}" stroke-dasharray="${series.dash}"/></svg>`);
      const last = series.y.reduce((before, y) => y === null ? before : y, null);
      if (series.label) button.append(element("span", {}, series.label));
      if (chart.kind !== "stack") button.append(element("b", {}, format(last)));
      button.addEventListener("click", () => { series.hidden = !series.hidden; button.setAttribute("aria-pressed", String(!series.hidden)); draw(chart); });
      chart.keys.append(button);
    }
  }

  // -- a traced step: a row of bars for each rank ----------------------------------------------------------------------

  function drawBars(chart) {
    const width = Math.max(chart.plot.clientWidth, 200), row = 26, left = 56, right = 24, height = chart.ranks.length * row + TOP + BOTTOM, parts = [];
    const X = x => left + x / (chart.seconds || 1) * (width - left - right);
    for (const x of ticks(0, chart.seconds || 1, Math.floor(width / 90))) parts.push(`<line class="gridline" x1="${X(x)}" x2="${X(x)}" y1="${TOP}" y2="${height - BOTTOM}"/><text x="${X(x)}" y="${height - 6}" text-anchor="middle">${format(x)} s</text>`);
    chart.ranks.forEach((rank, i) => parts.push(`<text x="${left - 6}" y="${TOP + row * i + 17}" text-anchor="end">rank ${rank}</text>`));
    chart.bars.forEach((group, number) => group.items.forEach(([rank, start, seconds, mark], i) => {
      const x = X(start), w = Math.max(0.6, X(start + seconds) - x), y = TOP + row * chart.ranks.indexOf(rank) + 2;
      parts.push(`<rect data-group="${number}" data-item="${i}" x="${x.toFixed(1)}" y="${y}" width="${w.toFixed(1)}" height="${row - 5}" rx="2" fill="${colourOf(number)}" fill-opacity="${group.name.startsWith("backward") ? 1 : .8}"/>`);
      if (mark && w > 14) parts.push(`<text x="${(x + w / 2).toFixed(1)}" y="${y + 15}" text-anchor="middle" style="fill:var(--card);pointer-events:none">${+mark}</text>`);
    }));
    chart.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.svg.setAttribute("height", height);
    chart.svg.innerHTML = parts.join("");
    chart.keys.replaceChildren(...chart.bars.map((group, number) => { const key = element("span", { class: "quiet" }); key.append(element("i", { class: "swatch", style: `background:${colourOf(number)}` }), group.name); return key; }));
  }

  function listenBars(chart) {
    chart.svg.addEventListener("pointermove", event => {
      const { group, item } = event.target.dataset;
      if (group === undefined) { chart.tip.style.display = "none"; return; }
      const bar = chart.bars[group], [rank, start, seconds, , detail] = bar.items[item];
      chart.tip.replaceChildren(element("b", {}, bar.name), element("div", {}, `rank ${rank}: ${format(seconds * 1e3)} ms from ${format(start * 1e3)} ms`));
      if (detail) chart.tip.append(element("div", { class: "quiet" }, detail));
      chart.tip.style.display = "block";
      const box = chart.plot.getBoundingClientRect();
      chart.tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - chart.tip.offsetWidth)}px`;
      chart.tip.style.top = `${event.clientY - box.top + 14}px`;
    });
    chart.svg.addEventListener("pointerleave", () => { chart.tip.style.display = "none"; });
  }

  // -- the page --------------------------------------------------------------------------------------------------------

  const colourOf = number => number < 8 ? `var(--c${number})` : `hsl(${(number * 67 + 20) % 360} 45% 55%)`;
  const drawAny = chart => chart.kind === "gantt" ? drawBars(chart) : draw(chart);
  const drawAll = () => charts.forEach(drawAny);

  function zoom(range) {
    state.zoom = range;
    document.getElementById("reset").hidden = range === null;
    drawAll();
  }

  document.querySelectorAll("[data-chart]").forEach((figure, number) => {
    const chart = { ...data.charts[+figure.dataset.chart], number, title: figure.querySelector("figcaption").firstChild.textContent.trim() };
    chart.plot = figure.querySelector(".plot");
    chart.keys = figure.querySelector(".keys");
    chart.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.svg.setAttribute("role", "img");
    chart.svg.setAttribute("aria-label", chart.title);
    chart.tip = element("div", { class: "tip" });
    chart.plot.append(chart.svg, chart.tip);
    const names = [...new Set((chart.series || []).map(series => series.name))];
    (chart.series || []).forEach((series, i) => {
      series.colour = colourOf(many ? series.run : i);
      series.dash = many ? DASHES[names.indexOf(series.name) % DASHES.length] : "";
      series.label = many ? [data.runs[series.run].name, series.name].filter(Boolean).join(" · ") : series.name === chart.title ? "" : series.name;
      series.own = chart.own;
    });
    charts.push(chart);
    keys(chart);
  });
  charts.forEach(chart => { drawAny(chart); (chart.kind === "gantt" ? listenBars : listen)(chart); });

  document.getElementById("axis").addEventListener("change", event => { state.axis = event.target.value; zoom(null); });
  document.getElementById("smooth").addEventListener("input", event => { state.smooth = +event.target.value; drawAll(); });
  document.getElementById("outliers").addEventListener("change", event => { state.outliers = event.target.checked; drawAll(); });
  document.getElementById("reset").addEventListener("click", () => zoom(null));
  let width = document.body.clientWidth;
  addEventListener("resize", () => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; drawAll(); } });
  addEventListener("beforeprint", drawAll);

  // Samples: one step at a time.
  for (const box of document.querySelectorAll(".samples")) {
    const steps = [...box.querySelectorAll("article")], range = element("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "step" });
    const label = element("b"), bar = element("div", { class: "steps" });
    const show = () => steps.forEach((step, i) => { step.hidden = i !== +range.value; if (!step.hidden) label.textContent = step.dataset.label; step.querySelector("h3").hidden = true; });
    range.addEventListener("input", show);
    bar.append(range, label);
    box.prepend(bar);
    show();
  }
})();
