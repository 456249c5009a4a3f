"""Weights that are loaded directly into the packed layout, one layer at a time."""

from pathlib import Path

import pytest
import torch

from tandem.kernels import BLOCK_TOKENS, empty_cache, select
from tandem.kernels.api import PagedBatch, untouched_zeros
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model, load_tensors, save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.types import UserError

TIED = ModelShapes("qwen3", 96, 64, 3, 4, 2, 16, 128, 64, tie_word_embeddings=True, qk_norm=True)
UNTIED = ModelShapes("qwen2", 96, 64, 3, 4, 2, 16, 128, 64, tie_word_embeddings=False, attention_bias=True)
MIXED = ModelShapes(
    "qwen3_moe", 96, 64, 3, 4, 2, 16, 128, 64, tie_word_embeddings=True, qk_norm=True, experts=ExpertShapes(5, 2, 32, True, (1,))
)
ALL = pytest.mark.parametrize("shapes", [TIED, UNTIED, MIXED], ids=["tied", "untied", "mixed"])


def model(shapes: ModelShapes, seed: int = 0) -> Decoder:
    decoder = Decoder(shapes, select("auto"))
    initialise(decoder, seed, standard_deviation=0.1)
    return decoder


def logits(decoder: Decoder) -> torch.Tensor:
    """Returns the logits of 20 tokens in one prefill over a cache."""
    shapes, tokens = decoder.shapes, torch.arange(20)
    caches = empty_cache((2, shapes.num_key_value_heads, shapes.head_dim), shapes.num_hidden_layers, torch.float32, torch.device("cpu"))
    starts, blocks = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    batch = PagedBatch(starts, torch.tensor([20], dtype=torch.int32), blocks, tokens)
    return decoder.logits(decoder(tokens, tokens, PagedContext(batch, caches)))


@ALL
def test_a_folder_loaded_packed_computes_the_bits_of_one_loaded_plain_and_packed_afterwards(shapes: ModelShapes, tmp_path: Path) -> None:
    save_model(model(shapes), tmp_path / "model")
    plain, packed = load_model(tmp_path / "model", select("auto")), load_model(tmp_path / "model", select("auto"), pack=True)
    assert packed.is_packed
    plain.pack()
    assert torch.equal(logits(plain), logits(packed))


@ALL
def test_new_weights_replace_packed_ones_and_no_layer_keeps_anothers(shapes: ModelShapes) -> None:
    decoder, other = model(shapes, seed=0), model(shapes, seed=1)
    decoder.pack()
    before = logits(decoder)
    load_tensors(decoder, to_huggingface(other), pack=True)
    other.pack()
    assert torch.equal(logits(decoder), logits(other))
    assert not torch.equal(logits(decoder), before)


def test_the_plain_matrices_of_all_layers_lie_in_the_memory_of_one() -> None:
    decoder = model(TIED)
    decoder.pack()
    decoder.unpack(in_one_layer=True)
    distinct = {linear.weight.data_ptr() for layer in decoder._layers() for linear in layer.linears() if linear.weight is not None}
    assert len(distinct) == 4
    decoder.pack()
    decoder.unpack()
    distinct = {linear.weight.data_ptr() for layer in decoder._layers() for linear in layer.linears() if linear.weight is not None}
    assert len(distinct) == 4 * TIED.num_hidden_layers


@ALL
def test_a_pack_that_fails_half_way_leaves_a_decoder_that_takes_the_next_weights(shapes: ModelShapes) -> None:
    decoder, other = model(shapes, seed=0), model(shapes, seed=1)

    def fill(layer: int) -> None:
        if layer == 1:
            raise OSError("the file is gone")

    decoder.unpack(in_one_layer=True)
    with pytest.raises(OSError, match="gone"):
        decoder.pack(fill)
    assert not decoder.is_packed
    load_tensors(decoder, to_huggingface(other), pack=True)
    other.pack()
    assert torch.equal(logits(decoder), logits(other))


def test_after_a_pack_that_failed_plain_weights_have_memory_of_their_own_in_every_layer() -> None:
    decoder, other = model(TIED, seed=0), model(TIED, seed=1)

    def fill(layer: int) -> None:
        raise OSError("the file is gone")

    decoder.unpack(in_one_layer=True)
    with pytest.raises(OSError, match="gone"):
        decoder.pack(fill)
    load_tensors(decoder, to_huggingface(other))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(to_huggingface(decoder), to_huggingface(other), strict=True))


def test_a_set_of_weights_that_is_refused_leaves_the_packed_ones() -> None:
    decoder = model(TIED)
    given = dict(to_huggingface(model(TIED, seed=1)))
    decoder.pack()
    before = logits(decoder)
    with pytest.raises(UserError, match="is missing"):
        load_tensors(decoder, list(given.items())[1:], pack=True)
    assert decoder.is_packed and torch.equal(logits(decoder), before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_cache_takes_memory_only_where_it_is_used() -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])

    before, page = resident_pages(), 4096
    zeros = untouched_zeros((64, 1 << 20), torch.float32, torch.device("cpu"))
    assert (resident_pages() - before) * page < zeros.nbytes // 8
    zeros[3] = 1.0
    assert (resident_pages() - before) * page >= 4 << 20
    assert zeros[2].count_nonzero() == 0 and zeros[3].sum() == 1 << 20


def test_untouched_zeros_of_no_elements_are_an_empty_tensor() -> None:
    assert untouched_zeros((0, 2, BLOCK_TOKENS), torch.float32, torch.device("cpu")).shape == (0, 2, BLOCK_TOKENS)
