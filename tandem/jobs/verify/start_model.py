"""Verifies the models that a run reads besides its checkpoints: the one that it starts from, which is also the reference model of reinforcement
learning, that of its critic, a reference model of its own, the reward model and a draft head. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tandem.model.huggingface.hub import check_snapshot_bytes, files_of_model, hub_model, snapshot_folder
from tandem.model.model_source import commit_of
from tandem.runtime.records.journal import Journal
from tandem.storage.folder_manifest import Files, OnBytes, damaged_files, folder_digests, parse_files, read_manifest, to_json
from tandem.text.fast_tokenizer import original_folder, with_fast_tokenizer
from tandem.types import RunError

Key = Literal["start_model", "critic_model", "reference_model", "reward_model", "draft_head"]
KEYS: Mapping[Key, str] = {
    "start_model": "the model that the run starts from", "critic_model": "the model that the critic starts from",
    "reference_model": "the reference model", "reward_model": "the reward model", "draft_head": "the draft head that the run starts from",
}
"""The journal's keys of the folder, the commit of a model of the Hub, and the digests of its files; and what the model is."""


def check_start_model(
    folder: Path, journal: Journal, weights_are_used: bool = True, on_bytes: OnBytes = lambda count: None, key: Key = "start_model"
) -> list[str]:
    """Compares every file of ``folder`` with its digest in the journal, or, at the run's first start, with that of the Hub or of its manifest if it has
    one, and records the digests.

    Returns what is wrong with its weights if ``weights_are_used`` is false. Raises ``RunError`` for all other damage."""
    saved, commit = journal.get(key), commit_of(folder)
    if saved is None and commit is not None:
        check_snapshot_bytes(original_folder(folder))
    files = parse_files(saved["files"]) if saved is not None else None if commit is not None else read_manifest(folder)
    if files is None:
        files, damaged = folder_digests(folder, None if commit is None else files_of_model(folder), on_bytes=on_bytes), []
    else:
        damaged = damaged_files(folder, files, on_bytes)
    tolerated = [] if weights_are_used else [found for found in damaged if ".safetensors'" in found]
    for found in damaged:
        if found not in tolerated:
            raise RunError(f"{found}: it belongs to {KEYS[key]}; restore it from a copy, or start a new run")
    if saved is None:
        # A run's own folder may be moved.
        run = journal.path.parent
        place = str(folder.relative_to(run) if folder.is_relative_to(run) else folder)
        journal.set(key, {"folder": place, "files": to_json(files), **({} if commit is None else {"hub": str(commit)})})
    return tolerated


def start_model_of(directory: Path, saved: Mapping[str, Any]) -> tuple[Path, Files]:
    """Returns the folder, on this machine, and the digests of the start model of the run in ``directory``. ``saved``: the journal's entry, one of
    ``KEYS``."""
    model = hub_model(str(saved.get("hub", "")))
    folder = directory / saved["folder"] if model is None else snapshot_folder(model)
    return with_fast_tokenizer(folder) if model is not None and folder.is_dir() else folder, parse_files(saved["files"])
