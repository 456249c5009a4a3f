// What happened beside the steps: recoveries, faults, alarms.

import { make } from "./dom.js";
import { section, table, when } from "./words.js";

export function eventsPart({ run, place }) {
  const draw = (now) => {
    const rows = now.events.map((event) => {
      const words = event.kind.replaceAll("_", " ");
      const { step, reason, what, ...rest } = event.detail ?? {};
      const more = Object.keys(rest).length ? make("code", {}, JSON.stringify(rest)) : null;
      return [when(event.time_s), make("span", { className: event.bad ? "bad" : "" }, words), step === undefined ? "–" : String(step), make("span", {}, reason ?? what ?? "", " ", more)];
    });
    place.replaceChildren(section("Faults and recoveries", table("Faults and recoveries", [["Time"], ["Event"], ["Step", "number"], ["Detail", "wide"]], rows, "None.")));
  };
  draw(run);
  return { overview: draw };
}
