"""Recomputation: the gradients have the same bits, and fewer activations are stored."""

import ctypes
import gc

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import saved_by_stage
from tandem.kernels import select
from tandem.kernels.mixed import in_precision
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.rotary import RopeScaling, Rotary
from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families import mixtral
from tandem.model.initialise import initialise
from tandem.types import UserError

LLAMA = ModelShapes("llama", 61, 48, 3, 4, 2, 16, 80, 128, False, attention_bias=True, output_bias=True, mlp_bias=True)
QWEN3 = ModelShapes("qwen3", 61, 48, 3, 4, 2, 16, 80, 128, True, qk_norm=True)
MIXTRAL = ModelShapes("mixtral", 61, 48, 3, 4, 2, 16, 48, 128, False, experts=ExpertShapes(4, 2, 48, names=mixtral.NAMES))
OLMO3 = ModelShapes(
    "olmo3", 61, 48, 3, 4, 2, 16, 80, 128, False, qk_norm=True, qk_norm_all_heads=True, pre_norms=False, post_norms=True, layer_windows=(9, None, 9),
    window_rotary=Rotary(500.0, RopeScaling()),
)
GRANITE = ModelShapes(
    "granite", 61, 48, 3, 4, 2, 16, 80, 128, True, post_norms=True, unrotated_layers=(1,), multipliers=Multipliers(3.0, 0.22, 0.3, 0.8)
)
"""With terms of other families too."""
GEMMA = ModelShapes(
    "gemma3_text", 61, 48, 3, 4, 2, 16, 80, 128, True, qk_norm=True, post_norms=True, layer_windows=(9, None, 9), activation="gelu_pytorch_tanh",
    norms_from_one=True, scaled_embedding=True, score_cap=2.0, logit_cap=3.0,
)
COHERE = ModelShapes(
    "cohere", 61, 48, 3, 4, 2, 16, 80, 128, True, qk_norm=True, qk_norm_by_head=True, centred_norms=True, parallel_blocks=True, rotary_interleaved=True
)
LENGTHS = (23, 1, 40, 9)


def gradients(model, recompute):
    model.recompute = recompute
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 61, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    hidden = model(tokens, positions, PackedContext(bounds, max(LENGTHS)))
    found = model.token_logprobs(hidden, torch.arange(len(tokens)), tokens, 1.0, len(tokens))
    found.raw.square().sum().backward()
    return {"loss": found.raw, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("shapes", [LLAMA, QWEN3, MIXTRAL, OLMO3, GRANITE, GEMMA, COHERE], ids=lambda s: s.architecture)
def test_recomputed_gradients_have_the_same_bits(kernels, shapes, recompute) -> None:
    model = Decoder(shapes, kernels)
    initialise(model, 0, 0.2)
    wanted = gradients(model, "none")
    found = gradients(model, recompute)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def allocated() -> int:
    """Returns the bytes that the C library has allocated for this process."""
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    info = type("Mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    call = ctypes.CDLL(None).mallinfo2
    call.restype = info
    gc.collect()
    found = call()
    return int(found.uordblks + found.hblkhd)


def kept_bytes(model, recompute, tokens) -> int:
    """Returns the bytes that a forward pass keeps allocated for its backward pass."""
    model.recompute = recompute
    ids, positions = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    context = PackedContext(torch.tensor([0, tokens], dtype=torch.int32), tokens)
    model(ids, positions, context)
    before = allocated()
    hidden = model(ids, positions, context)
    after = allocated()
    del hidden
    return after - before


def test_less_is_kept_as_the_shapes_say(kernels) -> None:
    """Elements per token and layer: full stores the two inputs of a layer. The plain layer stores sums (2 H), normed inputs (2 H), qkv,
    rotated q, k and v, the output of attention (shared with the next product), the outputs of the two MLP products and the gated values;
    selective stores all of these except the normed inputs, the rotated and the gated values."""
    hidden, query, pairs, inner, layers, tokens = 128, 128, 128, 384, 4, 1024
    shapes = ModelShapes("llama", 61, hidden, layers, 4, 2, 32, inner, tokens, False)
    model = Decoder(shapes, kernels)
    initialise(model, 0, 0.2)
    none, selective, full = (kept_bytes(model, recompute, tokens) for recompute in ("none", "selective", "full"))
    number = 4 * tokens * layers
    assert full < 4 * tokens * hidden * (2 * layers + 4), "and what stands after the last layer"
    dropped = (2 * hidden + query + pairs + inner) * number
    assert none - selective > 0.9 * dropped
    if kernels.name == "reference":
        assert none - selective > 4 * layers * 4 * tokens * tokens / 2, "the scores of four heads"


def test_recomputation_in_mixed_precision_has_the_same_bits() -> None:
    model = Decoder(MIXTRAL, in_precision(select("reference"), "bf16", torch.device("cpu")))
    initialise(model, 0, 0.2)
    wanted = gradients(model, "none")
    for recompute in ("full", "selective"):
        found = gradients(model, recompute)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


KEPT = ModelShapes("llama", 61, 128, 6, 4, 2, 32, 384, 1024, False)
KEPT_LATENT = ModelShapes("deepseek_v3", 61, 128, 6, 6, 6, 48, 384, 1024, False, latent=LatentAttention(64, 32, 16, 24, 48))


KEPT_HYBRID = ModelShapes(
    "qwen3_next", 61, 128, 6, 4, 2, 32, 384, 1024, False, attention_gate=True, qk_norm=True, linear_attention=LinearAttention((0, 1, 3, 4), 4, 8, 24, 20, 4)
)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("shapes", "precision"),
    [(KEPT, "fp32"), (KEPT, "bf16"), (KEPT_LATENT, "fp32"), pytest.param(KEPT_HYBRID, "fp32", marks=pytest.mark.full)],
    ids=["fp32", "bf16", "latent", "hybrid"],
)
def test_the_prediction_of_what_is_kept(shapes, precision, recompute) -> None:
    tokens = 1024
    try:
        model = Decoder(shapes, in_precision(select("cpu"), precision, torch.device("cpu")))
    except UserError as error:
        pytest.skip(str(error))
    initialise(model, 0, 0.2)
    (predicted,) = saved_by_stage(shapes, layout_of_trainer(TrainerConfig(recompute=recompute, precision=precision), ParallelConfig(), tokens))
    assert kept_bytes(model, recompute, tokens) == pytest.approx(predicted, rel=0.15)
