"""List, show, promote and compare the versions of the model registry.

Committed checkpoints are registered if the recipe has a section 'registry'. A version is NAME/3, NAME@production, or NAME for the
newest. The registry keeps a version in staging or production when its run removes the checkpoint.

examples:
  tandem models list
  tandem models list pretrain --registry runs/registry --json
  tandem models show pretrain/3
  tandem models promote pretrain/3 production
  tandem models diff pretrain@production pretrain
  tandem models verify pretrain                       the registry, and every byte of the versions that exist
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tandem.config.registry import RegistryConfig
from tandem.model_registry.files import check_files
from tandem.model_registry.open import open_registry
from tandem.model_registry.versions import STAGES, Registry, Version, differences, find, recipe_digest, stage_named
from tandem.types import RunError, UserError

DEFAULT = "runs/registry"
_MEASURED = {"train/loss": "TRAIN LOSS", "held_out/loss": "HELD-OUT LOSS", "evaluation/accuracy": "ACCURACY"}
"""Metrics of a version's own step that ``list`` shows, with the titles of their columns."""


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--registry", default=DEFAULT, help=f"folder of a registry, or address of MLflow (default: {DEFAULT})")
    every.add_argument("--json", action="store_true", help="print JSON")

    def action(name: str, text: str, example: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=text, epilog=f"example: tandem models {example}", parents=[every]
        )
        return added

    listed = action("list", "list versions, the newest last", "list pretrain")
    listed.add_argument("name", nargs="?", default="", help="list only this model")
    action("show", "show one version", "show pretrain/3").add_argument("version", help="NAME/3, NAME@production or NAME")
    promoted = action("promote", "move a version to a stage", "promote pretrain/3 production")
    promoted.add_argument("version", help="NAME/3, NAME@staging or NAME")
    promoted.add_argument("stage", help=f"one of {', '.join(STAGES)}")
    verified = action("verify", "verify the registry and the files of its versions", "verify pretrain")
    verified.add_argument("name", nargs="?", default="", help="verify only this model, or one version of it (NAME/3)")
    compared = action("diff", "compare two versions", "diff pretrain@production pretrain/7")
    compared.add_argument("left", help="NAME/3, NAME@production or NAME")
    compared.add_argument("right", help="NAME/3, NAME@production or NAME")


def run(options: argparse.Namespace) -> int:
    is_uri = "://" in options.registry
    registry = open_registry(RegistryConfig(path="" if is_uri else options.registry, uri=options.registry if is_uri else ""))
    try:
        registry.check()
        if options.action == "verify":
            return _verify(registry, options)
        print(_ACTIONS[options.action](registry, options))
    finally:
        registry.close()
    return 0


def _list(registry: Registry, options: argparse.Namespace) -> str:
    versions = registry.versions(options.name) if not options.name or registry.versions(options.name) else [find(registry, options.name)]
    if options.json:
        return "\n".join(json.dumps(version.to_json()) for version in versions)
    measured = {name: title for name, title in _MEASURED.items() if any(name in v.entry.metrics for v in versions)}
    rows = [("VERSION", "STAGE", "STEP", *measured.values(), "REGISTERED", "PATH")]
    figures = lambda version: [_figure(version, name) for name in measured]
    return _table(rows + [(v.reference, v.stage, str(v.entry.step), *figures(v), _when(v), _where(v)) for v in versions])


def _show(registry: Registry, options: argparse.Namespace) -> str:
    version = find(registry, options.version)
    if options.json:
        return json.dumps(version.to_json(), indent=1)
    entry = version.entry
    rows = [
        ("version", version.reference), ("stage", version.stage), ("registered", _when(version)), ("step", str(entry.step)),
        ("path", _where(version)), ("weights", entry.digest), ("run", entry.run), ("parent", entry.parent or "created by the run"),
        ("recipe", recipe_digest(entry.recipe)), *((f"data {name}", digest) for name, digest in entry.data.items()),
        *((name, f"{value:.6g}") for name, value in sorted(entry.metrics.items())),
    ]  # fmt: skip
    return _table(rows)


def _promote(registry: Registry, options: argparse.Namespace) -> str:
    version = registry.promote(find(registry, options.version), stage_named(options.stage))
    return json.dumps(version.to_json()) if options.json else f"{version.reference} is in {version.stage}: {version.entry.path}"


def _verify(registry: Registry, options: argparse.Namespace) -> int:
    """Prints a line for each version. Returns 1 if one that exists is damaged."""
    is_one = "/" in options.name or "@" in options.name
    versions = [find(registry, options.name)] if is_one else registry.versions(options.name)
    status = 0
    for version in versions:
        try:
            check_files(version)
            state, line = "ok", ""
        except RunError as error:
            state, line, status = "damaged", str(error), 1
        except UserError as error:
            state, line = "removed", str(error)
        if options.json:
            print(json.dumps({"version": version.reference, "state": state, "reason": line}))
        else:
            print(f"{state:8} {version.reference}  {line}".rstrip())
    return status


def _diff(registry: Registry, options: argparse.Namespace) -> str:
    left, right = find(registry, options.left), find(registry, options.right)
    rows = differences(left, right)
    if options.json:
        return json.dumps({"left": left.reference, "right": right.reference, "differences": [d._asdict() for d in rows]})
    if not rows:
        return f"{left.reference} and {right.reference} have the same weights, data, recipe and metrics"
    shown = lambda value: "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return _table([("", left.reference, right.reference), *((d.what, shown(d.left), shown(d.right)) for d in rows)])


_ACTIONS: dict[str, Any] = {"list": _list, "show": _show, "promote": _promote, "diff": _diff}


def _table(rows: list[Any]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _figure(version: Version, name: str) -> str:
    value = version.entry.metrics.get(name)
    return "-" if value is None else f"{value:.4f}"


def _when(version: Version) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.created_s))


def _where(version: Version) -> str:
    path = version.entry.path
    return path if Path(path).is_dir() else f"{path} (removed)"
