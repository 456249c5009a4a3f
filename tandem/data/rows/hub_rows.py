"""Rows of folders and of datasets of the Hugging Face Hub, through the package ``datasets``, of the extra ``data``."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.data.rows.arrow_rows import NEEDS, check_size, import_pyarrow, table_rows
from tandem.data.rows.row import Row, Rows
from tandem.data.rows.source import DEFAULT_SPLIT, HUB_PREFIX, Source
from tandem.runtime.machine.available_memory import total_bytes
from tandem.types import UserError

HUB_DEADLINE_S = 10.0
"""Seconds to reach the Hub."""


def folder_rows(source: Source) -> Rows:
    """Returns the rows of a folder: one that ``Dataset.save_to_disk`` wrote, or one with data files, such as a dataset's from the Hub. Raises
    ``UserError``."""
    datasets, folder = import_datasets(source.path), Path(source.path)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        loaded = _asked(source, lambda: datasets.load_from_disk(str(folder)))
        if isinstance(loaded, datasets.DatasetDict):
            loaded = _split_of(source, loaded)
        elif source.split not in ("", DEFAULT_SPLIT):
            raise UserError(f"'{source.path}' was saved without splits, and '{source.split}' is asked for; leave the split out")
        return dataset_rows(loaded, source.path, "a folder of datasets")
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        raise UserError(f"'{source.path}' is the folder of a model; name a data file in '{source.key}'")
    options = {"name": source.subset} if source.subset else {}
    loaded = _asked(source, lambda: datasets.load_dataset(str(folder), **options))
    return dataset_rows(_split_of(source, loaded), source.path, "a folder of data files")


def hub_rows(source: Source) -> Rows:
    """Returns the rows of a dataset of the Hub, or of the copy that an earlier download left where the Hub cannot be reached. Raises ``UserError``."""
    datasets, name = import_datasets(source.path), source.path.removeprefix(HUB_PREFIX)
    options: dict[str, Any] = {"name": source.subset} if source.subset else {}
    if source.revision:
        options["revision"] = source.revision
    problem = _unreachable(source, name)
    with _Offline(datasets, bool(problem)):
        try:
            loaded = _asked(source, lambda: datasets.load_dataset(name, **options))
        except UserError as error:
            if not problem:
                raise
            raise UserError(
                f"'{source.path}' is neither a file nor a folder here, and as a dataset of the Hub it cannot be downloaded ({problem}); on a machine with a "
                f"network run 'hf download --repo-type dataset {name} --local-dir {name.rpartition('/')[2]}', bring that folder here and name it in "
                f"'{source.key}'"
            ) from error
    return dataset_rows(_split_of(source, loaded), source.path, "a dataset of the Hub")


def dataset_rows(dataset: Any, name: str, kind: str) -> Rows:
    """Returns the rows of a ``datasets.Dataset``, whose digest is of the rows. Raises ``UserError``."""
    import_pyarrow(name)
    table = dataset.with_format("arrow")[:]
    check_size(table.nbytes, name, total_bytes())
    rows = tuple(table_rows(table, name))
    if not rows:
        raise UserError(f"'{name}' is empty; it needs at least one row")
    return Rows(name, kind, rows, rows_digest(rows), is_file=False)


def rows_digest(rows: tuple[Row, ...]) -> str:
    """Returns the BLAKE2b-128 digest of the rows as JSON, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row.values, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def import_datasets(name: str) -> Any:
    """Returns the module ``datasets``, without progress bars where standard error is not a terminal. Raises ``UserError`` where it is not installed."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"'{name}' needs the package datasets, which is not installed; {NEEDS}, or name a file of JSON lines") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _asked(source: Source, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except UserError:
        raise
    except Exception as error:  # Every builder of datasets raises in its own way.
        # Its own errors are chained: the first names the file that cannot be read.
        while error.__cause__ is not None and type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
            error = error.__cause__
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"'{source.path}' cannot be read as a dataset: {line.rstrip('.')}; {_fix(source, str(error))}") from None


def _fix(source: Source, text: str) -> str:
    if "Config name is missing" in text or "BuilderConfig" in text:
        names = text[text.index("[") + 1 : text.index("]")] if "[" in text and "]" in text else ""
        return f"set '{_sibling(source, 'subset')}'{f' to one of {names}' if names else ''}"
    if "DatasetNotFound" in text or "doesn't exist" in text or "not found" in text.lower():
        return f"correct '{source.key}' (there is no such file or folder here), or log in with 'hf auth login' if it is private or gated"
    return f"name another file or folder in '{source.key}'"


def _split_of(source: Source, loaded: Mapping[str, Any]) -> Any:
    wanted = source.split or DEFAULT_SPLIT
    if wanted not in loaded:
        raise UserError(f"'{source.path}' has no split '{wanted}'; set '{_sibling(source, 'split')}' to one of {', '.join(map(str, loaded))}")
    return loaded[wanted]


def _sibling(source: Source, name: str) -> str:
    """Returns the key of the recipe beside ``source.key``: of ``task.eval_path`` and ``split``, ``task.eval_split``."""
    section, _, key = source.key.rpartition(".")
    return f"{section}.{'eval_' if key.startswith('eval_') and name == 'split' else ''}{name}"


def _unreachable(source: Source, name: str) -> str:
    """Returns why the Hub cannot be reached, or an empty text. One request, because ``datasets`` tries for half a minute."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi().dataset_info(name, revision=source.revision or None, timeout=HUB_DEADLINE_S)
    except HfHubHTTPError:
        return ""  # The Hub answers; datasets says what it misses.
    except Exception as error:  # Of the HTTP client, which has changed between versions.
        return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return ""


class _Offline:
    """While it is open and ``is_on``, ``datasets`` and ``huggingface_hub`` read their caches alone, as with HF_HUB_OFFLINE=1, which they read when they
    are imported."""

    def __init__(self, datasets: Any, is_on: bool) -> None:
        import huggingface_hub.constants

        self._places = [datasets.config, huggingface_hub.constants] if is_on else []
        self._before: list[Any] = []

    def __enter__(self) -> None:
        for place in self._places:
            self._before.append(place.HF_HUB_OFFLINE)
            place.HF_HUB_OFFLINE = True

    def __exit__(self, *_: object) -> None:
        for place, before in zip(self._places, self._before, strict=True):
            place.HF_HUB_OFFLINE = before
