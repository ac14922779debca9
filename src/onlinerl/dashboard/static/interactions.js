import { key } from "./api.js";
import { h } from "./dom.js";
import { plural, signed, time } from "./format.js";
import { card, chip, empty, keyed, version } from "./parts.js";

const FILTERS = { "": "All", accepted: "Accepted", rejected: "Rejected", timeout: "Timed out", waiting: "No verdict", silent: "Silent" };
const STEPS = [0.9, 0.6, 0.3, 0.1];
const WORDS = ["over 90 %", "60 to 90 %", "30 to 60 %", "10 to 30 %", "under 10 %"];

export function interactions({ board, list, filter, older, refused, wrong }) {
  const head = h("div.head", {}, h("h1", {}, "Interactions"), h("p", {}, board.code === "hidden" ? "their text is hidden by the policy's settings" : "what was asked, what was answered, what was made of it"));
  if (!key.get()) return [head, card("", keyed("These are people's prompts and code: the admin key is needed to read them."), wrong ? h("p.fault", { role: "alert" }, `${wrong}.`) : null)];
  return [head,
    h("div.bar-of-tools", {},
      h("div.segments", { role: "group", "aria-label": "Verdict" }, Object.entries(FILTERS).map(([name, text]) =>
        h("button", { type: "button", "data-do": "filter", "data-to": name, "aria-pressed": String(name === filter) }, text))),
      h("button", { type: "button", "data-do": "export", title: `CSV of ${board.span.words}` }, `Export CSV, ${board.span.words}`)),
    legend(board),
    refused ? h("p.fault", { role: "alert" }, refused) : null,
    !list ? h("p.loading", {}, "Loading …") : list.length ? h("ol.answers", {}, list.map((one) => answer(one, board.code)))
      : card("", empty(filter ? "None with that verdict." : "No request yet: what is asked shows up here by itself.")),
    list?.length ? h("div.buttons", {}, older ? h("button", { type: "button", "data-do": "newer" }, "Back to the newest") : null,
      h("button", { type: "button", "data-do": "older" }, "Older")) : null];
}

const legend = () => h("p.legend", {}, "Probability of each token when it was drawn: ", WORDS.map((text, n) => h("span", {}, h("span.token", { class: `p${n}` }, text))),
  h("span", {}, h("span.token.unseen", {}, "not displayed")));

const step = (logprob) => { const p = Math.exp(logprob); const n = STEPS.findIndex((least) => p >= least); return n < 0 ? STEPS.length : n; };

function answer(one, code) {
  const verdict = one.verdict || (one.finish === "error" ? "error" : one.finish === "abort" ? "cancelled" : "no verdict");
  return h("li.card", {},
    h("p.facts", {}, time(one.at), version(one.version), chip(verdict), one.arm === "live" ? null : chip(one.arm, "arm"),
      one.reward === null ? null : h("strong", { title: one.trained ? `run ${one.run} trained with it` : "by its verdict, at this page's τ" }, `${signed(one.reward, 2)}${one.trained ? " trained" : ""}`),
      h("span.note.grow", {}, [one.language, one.user && `by ${one.user}`, one.source && `via ${one.source}`, one.use].filter(Boolean).join(" · ")),
      h("span.note", {}, `${plural(one.tokens.length, "token")}, ${(one.seconds * 1000).toFixed(0)} ms`)),
    h("pre", { tabindex: "0", role: "region", "aria-label": `Answer of v${one.version}, ${verdict}` },
      code === "shown" ? h("span.around", {}, one.before) : null,
      one.tokens.map((token) => h("span.token", { class: `p${step(token.logprob)}${token.seen ? "" : " unseen"}`, title: `${(Math.exp(token.logprob) * 100).toFixed(1)} % (log-probability ${token.logprob.toFixed(2)})` },
        code === "shown" ? (token.text === "" ? "␃" : token.text.replaceAll("\n", "⏎\n")) : "▒".repeat(Math.max(1, Math.min(token.size, 12))))),
      code === "shown" ? h("span.around", {}, one.after) : null));
}
