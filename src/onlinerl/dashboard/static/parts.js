// Pieces that several pages show.
import { hue } from "./charts.js";
import { h } from "./dom.js";
import { count, percent, signed, time } from "./format.js";

export const card = (title, ...parts) => h("section.card", { "aria-label": title }, title && h("h2", {}, title), ...parts);
export const empty = (text, command, more) => h("div.empty", {}, h("p", {}, text),
  command && h("div.command", {}, h("code", {}, command), h("button.quiet", { type: "button", "data-do": "copy", "data-text": command }, "Copy")),
  more && h("p", {}, more));
export const chip = (text, kind) => h("span.chip", { "data-kind": kind ?? text }, text);
export const version = (id) => h("span.version", {}, h("i", { style: { background: `var(${hue(id)})` } }), `v${id}`);

export const chart = (spec) => h("x-chart", { role: "img", "aria-label": spec.words, spec });

export const scroll = (label, table) => h("div.scroll", { tabindex: "0", role: "region", "aria-label": label }, table);

export function curves(board, what, words, shape) {
  const { at, lines } = board.series;
  return chart({
    at, lines: lines.map((line) => ({ label: `v${line.version}`, color: hue(line.version), values: line[what] })),
    marks: board.changes.map((one) => ({ at: one.at, text: `${one.back ? "↩" : "▲"} v${one.version}` })),
    x: [board.span.since, board.span.until], height: 220, words, ...shape,
  });
}

export function table(board) {
  const rows = Object.entries(board.by_version).reverse();
  return scroll("Numbers by version", h("table", {},
    h("caption", {}, `By version, ${board.span.words}`),
    h("thead", {}, h("tr", {}, ["Version", "Requests", "Shown", "Accepted", "Rejected", "Timed out", "Accept rate", "Reward"].map((text, n) =>
      h("th", { scope: "col", class: n ? "number" : null }, text)))),
    h("tbody", {}, rows.map(([id, one]) => h("tr", {}, h("th", { scope: "row" }, version(Number(id))),
      ["opportunities", "shown", "accepted", "rejected", "timeout"].map((name) => h("td.number", {}, count(one[name]))),
      h("td.number", {}, percent(one.rate)), h("td.number", {}, signed(one.reward)))))));
}

/** The interval at every look, with the line that it must leave. */
export function interval(experiment, height = 240) {
  const { looks } = experiment;
  if (!looks.length) return null;
  const points = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x).toFixed(1)}`;
  const last = looks.at(-1);
  return chart({
    at: looks.map((one) => one.at),
    lines: [
      { label: "at most", color: "--edge", width: 1, values: looks.map((one) => one.high * 100) },
      { label: "at least", color: "--edge", width: 1, values: looks.map((one) => one.low * 100) },
      { label: "estimate", color: "--accent", values: looks.map((one) => one.estimate * 100) },
    ],
    bands: [[0, 1]], zero: true, format: points, height, marks: [],
    words: `Difference of ${experiment.treatment} to ${experiment.control} in points: ${looks.length} looks, the last from ${points(last.low * 100)} to ${points(last.high * 100)}. ${experiment.words.text}.`,
  });
}

/** "v7 is better by 1.2 to 4.0 points; promoted 14:05" */
export const sentence = ({ words }) => [words.text, "; ", words.outcome, words.at && [" ", time(words.at)]];

export const keyed = (what) => h("div.empty.keyed", {}, h("p", {}, what),
  h("button.primary", { type: "button", "data-do": "unlock" }, "Enter the admin key"));
