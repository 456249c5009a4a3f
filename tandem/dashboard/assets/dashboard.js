// The page: which view is shown at which address, and what stands above all of them.

import { announce, applyTheme, byId } from "./dom.js";
import { compareView } from "./compare.js";
import { listView } from "./list.js";
import { runView } from "./run.js";
import { ServerError, firstView, keepToken, takeToken } from "./server.js";

const THEME = "tandem.dashboard.theme";
let leave = new AbortController();

/** What the views share: the places of the page that they fill, and how they say that something went wrong. */
const page = {
  title(text, ...badges) {
    byId("title").textContent = text;
    document.title = `${text} · Tandem`;
    byId("badges").replaceChildren(...badges);
  },
  summary(text) { byId("summary").textContent = text; },
  tabs(...links) {
    byId("tabs").hidden = !links.length;
    byId("tabs").replaceChildren(...links);
    // On a narrow screen the tabs scroll.
    const current = links.find((each) => each.getAttribute("aria-current"));
    if (current) byId("tabs").scrollLeft = current.offsetLeft + current.offsetWidth / 2 - byId("tabs").clientWidth / 2;
  },
  show(...parts) { byId("view").replaceChildren(...parts); },
  failed(error) {
    if (error.name === "AbortError") return;
    byId("token-form").hidden = !error.needsToken;
    byId("notice").hidden = false;
    byId("notice").textContent = error.message;
    if (error.needsToken) byId("token").focus();
    if (!("status" in error)) throw error;
  },
  worked() {
    byId("notice").hidden = true;
    byId("token-form").hidden = true;
  },
};

/** Returns a part of the address; one that was cut or mistyped as it is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function open() {
  leave.abort();
  leave = new AbortController();
  const [kind, ...rest] = (location.hash || firstView()).replace(/^#\/?/, "").split("/").map(decoded);
  page.worked();
  page.summary("");
  page.tabs();
  try {
    if (kind === "run" && rest.length) await runView(page, rest[0], rest[1] || "curves", leave.signal);
    else if (kind === "compare" && rest.length > 1) await compareView(page, rest, leave.signal);
    else await listView(page, leave.signal);
  } catch (error) {
    page.failed(error);
  } finally {
    document.body.dataset.ready = location.hash || "#/";
  }
}

takeToken();
const theme = byId("theme");
theme.value = localStorage.getItem(THEME) ?? "";
applyTheme(theme.value);
theme.addEventListener("change", () => {
  localStorage.setItem(THEME, theme.value);
  applyTheme(theme.value);
  document.dispatchEvent(new Event("theme"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
document.addEventListener("lost", () => page.failed(new ServerError("The dashboard does not answer; the page asks again every two seconds.", 0)));
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(byId("token").value.trim());
  byId("token").value = "";
  open();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", () => {
  // The address is that of a view, not of a place on the page.
  delete document.body.dataset.ready;
  open().then(() => announce(byId("title").textContent));
});
open();
