// The nodes of a run: their states, devices, leases and cordons, what their health watches found, and their last heartbeats.

import { make } from "./dom.js";
import { ask } from "./server.js";
import { ago, badge, section, table, when } from "./words.js";

const KINDS = { controller: "good", "in use": "good", joined: "good", cordoned: "bad", gone: "bad" };
const COLUMNS = [["Node"], ["State"], ["Devices"], ["Lease"], ["Last heartbeat"], ["Health", "wide"], ["Cordon", "wide"]];

/** Returns the names of devices, equal ones counted. */
function devices(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, count]) => (count > 1 ? `${count} × ${name}` : name)).join(", ") || "–";
}

/** Returns why a node is cordoned, by whom and since when. */
function cordon(node) {
  if (node.state !== "cordoned") return "";
  return [node.reason || "without a reason", node.by && `by ${node.by}`, node.since_s && `since ${when(node.since_s)}`].filter(Boolean).join(", ");
}

export async function nodesPart({ page, name, run, place, signal }) {
  async function load() {
    const told = await ask("nodes", { run: name }, signal);
    const seen = (at) => (at ? make("span", { title: when(at) }, run.live ? ago(at) : when(at)) : "–");
    const health = (findings) => make("span", { className: findings.length ? "bad" : "" }, findings.length ? findings.join("; ") : "nothing found");
    const rows = told.nodes.map((node) => [node.node, badge(node.state, KINDS[node.state] ?? "quiet"), devices(node.devices), node.lease || "–",
      seen(node.seen_s), health(node.findings), cordon(node)]);
    place.replaceChildren(section("Nodes", ...(told.problem ? [make("p", { className: "notice bad" }, told.problem)] : []),
      make("p", { className: "quiet" }, `From ${told.source}.`), table("Nodes", COLUMNS, rows, "The run does not say which nodes it has.")));
    page.worked();
  }
  await load();
  return { overview(now) { run = now; load().catch(page.failed); } };
}
