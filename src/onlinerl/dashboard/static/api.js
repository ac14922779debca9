// Asking the server. The admin key stays in this tab's session and goes nowhere but into its requests.
const NAME = "onlinerl.key";

export const key = {
  get: () => sessionStorage.getItem(NAME) || "",
  set: (text) => sessionStorage.setItem(NAME, text),
  forget: () => sessionStorage.removeItem(NAME),
};

/** A refusal, with the server's sentence and the status (0: it was not reached). */
export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const marks = new Map();

/** The JSON at `path`; null where nothing has changed since it was asked for last (`marked`). */
export async function get(path, { keyed = false, marked = false, signal } = {}) {
  const headers = keyed ? { authorization: `Bearer ${key.get()}` } : {};
  if (marked && marks.has(path)) headers["if-none-match"] = marks.get(path);
  const reply = await reach(path, { headers, signal, cache: "no-store" });
  if (reply.status === 304) return null;
  const body = await read(reply);
  if (marked && reply.headers.get("etag")) {
    marks.clear();
    marks.set(path, reply.headers.get("etag"));
  }
  return body;
}

export const forget = () => marks.clear();

/** An action of the admin interface. */
export async function post(path, body) {
  const headers = { authorization: `Bearer ${key.get()}` };
  if (body) headers["content-type"] = "application/json";
  return read(await reach(path, { method: "POST", headers, body: body && JSON.stringify(body) }));
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server cannot be reached");
  }
}

async function read(reply) {
  const body = await reply.json().catch(() => null);
  if (!reply.ok) throw new Refused(reply.status, body?.error?.message || `the server answered ${reply.status}`);
  return body;
}
