"""Verifies everything in the folder of a run: records, models, checkpoints, data, registered versions."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.data.shard_files import ShardFiles
from tandem.jobs.data_run.train_data import ROLLOUTS, dataset_paths
from tandem.jobs.prepare import read_recipe
from tandem.jobs.run_files import CRITIC_FOLDER, DRAFT_FOLDER, SFT_FOLDER
from tandem.jobs.verify.finding import Finding
from tandem.jobs.verify.input_files import KEY as INPUT_FILES
from tandem.jobs.verify.input_files import verify_input_files
from tandem.jobs.verify.reference_files import reference_files, verify_reference_files
from tandem.jobs.verify.start_model import Key, start_model_of
from tandem.jobs.verify.verify_records import RESTORE, steps_on_disk, verify_records
from tandem.rl.rollout.staleness import too_old
from tandem.runtime.records.journal import Journal
from tandem.storage.files import open_storage
from tandem.storage.folder_manifest import Files, damaged_files, read_manifest
from tandem.trainer.checkpoint.format.manifest import Damaged, verify
from tandem.types import RunError, UserError

EXPORT_AGAIN = "restore it from a copy, or export it again: remove {} and resume"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run, ``size`` bytes, and the function that verifies it."""

    name: str
    size: int
    verify: Callable[[], list[Finding]]


def parts_of(directory: Path) -> list[Part]:
    """Returns what there is to verify of the run in ``directory``. Raises ``UserError`` if it is not a run."""
    try:
        recipe = read_recipe(directory)
    except UserError:
        if not (directory / "config.yaml").is_file() or not (directory / "journal.sqlite").is_file():
            raise
        # The records say what is wrong with it.
        recipe = None
    is_on_data, stage = isinstance(recipe, PretrainRecipe), directory / SFT_FOLDER
    stays = recipe is not None and (recipe.trainer.lora is not None or (isinstance(recipe, PretrainRecipe) and recipe.trains_draft))
    parts = list(_run_parts(directory, is_on_data, False, stays))
    if (stage / "config.yaml").is_file():
        parts += _run_parts(stage, True, True)
    return parts + list(_data_parts(recipe, directory) if isinstance(recipe, PretrainRecipe) else ())


def _run_parts(directory: Path, is_on_data: bool, is_stage: bool, start_stays: bool = False) -> Iterator[Part]:
    records = [directory / name for name in ("config.yaml", "journal.sqlite", "journal.sqlite-wal", "metrics.jsonl")]
    name = f"{directory.name}/" if is_stage else ""
    yield Part(f"{name}records", _size(records), partial(_verify_all_records, directory, not is_on_data, is_stage))
    if (files := _input_files(directory)) is not None:
        yield Part(f"{name}input files", _size(directory / file for file in files), partial(_verify_input_files, directory))
    if reference := _reference_files(directory):
        yield Part(f"{name}reference", _size(reference), partial(_verify_reference_files, directory))
    is_done = is_stage and (directory / "model").is_dir()
    start = None if is_done else _start_model(directory)
    if start is not None:
        yield Part(f"{name}start model", sum(file.size for file in start[1].values()), partial(_verify_start, *start, is_on_data and not start_stays))
    others: tuple[tuple[Key, str], ...] = (
        ("critic_model", "critic's model"), ("reference_model", "reference model"), ("reward_model", "reward model"), ("draft_head", "draft head"),
    )  # fmt: skip
    for key, label in others:
        if (other := _start_model(directory, key)) is not None:
            yield Part(f"{name}{label}", sum(file.size for file in other[1].values()), partial(_verify_start, *other, is_on_data and not start_stays))
    for folder, depends, fix in (
        (directory / "models" / "initial", "the fine-tuning stage began with it", "nothing to do once that stage has ended; else start a new run"),
        (directory / "model", "whatever is done with this model depends on it", EXPORT_AGAIN.format("the folder")),
        (directory / CRITIC_FOLDER, "whatever is done with this critic depends on it", EXPORT_AGAIN.format("this folder and 'model'")),
        (directory / DRAFT_FOLDER, "whatever drafts with this head depends on it", EXPORT_AGAIN.format("this folder and 'model'")),
    ):
        if folder.is_dir() and (start is None or folder != start[0]):
            yield Part(f"{name}{folder.relative_to(directory)}", _size(folder.iterdir()), partial(_verify_model, folder, depends, fix))
    for step in steps_on_disk(directory):
        folder = directory / "checkpoints" / f"step-{step}"
        is_newest = step == steps_on_disk(directory)[-1]
        yield Part(f"{name}checkpoints/step-{step}", _size(folder.iterdir()), partial(_verify_checkpoint, folder, is_newest))


def _verify_all_records(directory: Path, needs_journal: bool, is_stage: bool) -> list[Finding]:
    findings = verify_records(directory, needs_journal, is_stage)
    path = directory / "journal.sqlite"
    if any(finding.stops for finding in findings) or not path.exists():
        return findings
    with Journal(path, read_only=True) as journal:
        newest = max(steps_on_disk(directory), default=0)
        recipe = read_recipe(directory) if needs_journal else None
        if isinstance(recipe, Recipe) and not recipe.rollout.budget_tokens:
            findings += _verify_staleness(path, journal, recipe.rollout.max_staleness, newest)
        for step in journal.damaged_batches():
            depends = "the step would be trained on them" if step >= newest else "'tandem replay' of that step depends on them"
            what, fix = f"'{path}': the samples or scores of step {step} do not have their digest", RESTORE if step >= newest else "nothing to do"
            findings.append(Finding(what, depends, fix, stops=step >= newest))
    return findings


def _verify_staleness(path: Path, journal: Journal, max_staleness: int, newest: int) -> list[Finding]:
    """Returns a finding for each step with samples that older or newer weights drew than ``rollout.max_staleness`` allows."""
    findings, damaged = [], journal.damaged_batches()
    for step in journal.journalled_steps():
        if step not in damaged and (lines := too_old([sample for drawn in journal.drawn(step) for sample in drawn], step, max_staleness)):
            depends = "the step would be trained on them" if step >= newest else "the curves depend on it"
            findings.append(Finding(f"'{path}': {lines[0]}", depends, RESTORE, stops=step >= newest))
    return findings


def _input_files(directory: Path) -> list[str] | None:
    """Returns the recorded files that the run reads besides its model, ``None`` without any."""
    try:
        with Journal(directory / "journal.sqlite", read_only=True) as journal:
            return list(journal.get(INPUT_FILES) or ()) or None
    except RunError:
        return None


def _verify_input_files(directory: Path) -> list[Finding]:
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        return verify_input_files(directory, journal)


def _reference_files(directory: Path) -> list[Path]:
    """Returns the files of the reference's log-probabilities; none without a journal that can be read."""
    try:
        with Journal(directory / "journal.sqlite", read_only=True) as journal:
            return reference_files(directory, journal)
    except RunError:
        return []


def _verify_reference_files(directory: Path) -> list[Finding]:
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        return verify_reference_files(directory, journal)


def _start_model(directory: Path, key: Key = "start_model") -> tuple[Path, Files] | None:
    try:
        with Journal(directory / "journal.sqlite", read_only=True) as journal:
            saved = journal.get(key)
    except RunError:
        return None
    return None if saved is None else start_model_of(directory, saved)


def _verify_start(folder: Path, files: Files, is_first_only: bool) -> list[Finding]:
    fix, damaged = "restore it from a copy", damaged_files(folder, files)
    if not is_first_only:
        return [Finding(line, "the reference model, an adapter, a draft head, and a run that begins again depend on it", fix, stops=True) for line in damaged]
    return [Finding(line, "a run without a checkpoint begins with it", fix, stops=".safetensors'" not in line) for line in damaged]


def _verify_model(folder: Path, depends: str, fix: str) -> list[Finding]:
    try:
        files = read_manifest(folder)
    except RunError as error:
        return [Finding(str(error).partition(";")[0], depends, fix, stops=False)]
    if files is None:
        return [Finding(f"'{folder}' has no manifest.json", depends, fix, stops=False)]
    return [Finding(line, depends, fix, stops=False) for line in damaged_files(folder, files)]


def _verify_checkpoint(folder: Path, is_newest: bool) -> list[Finding]:
    try:
        verify(folder)
        return []
    except Damaged as error:
        depends = "a resume passes it over and continues from an older one" if is_newest else "it is passed over where it would be needed"
        return [Finding(f"'{folder}': {error}", depends, "restore it from a copy, or from 'checkpoint.upload'", stops=False)]


def _data_parts(recipe: PretrainRecipe, directory: Path) -> Iterator[Part]:
    if recipe.task is not None:
        return
    for number, path in enumerate(dataset_paths(recipe.data)):
        cache = Path(recipe.data.cache) / f"dataset-{number}" if recipe.data.cache else None
        yield Part(f"data {path}", 0, partial(_verify_data, path, cache))
    if recipe.data.rollouts:
        copied, fix = directory / ROLLOUTS, "restore it from a copy, or start a new run"
        yield Part(f"data {ROLLOUTS}", _size(copied.glob("*")), partial(_verify_data, str(copied), None, fix))


def _verify_data(path: str, cache: Path | None, fix: str = "remove it and tokenize it again") -> list[Finding]:
    findings = []
    try:
        files = ShardFiles(open_storage(path), cache)
        files.check()
    except UserError as error:
        return [Finding(str(error).partition(";")[0], "every later step depends on it", "restore it, or tokenize it again", stops=True)]
    for number in range(len(files.dataset.shards)):
        try:
            files.open(number).close()
        except RunError as error:
            findings.append(Finding(str(error).partition(";")[0], "the steps that read it depend on it", fix, stops=False))
    return findings


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
