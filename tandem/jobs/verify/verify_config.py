"""Compares ``config.yaml`` with the recipe that the run's journal has. Imports no torch."""

from pathlib import Path
from typing import Any

import yaml

from tandem.config.leaves import leaves
from tandem.config.yaml_text import parse_yaml
from tandem.jobs.verify.finding import Finding
from tandem.runtime.records.journal import Journal
from tandem.types import UserError

KEY = "config"
"""The journal's key of the text of ``config.yaml``."""

MAY_CHANGE = (
    "'parallel', 'machine', 'checkpoint', 'registry', 'trackers', 'residents', 'coordination', 'pods', 'watchdog', 'cluster', 'slurm', 'ray', 'kubernetes', "
    "'metrics', 'traces', trainer.backend, trainer.offload..., rollout.workers, run.max_steps, run.max_restarts, run.elastic, run.on_mismatch, "
    "evaluation.target_accuracy and evaluation.consecutive"
)
"""The keys that ``may_change`` allows, for messages."""

MOST_NAMED = 8
"""Values that are named one by one; a file with more of them is not one that somebody edited."""

_SECTIONS = (
    "parallel", "machine", "checkpoint", "registry", "trackers", "residents", "coordination", "pods", "watchdog", "cluster", "slurm", "ray", "kubernetes",
    "metrics", "traces",
)  # fmt: skip
_KEYS = (
    "trainer.backend", "rollout.workers", "run.max_steps", "run.max_restarts", "run.elastic", "run.on_mismatch", "evaluation.target_accuracy",
    "evaluation.consecutive",
)  # fmt: skip
_ABSENT = object()


def may_change(key: str) -> bool:
    """Returns whether a run may be resumed with another value of ``key``: the results of a step do not depend on it, or only in their last bits.
    ``finished.check_steps`` refuses a ``run.max_steps`` that does not fit."""
    return key.split(".")[0] in _SECTIONS or key.startswith("trainer.offload") or key in _KEYS


def verify_config(directory: Path, journal: Journal, is_stage: bool = False) -> list[Finding]:
    """Returns a finding for each value of ``config.yaml`` that is not the one that the run began with. ``is_stage``: the folder is that of a
    stage, whose recipe is written anew from its run's, with that run's folder."""
    saved = journal.get(KEY)
    path = directory / "config.yaml"
    if saved is None:
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return [_damaged(path, f"cannot be read: {error}")]
    if text == saved:
        return []
    try:
        before, now = dict(leaves(parse_yaml(saved, path.name))), dict(leaves(parse_yaml(text, path.name)))
    except (yaml.YAMLError, UserError):
        return [_damaged(path, "is not YAML any more")]
    findings = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if old == new and type(old) is type(new):
            continue
        what = f"'{path}' has {key} {_shown(new)}, and the run began with {_shown(old)}"
        if may_change(key) or (is_stage and key in ("model.path", "run.directory")):
            findings.append(Finding(what, "how the run continues depends on it", "the new value is taken", stops=False))
        else:
            findings.append(Finding(what, "every result depends on it", "put the old value back, or start a new run", stops=True))
    stopping = [finding for finding in findings if finding.stops]
    if len(stopping) > MOST_NAMED:
        return [_damaged(path, f"has {len(stopping)} values that are not those that the run began with")]
    return findings


def _damaged(path: Path, trouble: str) -> Finding:
    fix = "restore it from a copy; the table 'run' of journal.sqlite has its text, as JSON, under 'config'"
    return Finding(f"'{path}' {trouble}", "every result depends on it", fix, stops=True)


def _shown(value: Any) -> str:
    return "no value" if value is _ABSENT else f"{value!r}"
