// What the user has chosen, kept in the browser's localStorage: the key, models, sampling, appearance.

import { applyTheme, byId } from "./dom.js";

const NAME = "tandem.settings";
/** Of the API, as the fields of the form are named; an empty field leaves the choice to the server. */
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const TEXTS = ["key", "system", "format", "theme"];
const DEFAULTS = { key: "", system: "", format: "auto", theme: "", probabilities: false, model: "", other: "", compares: false, stop: "" };

export const settings = { ...DEFAULTS, ...read() };

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    return kept && typeof kept === "object" ? kept : {};
  } catch {
    return {};
  }
}

/** Changes settings and keeps them. */
export function change(values) {
  Object.assign(settings, values);
  try {
    localStorage.setItem(NAME, JSON.stringify(settings));
  } catch { /* They last as long as the page. */ }
}

/** Returns the fields of a request that the user has filled in. */
export function sampling() {
  const given = Object.fromEntries(NUMBERS.filter((name) => Number.isFinite(settings[name])).map((name) => [name, settings[name]]));
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  return stop.length ? { ...given, stop } : given;
}

/** Takes a key out of the address (`#key=...`), where `tandem gateway --demo` puts it, so that it is in no history. */
export function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  change({ key });
  history.replaceState(null, "", location.pathname);
}

/** Connects the form with the settings; `changed` is called after every change. */
export function connectForm(form, changed) {
  const fields = form.elements;
  for (const name of [...NUMBERS, ...TEXTS, "stop"]) fields[name].value = settings[name] ?? "";
  fields.probabilities.checked = settings.probabilities;
  form.addEventListener("input", () => {
    const numbers = NUMBERS.map((name) => [name, fields[name].value === "" || !fields[name].validity.valid ? null : fields[name].valueAsNumber]);
    const texts = TEXTS.map((name) => [name, name === "key" ? fields[name].value.trim() : fields[name].value]);
    change({ ...Object.fromEntries([...numbers, ...texts]), stop: fields.stop.value, probabilities: fields.probabilities.checked });
    applyTheme(settings.theme);
    changed();
  });
  byId("show-key").addEventListener("change", (event) => { fields.key.type = event.target.checked ? "text" : "password"; });
}
