"""Training steps on fake tensors of the device "cuda", in a process that has ``cuda_stand_in.cpp`` preloaded: ``steps_on_a_stand_in.py CASE ...``.

Nothing is computed: what is looked at is where tensors are. Any operation on tensors of two devices ends the process, and so does a collective that is
given one of the wrong device. Prints a JSON line a case: how often the step waited for the device, and where its state is."""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tandem.kernels.mixed as mixed
import tandem.model.parallel.vocabulary_parallel as vocabulary_parallel
import tandem.trainer.micro_batch as micro_batch
import tandem.trainer.optimizers.adamw_host as adamw_host
import tandem.trainer.parallel.pipeline as pipeline_room
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels.attention_backends import with_attention
from tandem.kernels.mixed import in_precision
from tandem.kernels.reference import ReferenceKernels
from tandem.kernels.triton.kernels import TritonKernels
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.mesh import Mesh
from tandem.layout.pipeline_stages import own_spans, spans_of
from tandem.layout.placement import mesh_of
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.rl.algorithms.update import update_policy
from tandem.runtime.collectives.communicator import GROUPS, HOST_GROUPS, Communicator
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.logprobs import sequence_logprobs
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.offload.streams import SerialStreams
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.replica import FrozenReplica, Replica, make_replica
from tandem.trainer.parallel.router_balance import make_balance
from tandem.trainer.parallel.zero_frozen import FrozenShards
from tandem.trainer.step import train_step
from tandem.types import Batch, TrainSequence
from tandem.weight_transfer.convert import OwnPart

QWEN3 = ModelShapes("qwen3", 96, 64, 2, 4, 2, 16, 128, 128, True, qk_norm=True)
LLAMA = replace(QWEN3, architecture="llama", qk_norm=False, tie_word_embeddings=False, attention_bias=True)
QWEN3_MOE = replace(QWEN3, architecture="qwen3_moe", experts=ExpertShapes(6, 2, 32))
GPU = torch.device("cuda", 0)
COPIES = ("copy_", "_to_copy", "_pin_memory", "set_", "index_put_")
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "biases": {"shapes": LLAMA},
    "bf16": {"precision": "bf16"},
    "flash": {"precision": "bf16", "attention": "torch"},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "recompute": {"recompute": "full", "precision": "bf16"},
    "experts": {"shapes": QWEN3_MOE, "router_balance_loss": 0.01, "router_bias_rate": 0.001},
    "muon": {"optimizer": "muon"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "offload": {"offload": "cpu"},
    "data 2": {"data": 2},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2, "offload": "cpu"},
    "zero 3": {"data": 2, "zero": 3, "precision": "bf16"},
    "zero 2, muon": {"data": 2, "zero": 2, "optimizer": "muon"},
    "zero 3, adamw8bit": {"data": 2, "zero": 3, "optimizer": "adamw8bit"},
    "tensor 2": {"tensor": 2, "precision": "bf16"},
    "tensor 2, muon": {"tensor": 2, "optimizer": "muon"},
    "tensor 2, deterministic": {"tensor": 2, "deterministic": True, "sequence_parallel": False},
    "context 2": {"context": 2},
    "pipeline 2, first": {"pipeline": 2},
    "pipeline 2, last": {"pipeline": 2, "rank": 1},
    "experts on stages": {"shapes": QWEN3_MOE, "pipeline": 2, "router_balance_loss": 0.01, "router_bias_rate": 0.001},
    "pod": {"pod": True},
    "pod, bf16": {"pod": True, "precision": "bf16"},
    "pod, bfloat16 weights": {"pod": True, "dtype": "bfloat16"},
    "pod, zero 3": {"pod": True, "data": 2, "zero": 3},
    "pod, tensor 2": {"pod": True, "tensor": 2, "deterministic": True},
    "pipeline 2 x tensor 2 x data 2": {"pipeline": 2, "tensor": 2, "data": 2, "rank": 5, "precision": "bf16"},
}
waits: list[str] = []


class OneDevice(TorchDispatchMode):
    """No operation but a copy has tensors of two devices, one number on the CPU included: a fused kernel would read it there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = {str(x.device) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if len(found) > 1 and func.overloadpacket.__name__ not in COPIES:
            raise AssertionError(f"{func} has tensors on {sorted(found)}")
        return func(*args, **(kwargs or {}))


class Done:
    def wait(self) -> None: ...


class Group:
    """A process group in which nothing travels. ``device``: where what it is given must be."""

    def __init__(self, name: str, device: str) -> None:
        self._name, self._device = name, device

    def __getattr__(self, call: str) -> Any:
        def collective(*arguments: Any) -> Done:
            for x in tree_leaves(arguments):
                assert not isinstance(x, Tensor) or x.device.type == self._device, f"{call} over '{self._name}' is given a tensor on {x.device}"
            return Done()

        return collective


class Shapes(ReferenceKernels):
    """Kernels that have the shapes of Triton's, and wait for the device as seldom."""

    def __init__(self) -> None:
        super().__init__(tiled=False)

    route = TritonKernels.route

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None, query_start: None = None,
        cap: float | None = None, sinks: None = None,
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens.device == q.device and query_start is None and cap is None and sinks is None
        wide = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v))
        return F.scaled_dot_product_attention(*wide, is_causal=True).transpose(0, 1)


def waiting(name: str, result: Any) -> Any:
    """What a look at a tensor gives: 1s in its shape."""

    def look(x: Tensor, *_: Any) -> Any:
        if x.device.type == "cuda":
            waits.append(name)
        return result(x)

    return look


def ones(x: Tensor) -> Any:
    def nested(shape: Any) -> Any:
        return one if not shape else [nested(shape[1:]) for _ in range(shape[0])]

    if hasattr(x, "known"):
        return x.known
    one: Any = 1.0 if x.is_floating_point() else 1
    return nested(tuple(x.shape))


def stand_in() -> None:
    for name, result in (("tolist", ones), ("item", ones), ("__bool__", lambda x: True), ("__int__", lambda x: 1), ("__float__", lambda x: 1.0)):
        for kind in (Tensor, FakeTensor):
            setattr(kind, name, waiting(name, result))
    real = torch.searchsorted

    def places(rows: Tensor, bounds: Tensor) -> Tensor:
        found = real(rows, bounds)
        # Every token predicts one here: the first row of a run stands where the run begins.
        found.known = [len(rows) * i // (len(bounds) - 1) for i in range(len(bounds))]
        return found

    vocabulary_parallel.torch = SimpleNamespace(**{**vars(torch), "searchsorted": places})
    Tensor.pin_memory = FakeTensor.pin_memory = lambda x, *_: x  # type: ignore[method-assign,assignment]
    micro_batch._tensor = lambda values, dtype: torch.tensor(list(values), dtype=dtype)
    adamw_host.host_zeros = lambda numbers, dtype, pinned: torch.zeros(numbers, dtype=dtype)
    adamw_host.streams_of = lambda device: SerialStreams()
    pipeline_room.broadcast_value = lambda ranks, value, source, name, device: value
    mixed.is_emulated = lambda precision, device: False


def sequences() -> list[TrainSequence]:
    draw = random.Random(0)
    return [TrainSequence(str(n), tuple(draw.randrange(90) for _ in range(n)), 1, (0.0,) + (1.0,) * (n - 1)) for n in (9, 17, 33, 5, 26)]


def pod_step(replica: Replica, trainer: TrainerConfig) -> None:
    """What the calls of a pod do on a GPU in one step: the reference's pass, the policy update, offload, convert and the reads of register."""
    ranks, model = replica.ranks, replica.model
    frozen = Decoder(model.shapes, model.kernels, dtype=model.dtype, device=GPU, parallel=ranks.model_parallel())
    shards = FrozenShards(frozen, ranks, is_filled=False) if replica.shards_weights else None
    reference = FrozenReplica(ranks, frozen.requires_grad_(False), None, shards)
    drawn = [
        replace(s, advantages=s.loss_mask, rollout_logprobs=tuple(-x for x in s.loss_mask), sampling_logprobs=tuple(-x for x in s.loss_mask))
        for s in sequences()
    ]
    logprobs = sequence_logprobs(reference, drawn, 40)
    batch = Batch(0, tuple(replace(s, reference_logprobs=logprobs[s.id]) for s in drawn), 12)
    algorithm = AlgorithmConfig(kl_coef=0.1, old_logprobs="recompute", tis_cap=2.0, minibatches=2)
    result = update_policy(replica, batch, algorithm, replace(trainer, micro_batch_tokens=40), total_steps=4, guard=GradScaler(trainer), temperature=0.7)
    assert result.updated and "mismatch_kl" in result.metrics
    replica.drop_gradients()
    assert all(p.grad is None for p in model.parameters())
    assert {x.device.type for x in (*replica.weights(), *replica.moments(), *reference.weights())} == {"cuda"}
    shards_of_rank = ReplicaState(replica).weight_shards()
    parts = [OwnPart(0, 0, 0, shard, None) for shard in shards_of_rank]
    assert parts and all(part.read().device.type == "cpu" for part in parts)


def run(given: dict[str, Any]) -> dict[str, Any]:
    given = dict(given)
    is_pod = given.pop("pod", False)
    shapes, rank = given.pop("shapes", QWEN3), given.pop("rank", 0)
    trainer = TrainerConfig(**{name: given.pop(name) for name in list(given) if name in TrainerConfig.__dataclass_fields__})
    attention = given.pop("attention", None)
    kernels: Any = Shapes()
    if attention is not None:
        kernels = with_attention(kernels, attention, torch.bfloat16, GPU, deterministic=False)
    parallel = ParallelConfig(**given)
    mesh = Mesh(mesh_of(parallel), rank)
    groups = {}
    for name in GROUPS:
        members = mesh.group(name)
        group = Group(name, "cpu" if name in HOST_GROUPS else "cuda") if len(members) > 1 else None
        groups[name] = Communicator(name, members.index(rank), len(members), group, 1.0)
    ranks = Ranks(mesh, groups, parallel.deterministic, parallel.sequence_parallel, GPU)
    spans = spans_of(parallel, shapes)
    stages = groups["pipeline"]
    own = own_spans(parallel, spans, stages.rank) if stages.size > 1 else ()
    dtype = getattr(torch, trainer.dtype)
    model = Decoder(shapes, in_precision(kernels, trainer.precision, GPU), dtype=dtype, device=GPU, parallel=ranks.model_parallel(), spans=own)
    model.router_balance, model.recompute = make_balance(model, trainer, ranks), trainer.recompute
    pipeline = Pipeline(model, spans, stages, parallel.schedule) if stages.size > 1 else None
    replica = make_replica(model, trainer, ranks, parallel.zero, pipeline)
    batch, guard = sequences(), GradScaler(trainer)
    micro_batches = [collate(batch[:2], model.dtype, GPU), collate(batch[2:], model.dtype, GPU)]
    counted = 0
    for step in range(3):
        if step == 2:
            replica.optimizer.load_state(replica.optimizer.state())
        waits.clear()
        result = train_step(
            model, replica.optimizer, micro_batches, make_cross_entropy_loss(counts_of(batch), "train"), 1e-3, guard=guard, sums=replica.sums,
            forward_backward=replica.forward_backward,
        )  # fmt: skip
        counted = len(waits)
        assert result.updated
    replica.infer(micro_batches)
    replica.reshard()
    if is_pod:
        pod_step(replica, trainer)
    moments = sorted({x.device.type for x in replica.optimizer.state().moments.values()})
    weights = sorted({p.device.type for p in model.parameters()})
    return {"waits": counted, "weights": weights, "moments": moments}


def main(names: list[str]) -> Iterator[dict[str, Any]]:
    stand_in()
    for name in names:
        try:
            with FakeTensorMode(allow_non_fake_inputs=False), OneDevice():
                yield {"case": name, **run(CASES[name])}
        except Exception as error:
            import traceback

            traceback.print_exc()
            yield {"case": name, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    for found in main(sys.argv[1:] or list(CASES)):
        print(json.dumps(found), flush=True)
