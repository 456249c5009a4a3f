"""Blocks of the prefix cache on their way between engines, which then need not compute the beginning of a prompt twice.

A block travels under its hash, which says which tokens, weights, adapter and salt its keys and values follow from. What else they depend on is the
``KVLayout``, which must be equal on both sides: then the bits are those that the engine would have computed itself. Blocks that were brought are ordinary
entries of the prefix cache: the next request with that prompt finds them, and they are evicted like any other. Nothing is reserved for a block that has
not arrived.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.engine.kv_cache.cache_tensors import block_bytes, read_blocks, write_blocks
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.settings import EngineSettings
from tandem.kernels.api import BLOCK_TOKENS
from tandem.model.decoder import Decoder
from tandem.types import UserError, WeightVersion

if TYPE_CHECKING:
    from tandem.engine.core.components import EngineComponents
    from tandem.engine.executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the bytes of a block depend on beside its hash. ``positions``: those whose rotary frequencies keys have (``ModelShapes.positions_in``);
    ``arithmetic``: device, kernels, dtypes and who computes the model; ``weights``: a digest of all of them, since versions are numbered by each server on its
    own."""

    block_tokens: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    kv_cache_dtype: str
    positions: int
    arithmetic: str
    weights: str

    def check_equal(self, other: "KVLayout") -> None:
        """Raises ``UserError`` that names the first field in which ``other`` differs."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                raise UserError(f"KV blocks of another engine cannot be used: {field.name} is {theirs} there and {ours} here; start both with the same")


class BlockDigest(NamedTuple):
    """A block outside the engine: its hash, and the xxh3-128 of its bytes, both in hexadecimal."""

    block_hash: str
    digest: str


class DamagedBlocks(UserError):
    """The bytes of a block are not those that its sender has digested."""


def kv_layout(decoder: Decoder, settings: EngineSettings, components: "EngineComponents", weight_digests: Mapping[str, str]) -> KVLayout:
    """Returns the layout of an engine's blocks. Raises ``UserError`` if its blocks cannot be those of another engine."""
    runner, shapes = components.runner, decoder.shapes
    if runner.ranks is not None:
        raise UserError("a tensor-parallel engine has the heads of its KV blocks in several processes, which are not exchanged; use tensor_parallel_size=1")
    if not settings.enable_prefix_caching:
        raise UserError("the engine has no prefix cache, in which KV blocks are exchanged; leave out what turns it off")
    if shapes.linear_attention is not None:
        raise UserError(
            f"a {shapes.architecture} model's layers of linear attention keep states beside the KV blocks of a prompt, which are not exchanged; compute "
            "prompts where they are answered"
        )
    if not settings.deterministic:
        raise UserError("the engine is started with deterministic=False, so that its KV blocks are not those of another engine; leave it out")
    if runner.proposer is not None and runner.proposer.caches:
        raise UserError("the draft model of the engine has KV blocks of its own, which are not exchanged; use speculative method ngram or suffix")
    if not weight_digests:
        raise UserError("the engine keeps no digests of its weights, by which the KV blocks of another engine are recognised; start it with digest_weights")
    import xxhash

    weights = xxhash.xxh3_128_hexdigest("\0".join(f"{name} {digest}" for name, digest in sorted(weight_digests.items())).encode())
    kernels, held = decoder.kernels, decoder.embed_tokens
    precision, network = getattr(kernels, "precision", "fp32"), "tandem" if shapes.transformers is None else "transformers"
    dtype = str(held.dtype).removeprefix("torch.")
    arithmetic = f"{held.device.type} {type(kernels).__name__} {kernels.name} {dtype} {precision} {decoder.quantization} {network}"
    return KVLayout(
        BLOCK_TOKENS, shapes.num_hidden_layers, shapes.num_key_value_heads, shapes.head_dim, settings.kv_cache_dtype, decoder.positions, arithmetic, weights
    )  # fmt: skip


class BlockExchange:
    """Copies blocks between the KV cache of one engine and memory outside it, between two steps. ``synchronize``: waits for the step that is in flight."""

    def __init__(self, layout: KVLayout, kv_cache: KVCacheManager, runner: "ModelRunner", synchronize: Callable[[], None]) -> None:
        self.layout = layout
        self._kv_cache, self._runner, self._synchronize = kv_cache, runner, synchronize

    @property
    def weight_version(self) -> WeightVersion:
        return self._kv_cache.weight_version

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in all layers. Raises ``UserError`` while the engine sleeps, and has no blocks."""
        if not self._runner.caches:
            raise UserError("the engine is asleep and has no KV blocks; wake it up first")
        return block_bytes(self._runner.caches)

    @torch.inference_mode()
    def export_blocks(
        self, prompt_token_ids: list[int], into: memoryview, *, first: int = 0, adapter: str = "", cache_salt: str = ""
    ) -> list[BlockDigest]:
        """Copies blocks of a prompt, from number ``first`` on, to ``into``, one behind the other: as many as the prefix cache has, and at most as many as
        there is room for. Returns them in order. The digests are those of the copies."""
        from tandem.weight_transfer.copying import address_of, digest_of

        size = self.block_bytes
        self._synchronize()
        hashes = self._kv_cache.prompt_hashes(prompt_token_ids, adapter, cache_salt)[first : first + len(into) // size]
        pool, blocks = self._kv_cache.block_pool, list[int]()
        try:
            for block_hash in hashes:
                block = pool.get_cached_block(block_hash)
                if block is None:
                    break
                blocks.append(block)
            if not blocks:
                return []
            read_blocks(self._runner.caches, blocks, torch.frombuffer(into, dtype=torch.uint8)[: len(blocks) * size].view(-1, size))
        finally:
            pool.free_blocks(blocks)
        at = address_of(into)
        return [BlockDigest(block_hash.hex(), digest_of(at + i * size, size)) for i, block_hash in enumerate(hashes[: len(blocks)])]

    @torch.inference_mode()
    def import_blocks(
        self, prompt_token_ids: list[int], blocks: Sequence[BlockDigest], memory: memoryview, *, first: int = 0, adapter: str = "", cache_salt: str = "",
        request_id: str = "",
    ) -> int:  # fmt: skip
        """Brings ``blocks`` of a prompt, whose bytes are in ``memory`` one behind the other, into the prefix cache from number ``first`` on. Returns how many
        of them the cache has now: fewer where all other blocks are held by requests.

        ``request_id``: by which ``BlockEvents`` name the prompt.

        Raises:
            UserError: They are not the blocks that this engine looks for, as of another prompt or other weights. Nothing is brought.
            DamagedBlocks: The bytes of one do not have its digest. Those before it are brought.
        """
        from tandem.weight_transfer.copying import address_of, digest_of

        size = self.block_bytes
        self._synchronize()
        hashes = self._kv_cache.prompt_hashes(prompt_token_ids, adapter, cache_salt)[first : first + len(blocks)]
        if [block_hash.hex() for block_hash in hashes] != [block.block_hash for block in blocks]:
            raise UserError("KV blocks of another prompt or of other weights cannot be used; compute the prompt here")
        rows, at, pool = torch.frombuffer(memory, dtype=torch.uint8)[: len(blocks) * size].view(-1, size), address_of(memory), self._kv_cache.block_pool
        held, arrived, damaged = list[int](), dict[int, int](), None
        try:
            for number, (block_hash, given) in enumerate(zip(hashes, blocks, strict=True)):
                block = pool.get_cached_block(block_hash)
                if block is None:
                    if not pool.num_free_blocks:
                        break
                    if digest_of(at + number * size, size) != given.digest:
                        damaged = first + number
                        break
                    block = arrived[number] = pool.get_new_block()
                held.append(block)
            if arrived:
                write_blocks(self._runner.caches, list(arrived.values()), rows[list(arrived)])
                for number, block in arrived.items():
                    # Only now, since a hash promises the bytes.
                    self._kv_cache.cache_prompt_blocks(request_id, len(prompt_token_ids), first + number, [hashes[number]], [block])
        finally:
            pool.free_blocks(held)
        if damaged is not None:
            raise DamagedBlocks(f"block {damaged} of the prompt does not have its digest {blocks[damaged - first].digest}; compute it here")
        return len(held)
