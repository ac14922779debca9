// What asks before it acts: the key, promote, roll back. An action shows its effect: the version that new requests get.
import { Refused, get, key, post } from "./api.js";
import { again, draw, list, named, say, slowly, state } from "./app.js";
import { h } from "./dom.js";

const dialog = document.getElementById("dialog");
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

function show(...parts) {
  dialog.replaceChildren(...parts.filter(Boolean));
  if (!dialog.open) dialog.showModal();
}
const title = (text) => h("h2", { id: "dialog-title" }, text);
function button(text, deed, name = "button") {
  const made = h(name, { type: "button" }, text);
  made.addEventListener("click", deed);
  return made;
}

/** Ask for the admin key, and keep it for this tab once the server has taken it; then do `next`. */
export function unlock(wrong = "", next = null) {
  const field = h("input", { type: "password", id: "key-field", autocomplete: "off", spellcheck: "false", required: true,
    "aria-describedby": "key-help key-wrong" });
  const fault = h("p.fault", { id: "key-wrong", role: "alert" }, wrong);
  const form = h("form", {},
    title("Admin key"),
    h("p", { id: "key-help" }, "It was printed when the server first started, and lies in ", h("code", {}, "admin.key"),
      " in its home folder. This tab keeps it until it is closed."),
    h("label", { for: "key-field" }, "Key"), field, fault,
    h("div.buttons", {}, button("Cancel", () => dialog.close(), "button.quiet"), h("button.primary", { type: "submit" }, "Unlock")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    try {
      await get(named("/dashboard/export"), { keyed: true }); // the cheapest question that needs the key
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      key.forget();
      fault.textContent = `${error.message[0].toUpperCase()}${error.message.slice(1)}. Nothing was changed.`;
      field.select();
      draw();
      return;
    }
    state.wrong = "";
    dialog.close();
    say("unlocked");
    draw();
    if (next) next();
    else list();
  });
  show(form);
  field.focus();
}

export function lock() {
  key.forget();
  state.list = null;
  say("locked: the key is forgotten");
  draw();
}

const ASKED = {
  promote: (version, { live }) => ({
    title: `Promote v${version}?`,
    text: live === null ? `New requests get v${version} once an engine holds it.`
      : `New requests get v${version} instead of v${live} as soon as the engines hold it. Answers that have begun end on v${live}. A run that did not make v${version} is stopped.`,
    deed: "Promote",
    path: (base) => [`${base}/versions/${version}/promote`],
  }),
  rollback: (version, { live }) => ({
    title: `Roll back to v${version}?`,
    text: `New requests get v${version} again, within a second where the engines still hold it. Candidates that descend from v${live} are rejected, and the running run is stopped.`,
    deed: "Roll back",
    path: (base) => [`${base}/rollback`, { to: version }],
  }),
  try: (version, { live }) => ({
    title: `Try v${version} on live users?`,
    text: `An experiment against v${live} begins once the engines hold both: a small share of users gets v${version} at first, more as nothing speaks against it. A guardrail that breaks ends it.`,
    deed: "Try",
    path: (base) => [`${base}/experiments`, { treatment: version }],
    told: "the experiment is there",
  }),
  stop: (id, { experiment }) => ({
    title: `Stop experiment ${id}?`,
    text: `Everybody gets ${experiment.control} again, and ${experiment.treatment} is rejected where it was a canary of this policy.`,
    deed: "Stop it",
    path: (base) => [`${base}/experiments/${id}/stop`, { reason: "stopped on the dashboard" }],
    told: "the experiment is stopped",
  }),
  confirm: (id, { experiment }) => ({
    title: experiment.asks === "promote" ? `Promote ${experiment.treatment}?` : `Give ${experiment.treatment} up?`,
    text: `The experiment proposes it: ${experiment.words.text}. ${experiment.asks === "promote" ? `New requests get ${experiment.treatment} then.` : `${experiment.control} stays then.`}`,
    deed: experiment.asks === "promote" ? "Promote" : "Give up",
    path: (base) => [`${base}/experiments/${id}/confirm`, { decision: experiment.asks }],
    told: "confirmed",
  }),
};

/** Ask, act, and tell the effect: when new requests get the version, or where the experiment stands. */
export function act(name, version) {
  if (!key.get()) { unlock("", () => act(name, version)); return; }
  if (!state.board) return;
  const asked = ASKED[name](version, state.board);
  const before = state.board.serving;
  const fault = h("p.fault", { role: "alert" });
  const yes = button(asked.deed, async () => {
    yes.disabled = true;
    const started = performance.now();
    try {
      await post(...asked.path(`/admin/v1/policies/${encodeURIComponent(state.board.policy)}`));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      yes.disabled = false;
      if (error.status === 401 || error.status === 403) { key.forget(); unlock(`${error.message}. Nothing was changed.`, () => act(name, version)); return; }
      fault.textContent = `${error.message}. Nothing was changed.`;
      return;
    }
    if (asked.told) await told(asked);
    else await effect(version, before, started);
  }, name === "rollback" || name === "stop" ? "button.danger" : "button.primary");
  show(title(asked.title), h("p", {}, asked.text), fault,
    h("div.buttons", {}, button("Cancel", () => dialog.close(), "button.quiet"), yes));
  yes.focus();
}

async function told(asked) {
  await again();
  dialog.close();
  say(asked.told);
}

async function effect(version, before, started) {
  const close = button("Close", () => dialog.close(), "button.primary");
  const told = h("p.effect", { role: "status" }, `Written. Waiting for the engines to hold v${version} …`);
  show(title(`v${version} is live`), told, h("div.buttons", {}, close));
  close.focus();
  for (let turn = 0; turn < 240 && dialog.open; turn += 1) {
    await again();
    if (state.board.serving === version) {
      const seconds = ((performance.now() - started) / 1000).toFixed(1);
      told.textContent = `New requests get v${version}${before === null || before === version ? "" : ` instead of v${before}`}, ${seconds} s after you asked.`;
      told.dataset.state = "done";
      say(told.textContent);
      slowly();
      return;
    }
    await new Promise((done) => setTimeout(done, 250));
  }
}
