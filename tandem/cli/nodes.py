"""List the nodes that runs have in the etcd of a recipe or a run, and cordon and uncordon them for all of its runs.

A cordoned node takes no new pod. The runs there go on with the pods that they have, and a trainer that is started again goes to another node; a run on
data saves its step and gives the ranks there to a pod that waits. A run cordons a node with a fatal GPU error or with other bits here by itself; such a
cordon stays until it is removed. NODE is the name of the pod or of its machine.

examples:
  tandem nodes list sort.yaml
  tandem nodes list runs/sort --json
  tandem nodes cordon sort.yaml n17 --reason "ECC errors, ticket 4711"
  tandem nodes uncordon sort.yaml n17
"""

import argparse
import getpass
import json
from dataclasses import asdict
from pathlib import Path

from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "cordon", "uncordon"))
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe with the section coordination, or the folder of a run")
    parser.add_argument("node", metavar="NODE", nargs="?", default="", help="the node to cordon or to uncordon")
    parser.add_argument("--reason", default="", help="why it is cordoned, one line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from tandem.config.recipe import load_config
    from tandem.runtime.coordination.cordons import cluster_prefix, cordon, uncordon
    from tandem.runtime.coordination.etcd import EtcdStore
    from tandem.runtime.health.store_nodes import check_node, nodes_in

    _check(options)
    path = Path(options.recipe)
    recipe = load_config(path / "config.yaml" if path.is_dir() else options.recipe, options.overrides)
    if recipe.coordination.store != "etcd":
        raise UserError(
            f"the runs of '{options.recipe}' share no cluster: coordination.store is not etcd; give --coordination.store=etcd and --coordination.endpoints"
        )
    config = recipe.coordination
    prefix = cluster_prefix(config)
    if options.action == "list":
        store = EtcdStore(replace(config, cluster_id=""), f"{config.prefix.rstrip('/')}/")
        try:
            nodes = nodes_in(store)
        finally:
            store.close()
        if options.json:
            print(json.dumps({"nodes": [asdict(node) for node in nodes]}))
            return 0
        for node in nodes:
            held = f", by {node.by}: {node.reason}" if node.state == "cordoned" else ""
            has = f"{len(node.devices)} x {node.devices[0]}" if node.devices else "no GPU"
            of = f"run {node.run}, lease {node.lease or 'none'}, on {node.machine or 'an unknown machine'}, {has}" if node.run else "all runs"
            print(f"node {node.node}: {node.state}{held} ({of})")
        if not nodes:
            print(f"no nodes under {config.prefix}")
        return 0
    check_node(options.node)
    store = EtcdStore(replace(config, cluster_id=""), prefix)
    try:
        if options.action == "cordon":
            made = cordon(store, options.node, options.reason, getpass.getuser())
            text, told = f"node {made.node} is cordoned for all runs under {config.prefix}, by {made.by}: {made.reason}", asdict(made)
        else:
            if not uncordon(store, options.node):
                raise UserError(f"node '{options.node}' is not cordoned under {config.prefix}; 'tandem nodes list' has those that are")
            text, told = f"node {options.node} takes pods again", {"node": options.node}
    finally:
        store.close()
    print(json.dumps(told) if options.json else text)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.action == "list" and (options.node or options.reason):
        raise UserError("'list' takes neither a node nor --reason; leave them out")
    if options.action != "list" and not options.node:
        raise UserError(f"name the node to {options.action}: 'tandem nodes {options.action} {options.recipe} NODE'")
    if options.action == "cordon" and not options.reason.strip():
        raise UserError("say why with --reason: who finds the cordon later has nothing else")
    if options.action == "uncordon" and options.reason:
        raise UserError("'uncordon' takes no --reason; leave it out")
