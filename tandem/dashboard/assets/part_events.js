// What happened beside the steps: recoveries, faults, alarms; and the checkpoints from which a recovery begins.

import { make } from "./dom.js";
import { bytes, count, seconds, section, table, when } from "./words.js";

const TIER_COLUMNS = [
  ["Tier"], ["Newest step", "number"], ["Complete at"], ["Kept by"], ["Copies", "number"], ["Written in all", "number"], ["A second", "number"],
  ["Loaded", "number"], ["In", "number"], ["Left out because", "wide"],
];

/** Returns what each tier of checkpoints has and how fast it was written. */
function tiers(states) {
  if (!states.length) return make("div", {});
  const rows = states.map((each) => {
    const kept = Object.entries(each.where).map(([node, ranks]) => (ranks.length ? `${node}: rank ${ranks.join(", ")}` : node));
    const whole = each.step >= 0;
    return [
      each.tier, whole ? String(each.step) : "–", whole ? when(each.time_s) : "–", kept.join("; ") || "–", count(each.copies), bytes(each.all_bytes),
      each.all_seconds ? bytes(each.all_bytes / each.all_seconds) : "–", count(each.loads), each.loads ? seconds(each.load_seconds) : "–", each.left_out || "–",
    ];
  });
  return section("Tiers of checkpoints", table("Tiers of checkpoints", TIER_COLUMNS, rows, ""));
}

export function eventsPart({ run, place }) {
  const draw = (now) => {
    const rows = now.events.map((event) => {
      const words = event.kind.replaceAll("_", " ");
      const { step, reason, what, ...rest } = event.detail ?? {};
      const more = Object.keys(rest).length ? make("code", {}, JSON.stringify(rest)) : null;
      return [when(event.time_s), make("span", { className: event.bad ? "bad" : "" }, words), step === undefined ? "–" : String(step), make("span", {}, reason ?? what ?? "", " ", more)];
    });
    place.replaceChildren(section("Faults and recoveries", table("Faults and recoveries", [["Time"], ["Event"], ["Step", "number"], ["Detail", "wide"]], rows, "None.")), tiers(now.tiers));
  };
  draw(run);
  return { overview: draw };
}
