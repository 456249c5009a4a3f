// The logs of a run's processes, from their ends.

import { button, make } from "./dom.js";
import { ask } from "./server.js";
import { bytes } from "./words.js";

const WAIT_MS = 300;

export async function logsPart({ page, name, place, signal }) {
  const { files } = await ask("logs", { run: name }, signal);
  if (!files.length) {
    place.replaceChildren(make("p", { className: "quiet" }, "The run has no logs."));
    return null;
  }
  const chosen = make("select", {}, ...files.map((file) => make("option", { value: file.name }, `${file.name} (${bytes(file.bytes)})`)));
  chosen.value = (files.find((file) => file.bytes) ?? files[0]).name;
  const wanted = make("input", { type: "search", placeholder: "Only lines with", aria: { label: "Only lines with" } });
  const text = make("pre", { className: "log", tabIndex: 0, attributes: { role: "group" }, aria: { label: "Lines of the log" } });
  const earlier = button("Earlier lines", () => before().catch(page.failed));
  let from = 0;

  const part = (more) => ask("log", { run: name, file: chosen.value, text: wanted.value, ...more }, signal);

  async function end() {
    const isAtEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    const found = await part({});
    from = found.from;
    earlier.hidden = from === 0;
    text.textContent = found.lines.join("\n") || (wanted.value ? "No line has that." : "It is empty.");
    if (isAtEnd) text.scrollTop = text.scrollHeight;
    page.worked();
  }

  async function before() {
    const found = await part({ before: from });
    from = found.from;
    earlier.hidden = from === 0;
    const height = text.scrollHeight;
    text.textContent = [...found.lines, text.textContent].join("\n");
    text.scrollTop = text.scrollHeight - height;
  }

  const again = () => end().catch(page.failed);
  let waiting = null;
  chosen.addEventListener("change", () => { text.scrollTop = text.scrollHeight; again(); });
  wanted.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(again, WAIT_MS); });
  place.replaceChildren(make("div", { className: "toolbar" }, make("label", {}, "log ", chosen), make("div", { className: "find" }, wanted), earlier), text);
  await end();
  text.scrollTop = text.scrollHeight;
  return { changed: again };
}
