"""Models of the Hugging Face Hub by name, through ``huggingface_hub`` (extra ``hub``), with its cache, its token and its environment variables.

``Qwen/Qwen3-0.6B``, ``Qwen/Qwen3-0.6B@v1`` and ``hf://Qwen/Qwen3-0.6B@COMMIT`` name a model; a local folder of the same name takes precedence unless
the name begins with ``hf://``. Only the files that Tandem reads are downloaded: safetensors, configurations and the tokenizer, never pickles.
"""

import errno
import hashlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.text.tokenizer import TOKENIZER_FILES
from tandem.types.errors import RunError, UserError
from tandem.types.input_file import MOST_JSON_BYTES, read_input

MISSING = "models of the Hugging Face Hub need huggingface_hub, which is not installed; pip install 'tandem-rl[hub]', or give a local folder"
SCHEME = "hf://"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_POOLING = ("modules.json", "config_sentence_transformers.json", "*_Pooling/config.json", "*_Dense/config.json", "*_LogitScore/config.json")
"""How a model of Sentence Transformers embeds or scores texts."""
Part = Literal["model", "description", "tokenizer", "adapter"]
"""What is needed of a model: all of it, all but its weights, its tokenizer alone, or the files of a LoRA adapter."""
_FILES: dict[Part, tuple[str, ...]] = {
    "model": ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES, *_POOLING, "*_Dense/model.safetensors"),
    "description": ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES, *_POOLING),
    "tokenizer": ("config.json", "generation_config.json", *TOKENIZER_FILES),
    "adapter": ADAPTER,
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_PAGE = re.compile(r"https://(?:huggingface\.co|hf\.co)/([^/]+/[^/]+?)(?:/tree/([^/]+))?/?")
"""The address of a model's page, as a browser shows it."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/([0-9a-f]{40})")
_ON_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub. ``revision``: a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{SCHEME}{self.repo}@{self.revision}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, whose content never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


def hub_model(name: str | Path, revision: str | None = None) -> HubModel | None:
    """Returns the model of the Hub that ``name`` means, ``None`` for a local path and for an address of object storage. ``revision`` is that of a
    name without one. Raises ``UserError`` for a name with ``hf://`` that the Hub cannot have, and for two revisions."""
    if isinstance(name, Path):
        return None
    if page := _PAGE.fullmatch(name):
        name = f"{SCHEME}{page[1]}" + (f"@{page[2]}" if page[2] else "")
    is_explicit = name.startswith(SCHEME)
    if not is_explicit and ("://" in name or Path(name).exists()):
        return None
    repo, at, own = name.removeprefix(SCHEME).partition("@")
    if not _NAME.fullmatch(repo) or (at and not own):
        if is_explicit:
            raise UserError(f"'{name}' does not name a model of the Hub; write {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
        return None
    if own and revision and own != revision:
        raise UserError(f"'{name}' names the revision '{own}', and the revision '{revision}' is given too; leave one of them out")
    return HubModel(repo, own or revision or "main")


def local_folder(
    name: str | Path, part: Part = "model", *, revision: str | None = None, cache_dir: str | None = None, option: str = "its path in place of the name"
) -> Path:
    """Returns the folder of a model: ``name`` itself if it is a path, else the snapshot in the Hub's cache, where missing files are downloaded.

    ``option``: how the folder of a model that was brought by other means is given, for errors. Raises ``UserError`` in one line for a model that
    cannot be had."""
    model = hub_model(name, revision)
    return Path(name) if model is None else download(model, part, cache_dir, option)


def cached_folder(name: str | Path, part: Part = "description") -> Path:
    """Does ``local_folder`` without the network for a model whose commit has been downloaded, as the processes of a run need it."""
    model = hub_model(name)
    if model is None:
        return Path(name)
    return folder if model.is_commit and (folder := snapshot_folder(model)).is_dir() else download(model, part)


def snapshot_folder(model: HubModel) -> Path:
    """Returns the folder that a commit has, or would have, in the Hub's cache."""
    _library()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{model.repo.replace('/', '--')}" / "snapshots" / model.revision


def download(model: HubModel, part: Part = "model", cache_dir: str | None = None, option: str = "its path in place of the name") -> Path:
    """Does ``local_folder`` for a model of the Hub."""
    folder = _snapshot(model, _FILES[part], cache_dir, option)
    _check_snapshot(model, folder, part)
    if part == "model" and (lacking := _lacking(folder)):
        _snapshot(HubModel(model.repo, folder.name), lacking, cache_dir, option)
        _check_has(model, lacking, {name for name in lacking if (folder / name).is_file()})
    return folder


def _snapshot(model: HubModel, names: Sequence[str], cache_dir: str | None, option: str) -> Path:
    """Returns the folder of a revision in the cache, with those of the files ``names`` that it has."""
    library: Any = _library()
    # It would warn that a model has none of the files, which is an error of one line here.
    logging.getLogger("huggingface_hub._snapshot_download").setLevel(logging.ERROR)
    with _refused_in_one_line(model, option), _bars_on_a_terminal():
        return Path(library.snapshot_download(model.repo, revision=model.revision, allow_patterns=list(names), cache_dir=cache_dir))


def bytes_to_download(model: HubModel, folder: Path, option: str = "its path in place of the name") -> int:
    """Returns the size of the weights that the snapshot ``folder`` of ``model`` lacks. Raises ``UserError``, also for a model without safetensors."""
    lacking = _lacking(folder)
    if not lacking:
        return 0
    library: Any = _library()
    with _refused_in_one_line(model, option):
        files = library.HfApi().model_info(model.repo, revision=folder.name, files_metadata=True).siblings or ()
    sizes = {file.rfilename: file.size or 0 for file in files}
    _check_has(model, lacking, set(sizes))
    return sum(sizes[name] for name in lacking)


def snapshot_model(folder: Path) -> HubModel | None:
    """Returns the model and the commit of a snapshot in the Hub's cache, ``None`` for another folder."""
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return None if match is None else HubModel(match[1].replace("--", "/", 1), match[2])


def files_of_model(folder: Path) -> list[str]:
    """Returns the names of the files in a snapshot that Tandem reads; other programs may have brought more."""
    return [name for name in (*_FILES["model"], *_weights(folder)) if (folder / name).is_file()]


def check_snapshot_bytes(folder: Path) -> None:
    """Compares every file of a snapshot in the Hub's cache that Tandem reads with the digest that the Hub gave for it: SHA-256, or git's SHA-1 of a
    small file. Raises ``RunError`` for a damaged file."""
    links = [folder / name for name in files_of_model(folder) if (folder / name).is_symlink()]
    with ThreadPoolExecutor(max_workers=8) as pool:
        for path, is_whole in zip(links, pool.map(_has_named_digest, links), strict=True):
            if not is_whole:
                raise RunError(f"'{path}' does not have the digest that the Hub gave for it; remove it, so that it is downloaded again")


def _has_named_digest(link: Path) -> bool:
    """Returns whether the content of a blob has the digest that is its name."""
    name = link.readlink().name
    if len(name) not in (40, 64):
        return True
    size = link.stat().st_size
    digest = hashlib.sha256() if len(name) == 64 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with link.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == name


def _library() -> Any:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(MISSING)
    import huggingface_hub

    return huggingface_hub


@contextmanager
def _bars_on_a_terminal() -> Iterator[None]:
    """Shows the library's progress bars on a terminal only."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _refused_in_one_line(model: HubModel, option: str) -> Iterator[None]:
    from huggingface_hub import errors

    # The class of network errors is that of requests, httpx or httpx2, depending on the release.
    network: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except (network, OSError, ValueError) as error:
        raise _refusal(model, error, option) from None


def _check_snapshot(model: HubModel, folder: Path, part: Part) -> None:
    if part in ("model", "description") and not (folder / "config.json").is_file():
        raise UserError(f"'{model.repo}' has no config.json at revision {model.revision}; name a model in the format of transformers")
    if part == "adapter" and not all((folder / name).is_file() for name in ADAPTER):
        raise UserError(f"'{model.repo}' has no {' and '.join(ADAPTER)}; name a LoRA adapter in the format of PEFT, in safetensors")
    if part == "tokenizer" and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"'{model.repo}' has no tokenizer; name a model that has a tokenizer.json")


def _check_has(model: HubModel, wanted: Sequence[str], names: set[str]) -> None:
    if absent := [name for name in wanted if name not in names]:
        raise UserError(f"'{model.repo}' has no {absent[0]}; Tandem reads weights in safetensors only: name a model that has them, or convert it")


def _lacking(folder: Path) -> list[str]:
    """Returns the files with weights that a snapshot needs and lacks."""
    return [name for name in _weights(folder) if not (folder / name).is_file()]


def _weights(folder: Path) -> list[str]:
    """Returns the names of the files with the weights of a snapshot, as its index lists them."""
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    try:
        weight_map = json.loads(read_input(folder / INDEX, MOST_JSON_BYTES, "name another model"))["weight_map"]
        return sorted({str(shard) for shard in weight_map.values() if Path(str(shard)).name == shard})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"'{folder / INDEX}' has no usable weight_map; remove the file, so that it is downloaded again") from None


def _refusal(model: HubModel, error: Exception, option: str) -> UserError:
    """Returns the error, in one line with the way out, for a model that could not be downloaded."""
    from huggingface_hub import constants, errors

    repo, hub = model.repo, constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"'{repo}' is gated: accept its conditions at {hub}/{repo}, then set HF_TOKEN or run 'hf auth login'")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"'{repo}' is neither a folder here nor a model that {hub} shows you; correct the name, or, for a private model, set HF_TOKEN or run "
            "'hf auth login'"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"'{repo}' has no revision '{model.revision}'; name a branch, a tag or a commit of {hub}/{repo}, or leave it out")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"'{repo}' is neither a folder here nor a name that the Hub can have: {_first_line(error)}")
    if isinstance(error, OSError) and error.errno in _ON_DISK_FULL:
        return UserError(f"no space left for '{repo}' in '{constants.HF_HUB_CACHE}'; make room, or name another folder with HF_HOME")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS):
        return UserError(f"'{error.filename}' cannot be written; name a folder for the Hub's cache with HF_HOME")
    at = "" if model.revision == "main" else f" --revision {model.revision}"
    return UserError(
        f"'{repo}' is not a folder here and cannot be downloaded from {hub} ({_reason(error)}); correct the path, or run 'hf download {repo}{at} --local-dir "
        f"{repo.rpartition('/')[2]}' on a machine that can, copy the folder here and give {option}"
    )


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set and it is not in the cache"
        return _first_line(error.__cause__ or error)
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
