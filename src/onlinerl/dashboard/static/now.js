import { h } from "./dom.js";
import { count, percent, plural, signed, time } from "./format.js";
import { card, chip, curves, empty, interval, sentence, table, version } from "./parts.js";

const FATES = {
  matched: "joined to its answer and counted", duplicate: "said again what was known", late: "came after the answer was learned from, or after its deadline",
  superseded: "weaker than what was known", unmatched: "fits no answer (yet)",
};

export function now({ board, replicas }) {
  return [head(board), tiles(board), board.window.opportunities ? charts(board) : first(board),
    board.experiment && !board.experiment.ended_at ? running(board.experiment) : null,
    board.window.opportunities ? card("", table(board)) : null,
    h("div.pair", {}, engines(replicas, board), feedback(board))];
}

function head({ serving, live, live_at, span, window, changes }) {
  if (serving === null) return h("div.head", {}, h("h1", {}, "The engines are loading"), h("p", {}, "Requests wait for the first of them."));
  const last = changes.at(-1);
  return h("div.head", {}, h("h1", {}, "New requests get ", version(serving)),
    h("p", {}, live !== serving && live !== null ? `v${live} is live, and loads; ` : null,
      live_at ? ["since ", time(live_at)] : null,
      last && last.version === live ? [last.back ? " · rolled back by " : " · promoted by ", last.actor] : null,
      ` · ${plural(window.opportunities, "request")} in ${span.words}`));
}

function tiles({ window, totals, tau, by_version, serving, previous }) {
  const mine = by_version[serving], before = by_version[previous];
  const against = (name, say) => mine && before && mine[name] !== null && before[name] !== null && previous !== serving
    ? h("p.delta", { "data-sign": Math.sign(mine[name] - before[name]) }, `v${serving} ${say(mine[name] - before[name])} against v${previous}`) : null;
  const points = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x * 100).toFixed(1)} points`;
  const tile = (label, value, note, id) => h("div.tile", {}, h("p.label", {}, label), h("p.value", { id }, value), note);
  return h("div.tiles", {},
    tile("Accept rate", percent(window.rate), against("rate", points) || h("p.delta", {}, "accepted among the shown"), "rate"),
    tile("Reward per request", signed(window.reward), against("reward", points) || h("p.delta", {}, `at τ ${tau.value.toFixed(3)} of ${tau.origin}`), "reward"),
    tile("Requests", count(window.opportunities), h("p.delta", {}, `${percent(window.opportunities ? window.shown / window.opportunities : null, 0)} with text, ${count(window.silent)} chosen silences`), "requests"),
    tile("Verdicts to learn from", count(totals.waiting), h("p.delta", {}, `of ${count(totals.accepted + totals.rejected + totals.timeout)} ever given`), "waiting"));
}

function charts(board) {
  const said = (what, name) => `${name} by version over ${board.span.words}. ` + Object.entries(board.by_version)
    .map(([id, one]) => `v${id}: ${what(one)}`).join(", ") + ". The table below has the numbers.";
  return [h("div.pair", {},
    card("Accept rate", h("p.note", {}, "of shown answers, by version; dashed: a version went live (▲) or came back (↩)"),
      curves(board, "rate", said((one) => percent(one.rate), "Accept rate"), { format: (x) => `${Math.round(x * 100)} %`, floor: 0 })),
    card("Reward per request", h("p.note", {}, `accept 1−τ, reject −τ, silence 0; τ ${board.tau.value.toFixed(3)} of ${board.tau.origin} for all`),
      curves(board, "reward", said((one) => signed(one.reward), "Reward per request"), { format: (x) => x.toFixed(2), zero: true }))),
  ];
}

function first(board) {
  const body = JSON.stringify({ model: board.policy, prompt: "def mean(values):\n    return ", max_tokens: 24 }).replaceAll("'", "'\\''");
  return card(board.totals.opportunities ? "Quiet" : "No request yet",
    board.totals.opportunities
      ? empty(`Nobody asked in ${board.span.words}. Choose a longer stretch above, or send traffic:`, "onlinerl simulate")
      : empty("Point an editor at this address (onlinerl setup continue), or ask from a terminal:",
        `curl -s ${location.origin}/v1/completions -H 'content-type: application/json' -d '${body}'`, "What is asked and said shows up here by itself."));
}

const running = (experiment) => card("Experiment",
  h("p.sentence", {}, sentence(experiment)), interval(experiment, 180), h("p", {}, h("a", { href: "#experiments" }, "All about it")));

function engines(replicas, board) {
  if (!replicas) return card("Replicas", h("p.note", {}, "asking the engines …"));
  const mine = replicas.filter((one) => one.policy === board.policy);
  if (!mine.length) return card("Replicas", empty("No engine is known. Start one:", "onlinerl serve"));
  return card("Replicas", h("ul.rows", {}, mine.map((one) => h("li", {},
    h("strong", {}, one.name), chip(one.state),
    h("span.grow", {}, one.versions.length ? one.versions.map((id) => version(id)) : "holds no version"),
    h("span.note", {}, one.state === "up" ? `${one.running} running, ${one.waiting} waiting` : "its log tells why")))));
}

function feedback({ feedback, span, policies }) {
  const total = Object.values(feedback).reduce((a, b) => a + b, 0);
  const title = policies.length > 1 ? "Feedback, all policies" : "Feedback";
  if (!total) return card(title, empty(`None in ${span.words}. Clients report to:`, `${location.origin}/v1/feedback`));
  return card(title,
    h("div.bar", { "aria-hidden": "true" }, Object.entries(feedback).map(([name, n]) => n ? h("i", { "data-fate": name, style: { "flex-grow": String(n) } }) : null)),
    h("dl.fates", {}, Object.entries(feedback).map(([name, n]) => h("div", {},
      h("dt", {}, h("i", { "data-fate": name }), name), h("dd", {}, h("strong", {}, count(n)), ` ${FATES[name]}`)))));
}
