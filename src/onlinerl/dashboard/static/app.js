// The page: where one is, what was heard last, and asking again. Each view makes a tree from what was heard.
import { Refused, forget, get, key } from "./api.js";
import { children, h, morph } from "./dom.js";
import { ago } from "./format.js";
import { act, lock, unlock } from "./dialogs.js";
import "./charts.js";
import { now } from "./now.js";
import { experiments } from "./experiments.js";
import { versions } from "./versions.js";
import { runs } from "./runs.js";
import { interactions } from "./interactions.js";

const LOOK = 2000; // milliseconds between two looks at the board
const SLOW = 5000; // … at replicas and interactions
const PAGES = { now, experiments, versions, runs, interactions };
const TITLES = { now: "Now", experiments: "Experiments", versions: "Versions", runs: "Runs", interactions: "Interactions" };
const SPANS = { hour: "1 h", day: "24 h", week: "7 d" };

export const state = {
  board: null, replicas: null, list: null, refused: "", filter: "", older: false, wrong: "",
  heard: 0, lost: "",
  policy: new URLSearchParams(location.search).get("policy") || "",
  span: sessionStorage.getItem("onlinerl.span") || "day",
};

const page = () => (location.hash.slice(1) in PAGES ? location.hash.slice(1) : "now");
export const named = (path, more = {}) => `${path}?${new URLSearchParams({ ...(state.policy && { policy: state.policy }), ...more })}`;

// ----------------------------------------------------------------------------------- what is heard

async function look() {
  try {
    const heard = await get(named("/dashboard/board", { span: state.span }), { marked: true });
    if (heard) state.board = heard;
    state.heard = Date.now();
    state.lost = "";
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    state.lost = error.message;
    if (error.status === 404) state.policy = ""; // the policy is gone from the settings
  }
  draw();
}

async function lookSlowly() {
  try {
    state.replicas = await get("/dashboard/replicas");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
  }
  if (page() === "interactions" && !state.older) await list();
  draw();
}

export async function list(before) {
  if (!key.get()) return;
  try {
    const more = { ...(state.filter && { verdict: state.filter }), ...(before && { before }) };
    const found = await get(named("/dashboard/interactions", more), { keyed: true });
    state.list = before ? [...state.list, ...found] : found;
    state.older = Boolean(before);
    state.refused = "";
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    state.refused = error.message;
    if (error.status === 401 || error.status === 403) { key.forget(); state.wrong = error.message; }
  }
  draw();
}

/** One chain of looks, which rests while nobody sees the page. */
function repeat(look, pause) {
  let timer = 0;
  const turn = async () => {
    clearTimeout(timer);
    if (!document.hidden) await look();
    timer = setTimeout(turn, pause);
  };
  document.addEventListener("visibilitychange", () => document.hidden || turn());
  return turn;
}
export const again = repeat(look, LOOK);
export const slowly = repeat(lookSlowly, SLOW);

// ------------------------------------------------------------------------------------ what is drawn

const main = document.getElementById("main");
let drawn = "";

export function draw() {
  const where = page();
  document.title = `${TITLES[where]} – onlinerl`;
  children(document.getElementById("nav"), Object.keys(PAGES).map((name) =>
    h("a", { href: `#${name}`, "aria-current": name === where ? "page" : null }, TITLES[name],
      name === "experiments" && state.board?.experiment && !state.board.experiment.ended_at ? h("span.live-dot", { title: "one is running" }) : null)));
  children(document.getElementById("tools"), tools());
  beat();
  if (!state.board) {
    if (state.lost) morph(main, h("main", { id: "main", tabindex: "-1" }, h("p.loading", {}, `${state.lost}; trying again`)));
    return;
  }
  const fresh = h("main", { id: "main", tabindex: "-1", class: where }, PAGES[where](state));
  if (drawn !== where) { main.replaceChildren(); scrollTo(0, 0); drawn = where; }
  morph(main, fresh);
}

function tools() {
  const several = state.board?.policies.length > 1;
  const theme = document.documentElement.dataset.theme;
  return [
    several && h("select", { id: "policy", "aria-label": "Policy" },
      state.board.policies.map((name) => h("option", { value: name, selected: name === state.board.policy }, name))),
    h("div.segments", { role: "group", "aria-label": "Stretch of time" }, Object.entries(SPANS).map(([name, text]) =>
      h("button", { type: "button", "data-do": "span", "data-to": name, "aria-pressed": String(name === state.span) }, text))),
    h("button.quiet", { type: "button", "data-do": "theme", "aria-label": `Colours: ${theme || "as the system"}`, title: "Colours: system, light, dark" },
      { "": "◐", light: "☀", dark: "☾" }[theme]),
    h("button.quiet", { type: "button", "data-do": key.get() ? "lock" : "unlock", id: "key" }, key.get() ? "Lock" : "Unlock"),
  ];
}

function beat() {
  const late = state.heard && Date.now() - state.heard > 3 * LOOK;
  const pulse = document.getElementById("pulse");
  pulse.dataset.state = state.lost || late ? "lost" : "live";
  const said = state.lost ? `${state.lost}; trying again`
    : state.heard ? `updates by itself · heard ${ago((Date.now() - state.heard) / 1000)}` : "";
  if (pulse.textContent !== said) pulse.textContent = said;
}

// --------------------------------------------------------------------------------- what people do

const DEEDS = {
  span({ to }) { state.span = to; sessionStorage.setItem("onlinerl.span", to); forget(); again(); draw(); },
  theme() {
    const next = { "": "light", light: "dark", dark: "" }[document.documentElement.dataset.theme];
    document.documentElement.dataset.theme = next;
    localStorage.setItem("onlinerl.theme", next);
    document.dispatchEvent(new Event("theme"));
    draw();
  },
  unlock: () => unlock(state.wrong),
  lock,
  promote: ({ version }) => act("promote", Number(version)),
  rollback: ({ version }) => act("rollback", Number(version)),
  try: ({ version }) => act("try", Number(version)),
  stop: ({ id }) => act("stop", Number(id)),
  confirm: ({ id }) => act("confirm", Number(id)),
  filter({ to }) { state.filter = to; state.older = false; state.list = null; draw(); list(); },
  older() { list(state.list.at(-1).at); },
  newer() { state.older = false; list(); },
  async export() {
    try {
      const { url } = await get(named("/dashboard/export", { span: state.span }), { keyed: true });
      const link = h("a", { href: url, download: "" });
      document.body.append(link); link.click(); link.remove();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status === 401 || error.status === 403) { key.forget(); unlock(error.message); } else say(error.message);
    }
  },
  async copy({ text }) { await navigator.clipboard.writeText(text); say("copied"); },
};

export function say(text) { document.getElementById("said").textContent = text; }

document.addEventListener("click", (event) => {
  const asked = event.target.closest("[data-do]");
  if (asked) DEEDS[asked.dataset.do](asked.dataset);
});
document.addEventListener("change", (event) => {
  if (event.target.id !== "policy") return;
  state.policy = event.target.value;
  state.list = null;
  history.replaceState(null, "", `?policy=${encodeURIComponent(state.policy)}${location.hash}`);
  forget(); again(); slowly();
});
addEventListener("hashchange", () => {
  draw();
  document.querySelector("nav [aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
  if (page() === "interactions") list();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
setInterval(beat, 1000);

again();
slowly();
