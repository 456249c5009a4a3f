// What the page asks the dashboard, and how it learns that something is new.

import { events } from "./events.js";

const KEPT = "tandem.dashboard.token";
const AGAIN_MS = 2000;
const HTTP_UNAUTHORIZED = 401;

/** An answer that is an error. `status`: of HTTP, 0 where there was no answer. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  get needsToken() { return this.status === HTTP_UNAUTHORIZED; }
}

/** The token is kept as long as the tab. */
export const keepToken = (token) => sessionStorage.setItem(KEPT, token);

/** The view of an address that names none: the list of runs. */
export const firstView = () => "#/";

/** Takes a token out of the address, so that it is in no history and no screenshot. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  keepToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname);
}

/** Returns the query of `parameters`; those that are null are left out, and lists are repeated. */
function query(parameters) {
  const pairs = Object.entries(parameters).flatMap(([name, value]) => (
    (Array.isArray(value) ? value : [value]).filter((each) => each !== null && each !== undefined && each !== "").map((each) => [name, String(each)])));
  return pairs.length ? `?${new URLSearchParams(pairs)}` : "";
}

async function get(name, parameters, signal) {
  const token = sessionStorage.getItem(KEPT);
  let response;
  try {
    response = await fetch(`api/${name}${query(parameters)}`, {
      signal, cache: "no-store", credentials: "omit", redirect: "error", headers: token ? { Authorization: `Bearer ${token}` } : {},
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The dashboard does not answer. Is it running?", 0);
  }
  if (response.ok) return response;
  let message = `The dashboard answers with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* The status says it. */ }
  throw new ServerError(String(message), response.status);
}

/** The answer that was asked for before the page was loaded, by its address. */
const early = new Map();

/** Asks for `name` now; the first `ask` for the same takes the answer. */
export function askEarly(name, parameters) {
  const answer = get(name, parameters);
  // The caller learns what went wrong.
  answer.catch(() => {});
  early.set(name + query(parameters), answer);
}

/** Returns what the dashboard says of `name`. Throws `ServerError`. */
export async function ask(name, parameters = {}, signal = undefined) {
  const begun = early.get(name + query(parameters));
  early.clear();
  return (await (begun ?? get(name, parameters, signal))).json();
}

/**
 * Calls `changed` with what is new of `runs` (none: of the list), until `signal`. A connection that broke is made again, and `changed` is called, as something
 * may have been missed; while the tab is hidden there is none.
 */
export async function follow(runs, changed, signal) {
  for (let first = true; !signal.aborted; first = false) {
    await visible(signal);
    const connection = new AbortController();
    const stop = () => connection.abort();
    const hide = () => { if (document.hidden) stop(); };
    signal.addEventListener("abort", stop);
    document.addEventListener("visibilitychange", hide);
    try {
      const response = await get("stream", { run: runs }, connection.signal);
      if (!first) changed({});
      for await (const data of events(response.body)) {
        const news = JSON.parse(data);
        if (news.runs || !runs.length) changed(news);
      }
    } catch {
      // It is made again.
      if (!connection.signal.aborted) document.dispatchEvent(new Event("lost"));
    }
    signal.removeEventListener("abort", stop);
    document.removeEventListener("visibilitychange", hide);
    if (!signal.aborted && !document.hidden) await new Promise((resume) => { setTimeout(resume, AGAIN_MS); });
  }
}

function visible(signal) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resume) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      resume();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look);
  });
}
