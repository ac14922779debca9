import { h } from "./dom.js";
import { count, number, percent, signed, time } from "./format.js";
import { card, chip, empty, interval, scroll, sentence } from "./parts.js";

const KINDS = { start: "started", ramp: "next stage", promote: "promoted", futile: "given up", abort: "taken back", stop: "stopped" };

export function experiments({ board }) {
  const { experiment } = board;
  if (!experiment) {
    const set = board.publish === "experiment";
    return [h("div.head", {}, h("h1", {}, "No experiment yet")),
      card("", empty(
        set ? "The next version that a run makes enters one by itself. Or start one now:"
          : "Compare a candidate with the live version on live users: the better one stays. Start one:",
        `onlinerl experiments start ${board.versions.find((one) => one.state === "candidate")?.id ?? "VERSION"}`,
        set ? null : `With policies.${board.policy}.publish=experiment every new version has to prove itself so.`))];
  }
  return [
    h("div.head", {}, h("p.kicker", {}, `Experiment ${experiment.id}: ${experiment.treatment} against ${experiment.control}`, chip(experiment.state)),
      h("h1.sentence", { id: "sentence" }, sentence(experiment)),
      h("p", {}, experiment.words.reason || `started by ${experiment.actor || "a person"} `, experiment.words.reason ? null : time(experiment.created_at))),
    experiment.ended_at ? null : h("div.buttons.left", {},
      experiment.asks ? h("button.primary", { type: "button", "data-do": "confirm", "data-id": String(experiment.id) }, experiment.asks === "promote" ? `Promote ${experiment.treatment}` : `Give ${experiment.treatment} up`) : null,
      h("button", { type: "button", "data-do": "stop", "data-id": String(experiment.id) }, "Stop it")),
    stages(experiment),
    card("Difference in reward per request", h("p.note", {}, `in points, hundredths of reward at τ ${experiment.tau.toFixed(3)}; the band holds the truth at every look with probability ${percent(1 - experiment.alpha, 1)}; decided when it leaves the line at 0`),
      interval(experiment) || empty("Too few users yet for an interval: it appears by itself.")),
    h("div.pair", {}, history(experiment), numbers(experiment)),
    past(board.experiments.filter((one) => one.id !== experiment.id)),
  ];
}

const stages = ({ stages, stage, ended_at }) => h("ol.stages", { "aria-label": "Stages: share of users with the treatment" }, stages.map((share, n) =>
  h("li", { "data-state": n < stage ? "done" : n > stage ? "ahead" : ended_at ? "done" : "here", "aria-current": n === stage && !ended_at ? "step" : null },
    h("span", {}, `${number(share * 100)} %`), n === stage && !ended_at ? h("span.note", {}, "now") : null)));

const history = (experiment) => card("What was decided", h("ul.rows", {}, [...experiment.history].reverse().map((one) => h("li", {},
  time(one.at), chip(one.proposed ? "asks" : KINDS[one.kind] || one.kind, one.proposed ? "waiting" : one.kind), h("span.grow", {}, one.reason), h("span.note", {}, one.actor)))));

function numbers({ numbers }) {
  const rows = Object.entries(numbers);
  return card("Last look", rows.length ? scroll("Numbers of the last look", h("table", {}, h("tbody", {}, rows.map(([name, value]) =>
    h("tr", {}, h("th", { scope: "row" }, name), h("td.number", {}, Number.isInteger(value) ? count(value) : ["estimate", "low", "high"].includes(name) ? signed(value, 4) : number(value)))))))
    : empty("No look yet."));
}

const past = (ended) => ended.length ? card("Before", h("ul.rows", {}, ended.map((one) => h("li", {},
  h("strong", {}, `${one.id}`), chip(one.state), h("span.grow", {}, sentence(one)))))) : null;
