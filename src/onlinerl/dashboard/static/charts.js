// Curves, drawn by uPlot. <x-chart> takes a `spec`, redraws when it changes, and follows width and theme.
/* global uPlot */
import { when } from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HUES = 6;
export const hue = (version) => `--v${version % HUES}`;

/**
 * spec: {at, lines: [{label, color, values, dash?, fill?}], bands?, marks: [{at, text}], zero?, format, height,
 *        words, axis: "time" | "count", floor?}. `values` has null where there is nothing; `bands` are pairs of
 * places in `lines`.
 */
class Chart extends HTMLElement {
  #spec = null;
  #plot = null;
  #told = "";
  #watch = new ResizeObserver(() => this.#fit());

  connectedCallback() {
    this.#watch.observe(this);
    document.addEventListener("theme", this.#again);
    this.#draw();
  }
  disconnectedCallback() {
    this.#watch.disconnect();
    document.removeEventListener("theme", this.#again);
    this.#plot?.destroy();
    this.#plot = null;
    this.#told = "";
  }
  get spec() { return this.#spec ?? undefined; }
  set spec(spec) {
    this.#spec = spec;
    if (this.isConnected) this.#draw();
  }
  #again = () => { this.#told = ""; this.#draw(); };
  #fit() {
    if (this.#plot && this.clientWidth && Math.abs(this.clientWidth - this.#plot.width) > 1)
      this.#plot.setSize({ width: this.clientWidth, height: this.#spec.height });
  }
  #draw() {
    const spec = this.#spec;
    if (!spec || !this.clientWidth) { if (spec) requestAnimationFrame(() => this.isConnected && this.clientWidth && this.#draw()); return; }
    const { at, lines, ...shape } = spec;
    const format = spec.format.toString();
    const told = JSON.stringify([shape, format, lines.map(({ values, ...rest }) => rest)]);
    const data = [at, ...lines.map((line) => line.values)];
    if (told === this.#told) { this.#plot.setData(data); return; }
    this.#told = told;
    this.#plot?.destroy();
    this.style.setProperty("min-height", `${spec.height}px`);
    this.#plot = new uPlot(options(spec, this.clientWidth), data, this);
  }
}
customElements.define("x-chart", Chart);

function options(spec, width) {
  const text = css("--soft"), grid = css("--grid"), font = "12px system-ui, sans-serif";
  const time = spec.axis !== "count";
  return {
    width, height: spec.height,
    padding: [spec.marks?.length ? 18 : 8, 8, 0, 0],
    cursor: { drag: { x: false, y: false }, points: { size: 7 } },
    legend: { show: spec.legend !== false, live: true, markers: { width: 0, fill: (plot, n) => css(spec.lines[n - 1]?.color ?? "--line") } },
    scales: {
      x: spec.x ? { time, range: () => spec.x } : { time },
      y: { range: (_, low, high) => bounds(low, high, spec) },
    },
    axes: [
      { stroke: text, font, grid: { show: false }, ticks: { stroke: grid, size: 4 }, size: 30,
        values: time ? (_, at) => labels(at) : (_, at) => at.map(String), space: 70 },
      { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, size: 58, space: 36,
        values: (_, at) => at.map(spec.format) },
    ],
    series: [
      { label: "at", value: (_, at) => (at == null ? "" : time ? when(at) : String(at)) },
      ...spec.lines.map((line) => ({
        label: line.label, stroke: css(line.color), width: line.width ?? 2, dash: line.dash,
        value: (_, value) => (value == null ? "" : spec.format(value)),
        points: { size: 5, fill: css(line.color), filter: lonely },
        spanGaps: false,
      })),
    ],
    bands: (spec.bands || []).map(([high, low]) => ({ series: [high + 1, low + 1], fill: css("--band") })),
    hooks: { draw: [(plot) => mark(plot, spec)] },
  };
}

/** Places of points between two gaps: no line shows them. */
function lonely(plot, series) {
  const values = plot.data[series];
  const places = [];
  values.forEach((value, place) => {
    if (value != null && values[place - 1] == null && values[place + 1] == null) places.push(place);
  });
  return places;
}

function bounds(low, high, spec) {
  if (low === null || low === undefined) [low, high] = [0, 1];
  if (spec.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (spec.floor !== undefined) low = Math.max(spec.floor, low);
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  return [spec.floor !== undefined && low - room < spec.floor ? spec.floor : low - room, high + room];
}

function labels(at) {
  const days = at.length > 1 && at[1] - at[0] >= 43200;
  return at.map((one) => (days ? when(one).replace(/ \d\d:\d\d$/, "") : when(one).slice(-5)));
}

/** The line at zero, and where something changed. */
function mark(plot, spec) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = ratio;
  if (spec.zero) {
    const y = plot.valToPos(0, "y", true);
    ctx.strokeStyle = css("--strong");
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
  }
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  let free = -Infinity;
  for (const one of spec.marks || []) {
    const x = plot.valToPos(one.at, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = css("--strong");
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    const half = ctx.measureText(one.text).width / 2;
    const middle = Math.min(Math.max(x, bbox.left + half), bbox.left + bbox.width - half);
    if (middle - half < free) continue;
    ctx.fillText(one.text, middle, bbox.top - 5 * ratio);
    free = middle + half + 6 * ratio;
  }
  ctx.restore();
}
