"""Compares digests: what the trainer published with the Hugging Face folder, and what each rank of an engine holds with an engine that read that folder.

Both directions: every tensor of one side is looked for on the other.
"""

import ctypes
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tandem.layout.panels import PANEL_ROWS
from tandem.types import WeightManifest
from tandem.weight_transfer.manifest import offsets_of

_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")
_FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "output": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",),
    "queries": ("q_proj", "q_b_proj"), "q_a": ("q_a_proj",), "kv_a": ("kv_a_proj_with_mqa",), "within_heads": ("kv_b_proj",),
}  # fmt: skip
"""The matrices behind an engine's packed ones."""
_PARAMETERS = {"qkv_proj": "qkv", "o_proj": "output", "gate_up_proj": "gate_up", "down_proj": "down"}

Digests = Mapping[str, str]


class Found(NamedTuple):
    """One tensor that is wrong. ``what``: ``missing``, ``unexpected``, ``different`` or ``stale`` (it has the digest of the weights before). ``tensor``: by its
    Hugging Face name, or by the engine's for one that an engine packs. ``owners``: the trainer's ranks that wrote it; ``engine``: the worker and rank that
    hold it (``None``: it was published so)."""

    what: str
    tensor: str
    owners: tuple[int, ...]
    engine: tuple[int, int] | None
    detail: str

    def line(self) -> str:
        """Returns one line for a person."""
        owners = f"trainer rank{'s' * (len(self.owners) > 1)} {', '.join(map(str, self.owners))}" if self.owners else "no trainer rank"
        at = "as published" if self.engine is None else f"in engine {self.engine[0]}, rank {self.engine[1]}"
        return f"'{self.tensor}' (written by {owners}) {at} is {self.what}: {self.detail}"


def digest_of(tensor: Tensor) -> str:
    """Returns the xxh3-128, in hexadecimal, of a tensor's bytes in row-major order."""
    held = tensor.detach().contiguous()
    return str(xxhash.xxh3_128_hexdigest((ctypes.c_char * held.nbytes).from_address(held.data_ptr())))


def check_published(manifest: WeightManifest, folder: Mapping[str, Tensor], before: WeightManifest | None = None) -> list[Found]:
    """Compares every part of ``manifest`` with the same elements of the tensors of ``folder``. ``before``: the version that was published before."""
    found, entries = list[Found](), {entry.name: entry for entry in manifest.tensors}
    earlier = {} if before is None else {entry.name: [part.digest for part in entry.parts] for entry in before.tensors}
    for name, entry in entries.items():
        tensor, owners = folder.get(name), tuple(sorted({part.owner for part in entry.parts}))
        if tensor is None:
            found.append(Found("unexpected", name, owners, None, "the folder has no such tensor"))
        elif (entry.dtype, entry.shape) != (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)):
            detail = f"it has {entry.dtype} {list(entry.shape)} and the folder {tensor.dtype} {list(tensor.shape)}"
            found.append(Found("different", name, owners, None, detail))
        else:
            for place, part in enumerate(entry.parts):
                own = tensor[offsets_of(part).slices] if tensor.dim() else tensor
                wanted = digest_of(_in_panels(own) if entry.layout == "panels" else own)
                if part.digest != wanted:
                    is_stale = place < len(earlier.get(name, ())) and part.digest == earlier[name][place]
                    detail = f"elements {list(part.start)} to {list(part.stop)} have digest {part.digest}, the folder's have {wanted}"
                    found.append(Found("stale" if is_stale else "different", name, (part.owner,), None, detail))
    return found + [Found("missing", name, (), None, "the folder has it and no trainer rank published it") for name in folder if name not in entries]


def _in_panels(part: Tensor) -> Tensor:
    """Returns the elements of ``part[N, K]`` in the order of its panels, each transposed, for engines that compute with what is published."""
    return torch.cat([panel.t().reshape(-1) for panel in part.split(PANEL_ROWS)])


def check_engine(
    held: Sequence[Sequence[Digests]], wanted: Sequence[Sequence[Digests]], before: Sequence[Sequence[Digests]] | None, manifest: WeightManifest,
) -> list[Found]:  # fmt: skip
    """Compares what every rank of every worker holds with what it holds after it has read the folder (``wanted``). ``before``: what it held of the version
    before."""
    found = list[Found]()
    if [len(ranks) for ranks in held] != [len(ranks) for ranks in wanted]:
        return [Found("missing", "the ranks", (), (0, 0), f"{list(map(len, held))} ranks of the workers answered, of {list(map(len, wanted))}")]
    owners = {entry.name: tuple(sorted({part.owner for part in entry.parts})) for entry in manifest.tensors}
    for worker, ranks in enumerate(held):
        for rank, own in enumerate(ranks):
            earlier, right = {} if before is None else before[worker][rank], wanted[worker][rank]
            for name in [*right, *(name for name in own if name not in right)]:
                if own.get(name) != right.get(name):
                    behind = behind_packed(name, owners)
                    what, detail = _difference(name, own.get(name), right.get(name), earlier.get(name))
                    by = tuple(sorted({owner for each in behind for owner in owners[each]}))
                    found.append(Found(what, name, by, (worker, rank), f"{detail}{'; it has ' + ', '.join(behind) if behind else ''}"))
    return found


def unchanged(before: Sequence[Sequence[Digests]], after: Sequence[Sequence[Digests]]) -> list[tuple[int, int]]:
    """Returns the engine's workers and ranks of which an update has changed no digest."""
    pairs = ((worker, rank) for worker, ranks in enumerate(after) for rank in range(len(ranks)))
    return [(worker, rank) for worker, rank in pairs if before[worker][rank] == after[worker][rank]]


def _difference(name: str, own: str | None, right: str | None, earlier: str | None) -> tuple[str, str]:
    if own is None:
        return "missing", "the engine that read the folder has it"
    if right is None:
        return "unexpected", "the engine that read the folder has no such tensor"
    tied = "; it is the head, which is tied to the embedding where the model says so" if ".head" in name else ""
    return "stale" if own == earlier else "different", f"its digest is {own}, the folder's is {right}{tied}"


def behind_packed(name: str, published: Collection[str]) -> list[str]:
    """Returns the ``published`` tensors that an engine's tensor ``name`` is made of: one, or those of a fused matrix."""
    if (whole := name.removesuffix(" (packed)")) in published or whole == "lm_head.weight":
        # vLLM's are told by their Hugging Face names; a tied head is packed from the embedding.
        return [whole if whole in published else "model.embed_tokens.weight"]
    if name.startswith("embed_tokens") or ".head" in name:
        # A tied head is packed from the embedding.
        head = [each for each in published if each == "lm_head.weight"] if ".head" in name else []
        return head or [each for each in published if each == "model.embed_tokens.weight"]
    layer = _LAYER.match(name)
    if layer is None:
        return [each for each in published if each == f"model.{name}"]
    at, first = f"model.layers.{layer[1]}.", layer[2]
    fused = _FUSED.get(_PARAMETERS.get(first, first))
    if fused is not None:
        return [each for each in published if each.startswith(at) and ".experts." not in each and any(f".{matrix}." in each for matrix in fused)]
    if first == "experts":
        return [each for each in published if each.startswith(at) and not _is_outside_experts(each)]
    return [each for each in published if each.startswith(at) and each.endswith(f"{first}.weight")]


def _is_outside_experts(name: str) -> bool:
    return any(part in name for part in (".self_attn.", "layernorm"))


def lines_of(found: Iterable[Found], most: int = 20) -> list[str]:
    """Returns a line for each, at most ``most`` and how many more there are."""
    lines = [each.line() for each in found]
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]
