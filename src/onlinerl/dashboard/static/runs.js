import { h } from "./dom.js";
import { count, none, number, plural, time } from "./format.js";
import { card, chart, chip, empty } from "./parts.js";

const CURVES = {
  reward: ["Reward", (x) => x.toFixed(2), { zero: true }], accepted: ["Accepted of shown", (x) => `${Math.round(x * 100)} %`, { floor: 0 }],
  silent: ["Silent", (x) => `${Math.round(x * 100)} %`, { floor: 0 }], kl: ["KL per token", (x) => number(x), { floor: 0 }],
  entropy: ["Entropy per token", (x) => number(x), { floor: 0 }], gradient_norm: ["Gradient norm", (x) => number(x), { floor: 0 }],
};

export function runs({ board }) {
  const { run } = board;
  if (!run) return [h("div.head", {}, h("h1", {}, "No run yet")), card("", empty(
    board.totals.waiting ? `${plural(board.totals.waiting, "verdict")} ${board.totals.waiting === 1 ? "waits" : "wait"} to be learned from:` : "Verdicts come first: accept or reject some answers. Then:",
    "onlinerl train", `With policies.${board.policy}.trigger.feedback=256 the server starts runs by itself.`))];
  return [
    h("div.head", {}, h("p.kicker", {}, `Run ${run.id} from v${run.parent}`, chip(run.state)),
      h("h1", {}, said(run)), h("p", {}, "started ", time(run.created_at), ` · τ ${run.tau.toFixed(3)}`, run.follow ? " · goes on as feedback arrives" : null)),
    run.last_batch ? h("progress", { max: run.last_batch, value: run.step, "aria-label": "Batches done" }) : null,
    run.batches.length ? [h("div.small-charts", {}, Object.entries(CURVES).map(([name, [title, format, shape]]) => curve(run, name, title, format, shape))), guards(run)]
      : card("", empty("The first batch is being filled: its numbers appear by themselves.")),
    board.runs.length > 1 ? card("Before", h("ul.rows", {}, board.runs.slice(1).map((one) => h("li", {},
      h("strong", {}, `${one.id}`), chip(one.state), h("span.grow", {}, one.message || said(one)), h("span.note", {}, `from v${one.parent}, `, plural(one.step, "batch").replace("batchs", "batches"), ", ", time(one.created_at)))))) : null,
  ];
}

function said(run) {
  const batches = `${count(run.step)} ${run.step === 1 ? "batch" : "batches"}`;
  if (run.state === "lost") return `Its process is gone after ${batches}: onlinerl train carries it on`;
  if (run.state === "running") return run.wish ? `Told to ${run.wish}, ${batches} done` : `Learning: ${batches}${run.last_batch ? ` of ${run.last_batch}` : ""} done`;
  if (run.state === "paused") return `Paused after ${batches}`;
  return run.message ? `${run.message[0].toUpperCase()}${run.message.slice(1)}` : `${batches} done`;
}

function curve({ batches, curves }, name, title, format, shape) {
  const values = curves[name];
  const last = values.findLast((value) => value !== null);
  return h("section.card", { "aria-label": title }, h("h2", {}, title, h("span.value", {}, last === undefined ? none : format(last))),
    last === undefined ? h("p.note", {}, "not measured in this run")
      : chart({ at: batches, axis: "count", legend: false, height: 130, format, marks: [], ...shape,
        lines: [{ label: title, color: "--accent", values }], words: `${title} over ${batches.length} batches, the last ${format(last)}` }));
}

function guards(run) {
  return card("Guards", h("p.note", {}, "A run whose batch leaves a band ends, and the last good version stays."),
    h("ul.guards", {}, run.guards.map((one) => {
      const low = one.low ?? 0, high = one.high ?? Math.max(one.value, one.low ?? 0) * 1.25 + 1e-9;
      const ok = one.value >= low && (one.high === null || one.value <= high);
      const from = Math.min(low, one.value), to = Math.max(high, one.value), place = ((one.value - from) / (to - from || 1)) * 100;
      return h("li", { "data-ok": String(ok) }, h("span.grow", {}, one.words),
        h("span.meter", { "aria-hidden": "true" }, h("i", { style: { left: `${place.toFixed(1)}%` } })),
        h("span.number", {}, `${number(one.value)} `, h("span.note", {}, band(one))), chip(ok ? "inside" : "outside", ok ? "up" : "down"));
    })));
}

function band({ low, high }) {
  if (low === null) return `at most ${number(high)}`;
  if (high === null) return `at least ${number(low)}`;
  return `${number(low)} to ${number(high)}`;
}
