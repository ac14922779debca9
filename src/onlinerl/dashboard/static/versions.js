import { hue } from "./charts.js";
import { h } from "./dom.js";
import { count, percent, plural, signed, time } from "./format.js";
import { card, chip, empty, version } from "./parts.js";

const LANE = 20;

export function versions({ board }) {
  const { versions, live, previous } = board;
  const waiting = versions.filter((one) => one.state === "candidate").length;
  return [
    h("div.head", {}, h("h1", {}, "Versions"),
      h("p", {}, live === null ? "none is live yet" : [`v${live} is live`, previous === null ? null : `; a rollback brings v${previous} back`, waiting ? `; ${plural(waiting, "candidate")} to promote` : null])),
    card("", h("ol.lineage", { "aria-label": "Lineage, the newest first" }, versions.map((one) => row(one, board)))),
    versions.length === 1 ? card("", empty("Only the base model so far. A run makes versions of what users say:", "onlinerl train")) : null,
  ];
}

function row(one, { live, previous, by_version, experiment }) {
  const trying = experiment && !experiment.ended_at;
  const recent = by_version[one.id];
  const back = one.id === previous && live !== null;
  const promotable = (one.state === "candidate" || one.state === "canary") && !one.collected;
  return h("li", { "data-state": one.state, id: `v${one.id}` },
    knot(one),
    h("div.grow", {},
      h("p", {}, version(one.id), chip(one.state), one.collected ? chip("files collected", "rejected") : null),
      h("p.note", {}, one.parent === null ? "the base model" : `from v${one.parent}`, one.run === null ? null : ` · run ${one.run}`, " · ", time(one.created_at),
        one.live_at && one.state === "live" ? [" · live since ", time(one.live_at)] : null)),
    h("p.counts", {}, one.opportunities ? [h("strong", {}, percent(one.rate)), ` accepted of ${count(one.opportunities)} requests`] : "served nobody yet",
      recent?.reward !== undefined && recent?.reward !== null ? h("span.note", {}, `reward ${signed(recent.reward)} lately`) : null),
    h("div.deeds", {},
      one.state === "candidate" && !one.collected && live !== null && !trying ? h("button.quiet", { type: "button", "data-do": "try", "data-version": String(one.id) }, "Try", h("span.hidden", {}, ` v${one.id} on live users`)) : null,
      promotable ? h("button", { type: "button", "data-do": "promote", "data-version": String(one.id) }, "Promote", h("span.hidden", {}, ` v${one.id}`)) : null,
      one.state === "retired" && !one.collected ? h(back ? "button" : "button.quiet", { type: "button", "data-do": "rollback", "data-version": String(one.id) }, back ? "Roll back" : "Go back", h("span.hidden", {}, ` to v${one.id}`)) : null));
}

/** A row of the drawing: lanes that end at the dot, pass by, or go on down. */
function knot({ id, knot }) {
  const middle = (lane) => LANE / 2 + lane * LANE;
  const width = LANE * (1 + Math.max(knot.lane, ...knot.joins, ...knot.through));
  const dot = middle(knot.lane);
  return h("div.knot", { "aria-hidden": "true", style: { width: `${width}px` } },
    h("svg", { viewBox: `0 0 ${width} 100`, preserveAspectRatio: "none", width, height: "100%" },
      knot.through.map((lane) => h("path", { d: `M${middle(lane)} 0V100` })),
      knot.joins.map((lane) => h("path", { d: lane === knot.lane ? `M${dot} 0V50` : `M${middle(lane)} 0C${middle(lane)} 40 ${dot} 20 ${dot} 50` })),
      knot.leaves ? h("path", { d: `M${dot} 50V100` }) : null),
    h("i", { style: { left: `${dot}px`, background: `var(${hue(id)})` } }));
}
