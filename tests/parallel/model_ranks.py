"""Trains a seeded model on a seeded batch for some steps, in one process or on the ranks of a mesh, and gathers the results for comparison."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from ranks import RankContext

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.mesh import GroupName
from tandem.layout.parameters import parameters
from tandem.layout.rotary import RopeScaling, Rotary
from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.layout.sharding import ShardSpec, is_held, shard_slices
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families import gpt_oss, qwen2_moe
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import MicroBatch, collate
from tandem.trainer.parallel.placement import placement
from tandem.trainer.parallel.ranks import Ranks, alone
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.parallel.router_balance import make_balance
from tandem.trainer.step import predict, train_step
from tandem.types import TrainSequence

QWEN3 = ModelShapes("qwen3", 43, 32, 2, 4, 2, 16, 48, 128, True, qk_norm=True)
LLAMA = ModelShapes("llama", 43, 32, 2, 4, 4, 8, 48, 128, False, attention_bias=True, output_bias=True, mlp_bias=True)
QWEN3_MOE = ModelShapes("qwen3_moe", 43, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, experts=ExpertShapes(6, 2, 24))
QWEN2_MOE = ModelShapes(
    "qwen2_moe", 43, 32, 3, 4, 2, 16, 48, 128, False, attention_bias=True,
    experts=ExpertShapes(6, 2, 24, normalised=False, dense_layers=(1,), names=qwen2_moe.NAMES, shared_intermediate_size=40, shared_gate=True),
)
GLM4_MOE = ModelShapes(
    "glm4_moe", 43, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, rotary_fraction=0.5,
    experts=ExpertShapes(8, 3, 24, dense_layers=(0,), shared_intermediate_size=48, sigmoid=SigmoidRouting(4, 2, 1.7)),
)
QWEN3_NEXT = ModelShapes(
    "qwen3_next", 43, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, rotary_fraction=0.5, norms_from_one=True, attention_gate=True,
    linear_attention=LinearAttention((0,), 2, 4, 12, 10, 4),
    experts=ExpertShapes(6, 2, 24, names=qwen2_moe.NAMES, shared_intermediate_size=40, shared_gate=True),
)
GPT_OSS = ModelShapes(
    "gpt_oss", 43, 32, 2, 4, 2, 16, 48, 128, False, attention_bias=True, output_bias=True, activation="clamped_swiglu", attention_sinks=True,
    layer_windows=(5, None), experts=ExpertShapes(6, 2, 48, names=gpt_oss.NAMES, biased=True),
)
DEEPSEEK_V3 = ModelShapes(
    "deepseek_v3", 43, 32, 2, 4, 4, 20, 48, 128, False, attention_bias=True, output_bias=True, latent=LatentAttention(20, 12, 8, 10, 16),
    rotary_interleaved=True, rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3),
    experts=ExpertShapes(8, 3, 24, dense_layers=(0,), shared_intermediate_size=24, sigmoid=SigmoidRouting(4, 2, 1.7)),
)
DEEPSEEK_V2 = ModelShapes(
    "deepseek_v2", 43, 32, 2, 4, 4, 20, 48, 128, False, latent=LatentAttention(20, 12, 8, 10), rotary_interleaved=True,
    experts=ExpertShapes(8, 3, 24, normalised=False, dense_layers=(0,), shared_intermediate_size=24, softmax=SoftmaxRouting(4, 2, 1.7)),
)
MISTRAL = ModelShapes("mistral", 43, 32, 2, 4, 2, 16, 48, 128, False, layer_windows=(5, 5))
GRANITE = ModelShapes("granite", 43, 32, 2, 4, 2, 16, 48, 128, False, multipliers=Multipliers(3.0, 0.22, 0.3, 0.8), post_norms=True)
"""With norms after attention and MLP too, so that both happen to what ranks have summed."""
SMOLLM3 = ModelShapes("smollm3", 43, 32, 2, 4, 2, 16, 48, 128, False, layer_windows=(None, 5), unrotated_layers=(1,))
OLMO2 = ModelShapes("olmo2", 43, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, qk_norm_all_heads=True, pre_norms=False, post_norms=True)
GEMMA = ModelShapes(
    "gemma3_text", 43, 32, 2, 4, 2, 16, 48, 128, True, qk_norm=True, post_norms=True, layer_windows=(5, None), window_rotary=Rotary(500.0, RopeScaling()),
    activation="gelu_pytorch_tanh", norms_from_one=True, scaled_embedding=True, score_cap=2.0, logit_cap=3.0, multipliers=Multipliers(attention=0.4),
)
"""With all terms of Gemma 2 and 3."""
COHERE = ModelShapes(
    "cohere", 43, 32, 2, 4, 2, 16, 48, 128, True, attention_bias=True, output_bias=True, qk_norm=True, qk_norm_by_head=True, centred_norms=True,
    parallel_blocks=True, rotary_interleaved=True, multipliers=Multipliers(logits_scaling=4.0), layer_windows=(5, None), unrotated_layers=(1,),
)
"""With all terms of Command R+ and R7B."""
WINDOWED = replace(QWEN3, layer_windows=(5, None))
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Case:
    """A model and how it is trained. ``lengths``: of the sequences of the global batch, assigned to data-parallel ranks in turn. ``masked``: the
    index in every 4 tokens of the one that does not count."""

    shapes: ModelShapes
    dtype: Literal["float32", "float64"] = "float64"
    kernels: Literal["reference", "cpu"] = "reference"
    deterministic: bool = False
    sequence: bool = False
    lengths: tuple[int, ...] = (9, 2, 17, 5, 30, 3, 8)
    masked: int = 2
    temperature: float = 1.0
    steps: int = 3
    recompute: Literal["none", "full", "selective"] = "none"
    balance_loss: float = 0.0
    bias_rate: float = 0.0
    zero: Literal[0, 1, 2, 3] = 0
    optimizer: Literal["adamw", "muon", "adamw8bit"] = "adamw"

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(learning_rate=LEARNING_RATE, dtype=self.dtype, weight_decay=0.01, optimizer=self.optimizer)


@dataclass
class Trained:
    """The results of training, as whole tensors by Hugging Face name. ``logits``: of the first step's batch by global sequence; ``losses``,
    ``norms``: one for each step; ``gradients``: of the first step, before clipping."""

    logits: dict[int, torch.Tensor]
    logprobs: dict[int, torch.Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    overloads: list[float] = field(default_factory=list)
    biases: dict[int, torch.Tensor] = field(default_factory=dict)


def sequences_of(case: Case) -> list[TrainSequence]:
    draw = random.Random(5)
    found = []
    for number, length in enumerate(case.lengths):
        mask = (0.0, *(float(i % 4 != case.masked) for i in range(1, length)))
        found.append(TrainSequence(f"{number}", tuple(draw.randrange(case.shapes.vocab_size) for _ in range(length)), 1, mask))
    return found


def weights_of(shapes: ModelShapes) -> dict[str, torch.Tensor]:
    """Returns random whole weights without special values."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.1 if len(shape) == 1 else 0.25) + name.endswith("norm.weight")
        for name, shape in parameters(shapes)
    }


def ranks_of(here: RankContext | None, case: Case) -> Ranks:
    return alone() if here is None else Ranks(here.mesh, here.groups, case.deterministic, case.sequence)


def build(case: Case, here: RankContext | None) -> Decoder:
    parallel = ranks_of(here, case).model_parallel()
    dtype = getattr(torch, case.dtype)
    model = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype, parallel=parallel)
    model.recompute = case.recompute
    config = TrainerConfig(router_balance_loss=case.balance_loss, router_bias_rate=case.bias_rate)
    model.router_balance = make_balance(model, config, ranks_of(here, case))
    load_tensors(model, weights_of(case.shapes).items())
    return model


def train(here: RankContext | None, case: Case) -> Trained:
    """Trains ``case`` on this rank, or in one process if ``here`` is ``None``."""
    groups = None if here is None else here.groups
    model = build(case, here)
    data = (0, 1) if groups is None else (groups["data"].rank, groups["data"].size)
    every = sequences_of(case)
    own = list(range(len(every)))[data[0] :: data[1]]
    micro_batch = collate([every[i] for i in own], getattr(torch, case.dtype))
    loss_of = make_cross_entropy_loss(counts_of(every))
    logits, logprobs = by_sequence(model, micro_batch, own, case)
    if model.router_balance is not None:
        model.router_balance.begin(len(micro_batch.tokens))
    loss_of(predict(model, micro_batch, case.temperature), micro_batch).loss.backward()
    if groups is not None:
        reduce(model, groups)
    gradients = whole(model, {name: p.grad for name, p in model.named_parameters()}, groups)
    trained = Trained(logits, logprobs, [], [], gradients, {})
    replica = make_replica(model, case.trainer, ranks_of(here, case), case.zero)
    for _ in range(case.steps):
        metrics = train_step(model, replica.optimizer, [micro_batch], loss_of, LEARNING_RATE, case.temperature, sums=replica.sums).metrics
        trained.losses.append(metrics["sft/loss"])
        trained.norms.append(metrics["actor/grad_norm"])
        if model.router_balance is not None:
            trained.overloads.append(metrics["router/max_overload"])
            trained.biases = dict(model.router_balance.biases)
    with replica.whole():
        trained.parameters = whole(model, dict(model.named_parameters()), groups)
    return trained


def by_sequence(model: Decoder, micro_batch: MicroBatch, own: list[int], case: Case) -> tuple[dict[int, Any], dict[int, Any]]:
    with torch.no_grad():
        hidden = model(micro_batch.tokens, micro_batch.positions, PackedContext(micro_batch.cu_seqlens, micro_batch.max_seqlen))
        logits = model.packed_logits(hidden, len(micro_batch.tokens)).split(micro_batch.cu_seqlens.diff().tolist())
        found = predict(model, micro_batch, case.temperature).logprobs
        rows = micro_batch.sequence_of_row
        stacked = torch.stack((found.raw, found.scaled, found.entropy))
        return dict(zip(own, logits, strict=True)), {i: stacked[:, rows == place] for place, i in enumerate(own)}


def sum_partial_gradients(model: Decoder) -> None:
    """Sums the partial gradients of parameters that all tensor-parallel ranks hold. Called once per step, before a gradient is read."""
    if model.parallel is None or model.parallel.tensor.size == 1:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and placement(model, name).tensor == "partial":
            own = parameter.grad if parameter.grad is not None else parameter.new_zeros(parameter.shape)
            parameter.grad = model.parallel.tensor.all_reduce(own, f"gradient of {name}")


def reduce(model: Decoder, groups: Mapping[GroupName, Communicator]) -> None:
    sum_partial_gradients(model)
    for name, parameter in model.named_parameters():
        ranks = groups[placement(model, name).replicas]
        assert parameter.grad is not None, name
        parameter.grad = ranks.all_reduce(parameter.grad, "a gradient")


def whole(
    model: Decoder, values: Mapping[str, torch.Tensor | None], groups: Mapping[GroupName, Communicator] | None
) -> dict[str, torch.Tensor]:
    """Returns ``values`` (one for each parameter) by Hugging Face name, gathered over ``groups`` if their ranks hold shards."""
    twin = Decoder(model.shapes, model.kernels, dtype=model.embed_tokens.dtype, parallel=model.parallel)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            value = values[name]
            assert value is not None, name
            parameter.copy_(value)
    own = {name: tensor.clone() for name, tensor in to_huggingface(twin)}
    if groups is None:
        return own
    found = {name: torch.full(shape, math.nan, dtype=model.embed_tokens.dtype) for name, shape in parameters(model.shapes)}
    tensor, expert = groups["tensor"], groups["expert"]
    for expert_rank in range(expert.size):
        for rank in range(tensor.size):
            cut = ShardSpec(rank, tensor.size, model.shard_spec.deterministic, expert_rank, expert.size)
            for name, tensor_of_all in found.items():
                if is_held(model.shapes, name, cut):
                    part = shard_slices(model.shapes, name, tuple(tensor_of_all.shape), cut)
                    is_own = (expert_rank, rank) == (expert.rank, tensor.rank)
                    sent = (own[name] if is_own else tensor_of_all[part]).clone(memory_format=torch.contiguous_format)
                    tensor.broadcast(sent, rank, "gathering")
                    expert.broadcast(sent, expert_rank, "gathering")
                    tensor_of_all[part] = sent
    return found


def distance(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> float:
    """Returns the norm of the difference relative to the norm, over all tensors."""
    assert found.keys() == wanted.keys()
    difference = math.fsum((found[name] - wanted[name]).double().square().sum().item() for name in wanted)
    return math.sqrt(difference / math.fsum(value.double().square().sum().item() for value in wanted.values()))


_alone: dict[Case, Trained] = {}


def by_one_process(case: Case) -> Trained:
    """Returns the results of one process for ``case``, computed once."""
    plain = replace(case, deterministic=False, sequence=False, zero=0, recompute="none")
    if plain not in _alone:
        _alone[plain] = train(None, plain)
    return _alone[plain]


def check(found: list[Trained], wanted: Trained) -> None:
    """Raises ``AssertionError`` if a rank's results differ from ``wanted``."""
    is_float32 = next(iter(wanted.parameters.values())).dtype == torch.float32
    close = 1e-6 if is_float32 else 1e-10
    for rank in found:
        assert distance(rank.logits, {i: wanted.logits[i] for i in rank.logits}) < close
        assert distance(rank.logprobs, {i: wanted.logprobs[i] for i in rank.logprobs}) < close
        assert distance(rank.gradients, wanted.gradients) < close
        assert rank.overloads == wanted.overloads
        assert all(torch.equal(rank.biases[layer], bias) for layer, bias in wanted.biases.items())
        for values, others in ((rank.losses, wanted.losses), (rank.norms, wanted.norms)):
            assert all(abs(a - b) <= (1e-5 if is_float32 else 1e-10) * abs(b) for a, b in zip(values, others, strict=True))
        if is_float32:
            furthest = max((rank.parameters[name] - wanted.parameters[name]).abs().max().item() for name in wanted.parameters)
            assert furthest < 0.1 * LEARNING_RATE
        else:
            assert distance(rank.parameters, wanted.parameters) < close
    assert {i for rank in found for i in rank.logits} == set(wanted.logits)
