// Small helpers for the document.

/** Returns the element with the id `id`. */
export const byId = (id) => document.getElementById(id);

/**
 * Returns a new element. Of `given`, `on` has listeners by event, `data` and `aria` attributes of these kinds, `attributes` any other; everything else is
 * a property. Children are nodes or text, which is never read as HTML; those that are null or false are left out.
 */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  const { on = {}, data = {}, aria = {}, attributes = {}, ...properties } = given;
  Object.assign(element, properties);
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  for (const [name, value] of Object.entries(data)) element.dataset[name] = value;
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== false && child !== undefined));
  return element;
}

/** Returns a button that says `text`. */
export const button = (text, click, given = {}) => make("button", { type: "button", on: { click }, ...given }, text);

/** Says `text` to screen readers. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Copies `text` to the clipboard and tells on `pressed` whether that worked. */
export async function copy(text, pressed) {
  const before = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Not allowed";
  }
  announce(pressed.textContent);
  setTimeout(() => { pressed.textContent = before; }, 1500);
}

/** Applies the theme that was chosen, "light", "dark" or "" for the system's. */
export function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
