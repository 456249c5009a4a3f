// The phases of a pod's sidecars over time, which can be enlarged down to one phase; or the spans of a traced step.

import { button, make } from "./dom.js";
import { ask } from "./server.js";
import { count, seconds, table, when } from "./words.js";

const LANE = 46;
const TOP = 6;
const BOTTOM = 24;
const LEFT = 84;
const RIGHT = 12;
const WHEEL = 1.0015;
const COLOURS = 8;
/** Of a state beyond the eighth, which has the colour of an earlier one. */
const PALE = 0.55;
const ORDER = ["rollout", "train", "checkpoint", "update_weight", "evaluate", "inference", "wait_rollout", "onload", "offload", "convert", "register"];
const SEVERAL = "several";
const LEAST_S = 1e-5;

/** Returns the number of a state's colour: the common ones have one each, the others are paler. */
function hue(state, others) {
  const known = ORDER.indexOf(state);
  if (known >= 0) return known;
  if (!others.includes(state)) others.push(state);
  return ORDER.length + others.indexOf(state);
}

export async function timelinePart({ page, name, run, place, signal }) {
  const others = [];
  const canvas = make("canvas", { tabIndex: 0, attributes: { role: "application" }, aria: { label: "Timeline. Arrows move, plus and minus enlarge and shrink, Home shows all, Tab after a click reads a phase." } });
  const frame = make("div", { className: "panel timeline" }, canvas);
  const keys = make("div", { className: "keys" });
  const detail = make("div", { className: "phase", attributes: { "aria-live": "polite" } }, make("p", { className: "quiet" }, "Choose a phase to see what the journal says of it."));
  const totals = make("div", {});
  const said = make("p", {});
  const step = make("input", { type: "number", min: 0, aria: { label: "Step" }, placeholder: "step" });
  const source = make("select", { aria: { label: "What is shown" } }, make("option", { value: "" }, "phases"),
    ...run.traced.map((each) => make("option", { value: each }, `step ${each}, traced`)));
  let data = null;
  let view = [0, 1];
  let chosen = null;
  let follows = true;
  let asked = new AbortController();
  let waiting = null;

  async function load(parameters) {
    asked.abort();
    asked = new AbortController();
    const stop = asked;
    signal.addEventListener("abort", () => stop.abort());
    data = source.value === "" ? await ask("phases", { run: name, ...parameters }, asked.signal) : await ask("trace", { run: name, step: source.value }, asked.signal);
    if (!parameters.from && parameters.from !== 0) view = [data.from, data.to];
    said.textContent = [data.said, data.left_out ? `${count(data.left_out)} of the shortest spans are left out.` : ""].filter(Boolean).join(" ");
    said.hidden = !said.textContent;
    page.worked();
    draw();
  }
  const failed = (error) => page.failed(error);

  const scale = () => (canvas.clientWidth - LEFT - RIGHT) / (view[1] - view[0]);
  const toX = (time) => LEFT + (time - view[0]) * scale();
  const toTime = (x) => view[0] + (x - LEFT) / scale();

  function move(low, high) {
    const span = Math.max(LEAST_S, Math.min(high - low, Math.max(data.end, LEAST_S) * 1.05));
    const start = Math.max(-0.02 * span, Math.min(low, data.end - span * 0.1));
    view = [start, start + span];
    follows = false;
    draw();
    if (source.value !== "") return;
    clearTimeout(waiting);
    waiting = setTimeout(() => load({ from: Math.max(0, view[0]), to: view[1] }).catch(failed), 120);
  }

  function zoom(factor, at = (view[0] + view[1]) / 2) {
    move(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }

  function draw() {
    if (!data) return;
    const ratio = devicePixelRatio || 1;
    const width = Math.max(200, frame.clientWidth - 2);
    const height = TOP + BOTTOM + LANE * Math.max(1, data.lanes.length);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    context.font = `12px ${style.getPropertyValue("--sans")}`;
    context.textBaseline = "middle";
    const quiet = style.color;
    ticks(context, width, height, quiet, style.borderTopColor);
    const spent = {};
    data.lanes.forEach((lane, row) => {
      const y = TOP + row * LANE;
      context.fillStyle = quiet;
      context.textAlign = "right";
      context.fillText(lane.name, LEFT - 8, y + LANE / 2);
      context.save();
      context.beginPath();
      context.rect(LEFT, y, width - LEFT - RIGHT, LANE);
      context.clip();
      context.textAlign = "left";
      for (const bar of lane.bars) {
        const [begin, end, state, , , isCut] = bar;
        if (end < view[0] || begin > view[1]) continue;
        const x = toX(begin);
        const w = Math.max(1, toX(end) - x);
        const number = hue(state, others);
        context.globalAlpha = state === SEVERAL ? 0.35 : number >= COLOURS ? PALE : 1;
        context.fillStyle = state === SEVERAL ? quiet : canvasColour(`--c${number % COLOURS}`);
        context.fillRect(x, y + 6, w, LANE - 12);
        context.globalAlpha = 1;
        if (isCut) { context.fillStyle = canvasColour("--bad"); context.fillRect(x, y + 2, 3, LANE - 4); }
        if (chosen && bar[4] === chosen[4] && begin === chosen[0] && state !== SEVERAL) {
          context.strokeStyle = canvasColour("--ink");
          context.lineWidth = 2;
          context.strokeRect(x + 1, y + 5, Math.max(1, w - 2), LANE - 10);
        }
        const words = state.replaceAll("_", " ");
        if (w > 34 && state !== SEVERAL) {
          context.fillStyle = canvasColour("--page");
          const room = Math.max(x, LEFT) + 5;
          if (context.measureText(words).width < x + w - room - 4) context.fillText(words, room, y + LANE / 2);
        }
        if (state !== SEVERAL) {
          const inside = Math.min(end, view[1]) - Math.max(begin, view[0]);
          const sum = spent[words] ??= { hue: number, seconds: 0, count: 0 };
          sum.seconds += inside;
          sum.count += 1;
        }
      }
      context.restore();
    });
    const sums = Object.entries(spent).sort((one, other) => other[1].seconds - one[1].seconds);
    keys.replaceChildren(...sums.map(([words, sum]) => {
      const swatch = make("i", {});
      swatch.style.setProperty("--hue", `var(--c${sum.hue % COLOURS})`);
      if (sum.hue >= COLOURS) swatch.style.opacity = PALE;
      return make("span", { className: "key" }, swatch, make("span", {}, words));
    }));
    totals.replaceChildren(table("Phases in this part", [["Phase"], ["Seconds here", "number"], ["Bars", "number"]],
      sums.map(([words, sum]) => [words, seconds(sum.seconds), count(sum.count)]), "No phase is in this part."));
  }

  const colours = new Map();
  /** The canvas knows no variables: each is resolved once for a theme. */
  function canvasColour(variable) {
    if (!colours.has(variable)) {
      const probe = make("span", {});
      probe.style.color = `var(${variable})`;
      frame.append(probe);
      colours.set(variable, getComputedStyle(probe).color);
      probe.remove();
    }
    return colours.get(variable);
  }

  function ticks(context, width, height, ink, line) {
    const wanted = Math.max(2, Math.floor((width - LEFT) / 110));
    const raw = (view[1] - view[0]) / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const size = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
    context.fillStyle = ink;
    context.strokeStyle = line;
    context.textAlign = "center";
    for (let at = Math.ceil(Math.max(0, view[0]) / size) * size; at <= view[1]; at += size) {
      const x = toX(at);
      if (x < LEFT || x > width - RIGHT) continue;
      context.beginPath();
      context.moveTo(x, TOP);
      context.lineTo(x, height - BOTTOM);
      context.stroke();
      const digits = Math.max(0, -Math.floor(Math.log10(size)));
      context.fillText(`${at.toFixed(digits)} s`, x, height - BOTTOM / 2);
    }
  }

  function barAt(x, y) {
    const lane = data?.lanes[Math.floor((y - TOP) / LANE)];
    if (!lane || x < LEFT) return null;
    const time = toTime(x);
    const slack = 2 / scale();
    const found = lane.bars.filter(([begin, end]) => begin - slack <= time && end + slack >= time);
    return found.sort((one, other) => (one[1] - one[0]) - (other[1] - other[0])).map((bar) => [...bar.slice(0, 6), bar[6], lane.name])[0] ?? null;
  }

  async function describe(bar) {
    chosen = bar;
    draw();
    if (!bar) return;
    const [begin, end, state, at, id, isCut, more, lane] = bar;
    if (state === SEVERAL) {
      detail.replaceChildren(make("p", {}, `${count(id)} phases that are too short to be seen here, of ${lane}, from ${seconds(begin)} on. Enlarge to see them.`));
      return;
    }
    const words = `${state.replaceAll("_", " ")} of ${lane}, step ${at}: ${isCut ? "cut off" : seconds(end - begin)}, from ${seconds(begin)} on`;
    if (source.value !== "") {
      detail.replaceChildren(make("p", {}, words, more ? ` (${more})` : ""));
      return;
    }
    try {
      const known = await ask("phase", { run: name, id }, signal);
      const facts = Object.keys(known.detail).length ? make("pre", {}, JSON.stringify(known.detail, null, 1)) : null;
      detail.replaceChildren(make("p", {}, `${words} (${when(known.started_s)}), start ${known.incarnation} of the trainer.`), facts ?? "");
    } catch (error) { failed(error); }
  }

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, view: [...view], moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      canvas.classList.toggle("over", Boolean(barAt(event.offsetX, event.offsetY)));
      return;
    }
    const away = event.offsetX - drag.x;
    if (Math.abs(away) > 3) drag.moved = true;
    if (drag.moved) move(drag.view[0] - away / scale(), drag.view[1] - away / scale());
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) describe(barAt(event.offsetX, event.offsetY));
    drag = null;
  });
  canvas.addEventListener("wheel", (event) => {
    // A wheel alone scrolls the page.
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) < Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey) zoom(WHEEL ** event.deltaY, toTime(event.offsetX));
    else { const away = (event.deltaX || event.deltaY) / scale(); move(view[0] + away, view[1] + away); }
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, toTime(event.offsetX)));
  canvas.addEventListener("keydown", (event) => {
    const span = view[1] - view[0];
    const acts = {
      ArrowLeft: () => move(view[0] - span / 5, view[1] - span / 5), ArrowRight: () => move(view[0] + span / 5, view[1] + span / 5),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: () => all(),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  });
  const all = () => { move(0, data.end); };
  const toStep = () => { follows = false; source.value = ""; load({ step: Math.max(0, Math.trunc(Number(step.value)) || 0) }).catch(failed); };
  step.addEventListener("change", toStep);
  source.addEventListener("change", () => { chosen = null; follows = source.value === ""; load({}).catch(failed); });
  new ResizeObserver(draw).observe(frame);
  document.addEventListener("theme", () => { colours.clear(); draw(); }, { signal });
  place.replaceChildren(
    make("div", { className: "toolbar" }, source, make("label", {}, "go to step ", step), button("Newest", () => { follows = true; source.value = ""; load({}).catch(failed); }),
      button("All", all), button("+", () => zoom(0.5), { aria: { label: "Enlarge" } }), button("−", () => zoom(2), { aria: { label: "Shrink" } }),
      make("span", { className: "quiet hint" }, "Drag to move, double-click or Ctrl and wheel to enlarge.")),
    said, keys, frame, detail, totals);
  await load({});
  return { changed: () => { if (follows) load({}).catch(failed); } };
}
