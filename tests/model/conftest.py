"""Random transformers models, and the forward passes of trainer and engine, the latter over a cache with shuffled blocks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from listed_families import BY_OTHERS, TINY, Tiny, random_peer

from tandem.engine.kv_cache.cache_tensors import make_cache
from tandem.kernels import BLOCK_TOKENS, Kernels, PagedBatch, empty_cache, empty_latent_cache, select, stored_dtype
from tandem.kernels.mixed import in_precision
from tandem.model.decoder import Decoder, PackedContext, PagedContext
from tandem.text.characters import make_character_tokenizer
from tandem.types import UserError

Step = Sequence[tuple[int, int]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        return select(request.param)
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["fp32", "bf16"])
def cpu_kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        return in_precision(select("cpu"), request.param, torch.device("cpu"))
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def peer_model() -> Callable[..., Any]:
    """``peer_model(model_type, seed=0, **config)`` is ``random_peer``, which prints nothing."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return random_peer


@pytest.fixture(scope="session")
def packed_logits() -> Callable[..., list[Tensor]]:
    """Runs all sequences in one packed forward pass, as the trainer does; returns logits [L, V] for each sequence."""

    def run(decoder: Decoder, sequences: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(s) for s in sequences]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths])
        hidden = decoder(torch.cat(list(sequences)), positions, PackedContext(bounds, max(lengths)))
        return list(decoder.logits(hidden).split(lengths))

    return run


@pytest.fixture(scope="session")
def paged_logits() -> Callable[..., list[Tensor]]:
    """Runs sequences over a paged cache, as the engine does: a step is a list of ``(sequence, number of its next tokens)``; blocks are assigned at
    random. ``wanted``: each step computes the logits of a random subset of the rows, possibly empty; the others are NaN."""

    def run(
        decoder: Decoder, sequences: Sequence[Tensor], steps: Sequence[Step], seed: int = 0, wanted: bool = False
    ) -> list[Tensor]:
        shapes, generator = decoder.shapes, torch.Generator().manual_seed(seed)
        blocks_each = max(-(-len(s) // BLOCK_TOKENS) for s in sequences)
        count = blocks_each * len(sequences) + 3
        tables = torch.randperm(count, generator=generator)[: count - 3].view(len(sequences), -1).to(torch.int32)
        dtype, device = decoder.embed_tokens.dtype, decoder.embed_tokens.device
        stored = stored_dtype(decoder.kv_cache_dtype, dtype)
        layers, heads = shapes.num_hidden_layers, (shapes.num_key_value_heads, shapes.head_dim)
        caches: Any = empty_cache((count, *heads), layers, stored, device)
        if shapes.latent is not None:
            caches = empty_latent_cache(count, shapes.latent.cached_size, layers, stored, device)
        if shapes.linear_attention is not None:
            caches = make_cache(decoder, count, decoder.kv_cache_dtype, len(sequences))
        for cache in caches:
            # The content of a block before it is written must not matter.
            for tensor in cache.tensors():
                tensor.fill_(7.0)
        done, parts = [0] * len(sequences), [[] for _ in sequences]
        for step in steps:
            spans = [(s, done[s], min(done[s] + n, len(sequences[s]))) for s, n in step if done[s] < len(sequences[s])]
            if not spans:
                continue
            positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
            owner = torch.cat([torch.full((end - start,), s) for s, start, end in spans])
            slots = tables[owner, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
            lengths = [end - start for _, start, end in spans]
            batch = PagedBatch(
                torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
                torch.tensor([end for _, _, end in spans], dtype=torch.int32),
                tables[[s for s, _, _ in spans]].contiguous(),
                slots,
                torch.tensor([s for s, _, _ in spans]),
            )
            tokens = torch.cat([sequences[s][start:end] for s, start, end in spans])
            rows = None
            if wanted:
                rows = (torch.rand(len(tokens), generator=generator) < 0.4 * (len(tokens) % 3)).nonzero().squeeze(1)
            logits = decoder.logits(decoder(tokens, positions, PagedContext(batch, caches, rows)))
            if rows is not None:
                every = logits.new_full((len(tokens), shapes.vocab_size), torch.nan)
                logits = every.index_copy(0, rows, logits)
            for (s, _, end), part in zip(spans, logits.split(lengths), strict=True):
                parts[s].append(part)
                done[s] = end
        assert done == [len(s) for s in sequences]
        return [torch.cat(part) for part in parts]

    return run


@pytest.fixture(scope="session")
def tiny_of(peer_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """``tiny_of(family)`` returns the tiny folder of a listed family, which is made once."""
    made: dict[str, Tiny] = {}

    def make(family: str) -> Tiny:
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            peer = peer_model(family, vocab_size=40, **TINY[family])
            make_character_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789", folder)
            peer.save_pretrained(folder)
            made[family] = Tiny(family, peer, folder)
        return made[family]

    return make


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.full if name in BY_OTHERS else ()) for name in sorted(TINY)])
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """The tiny folder of each listed family."""
    return tiny_of(request.param)
