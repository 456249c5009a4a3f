"""The folder of a model, whatever names it: a local folder, a model of the Hugging Face Hub, or an address in object storage. Imports no torch."""

import sys
from pathlib import Path

from tandem.model.huggingface.hub import HubModel, Part, cached_folder, check_snapshot_bytes, hub_model, local_folder, snapshot_model
from tandem.model.weight_store import HeldModel, WeightStore, is_remote
from tandem.storage.folder_manifest import check_folder
from tandem.text.fast_tokenizer import original_folder, with_fast_tokenizer

IN_PLACE = "its path in place of the name"


def find_model(
    name: str | Path, part: Part = "model", *, revision: str | None = None, download_dir: str | None = None, option: str = IN_PLACE
) -> Path:
    """Returns the folder of the model ``name``, a local folder or a model of the Hub, with a ``tokenizer.json``.

    Args:
        part: What is needed of it.
        revision: The branch, tag or commit of a model of the Hub whose name has none.
        download_dir: The cache folder for the Hub, by default its own.
        option: How the folder of a model that was brought by other means is given, for errors.

    Raises:
        UserError: The model cannot be had; one line with the way out.
    """
    folder = local_folder(name, part, revision=revision, cache_dir=download_dir, option=option)
    return folder if part == "adapter" else with_fast_tokenizer(folder)


def found_model(name: str | Path) -> Path:
    """Does ``find_model`` without the network for a model whose commit has been downloaded, as the processes of a run need it."""
    return with_fast_tokenizer(cached_folder(name))


def commit_of(folder: Path) -> HubModel | None:
    """Returns the model of the Hub, with its commit, whose folder ``find_model`` returned; ``None`` for another folder."""
    return snapshot_model(original_folder(folder))


def hold_model(
    name: str | Path, *, revision: str | None = None, download_dir: str | None = None, weight_cache_gib: float = 0.0, verify: bool = False
) -> HeldModel:
    """Returns the folder of the model ``name``, which may be in object storage too; there it is not evicted from the cache until it is released.

    ``verify``: every byte is compared with its digest: that of the folder's manifest, of the Hub or of the download. Raises ``UserError`` or
    ``RunError``."""
    if hub_model(name) is None and is_remote(name):
        store = WeightStore(download_dir, int(weight_cache_gib * 2**30), _show_download if sys.stderr.isatty() else None)
        return store.hold(str(name), verify=verify)
    folder = find_model(name, revision=revision, download_dir=download_dir)
    if verify:
        _verify(folder)
    return HeldModel(folder)


def _verify(folder: Path) -> None:
    source = original_folder(folder)
    if snapshot_model(source) is not None:
        check_snapshot_bytes(source)
    else:
        check_folder(source)


def _show_download(here: int, total: int) -> None:
    width = 30 * here // max(total, 1)
    bar = "=" * width + " " * (30 - width)
    end = "\n" if here == total else ""
    print(f"\rdownloading [{bar}] {here / 2**20:.0f} of {total / 2**20:.0f} MiB", end=end, file=sys.stderr, flush=True)
