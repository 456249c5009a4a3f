"""Runs ``trained_steps.py`` on the ranks of a mesh, in this environment or in that of a sidecar, and puts their answers together."""

import itertools
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.backends.environment import tandem_path
from tandem.kernels import select
from tandem.layout.expert_shapes import ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.mesh import MeshShape
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.families import qwen2_moe
from tandem.model.huggingface.model_folder import save_model

SCRIPT = Path(__file__).with_name("trained_steps.py")
LIMIT_S = 500
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=32)
QWEN3 = ModelShapes(
    "qwen3", vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    max_position_embeddings=128, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
MODELS = {
    "qwen3": QWEN3,
    "qwen2": ModelShapes("qwen2", 300, 32, 2, 4, 2, 8, 48, 128, False, attention_bias=True),
    "llama": ModelShapes("llama", 41, 32, 2, 4, 2, 16, 48, 128, True, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
    "mistral": ModelShapes("mistral", 41, 32, 2, 4, 2, 16, 48, 128, False, layer_windows=(4, 4)),
    "one_key_head": replace(QWEN3, num_key_value_heads=1),
    "deep": replace(QWEN3, num_hidden_layers=4),
    "dense_first": ModelShapes("qwen3_moe", 41, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, experts=ExpertShapes(4, 2, 24, dense_layers=(0,))),
    "deep_moe": ModelShapes("qwen3_moe", 41, 32, 4, 4, 2, 16, 48, 128, False, qk_norm=True, experts=ExpertShapes(4, 2, 24, dense_layers=(0,))),
    "qwen2_moe": ModelShapes(
        "qwen2_moe", 41, 32, 2, 4, 2, 16, 48, 128, False, attention_bias=True,
        experts=ExpertShapes(4, 2, 24, normalised=False, names=qwen2_moe.NAMES, shared_intermediate_size=40, shared_gate=True),
    ),
    "glm4_moe": ModelShapes(
        "glm4_moe", 41, 32, 2, 4, 2, 16, 48, 128, False, attention_bias=True, qk_norm=True, rotary_fraction=0.5, experts=ExpertShapes(
            4, 2, 24, dense_layers=(0,), shared_intermediate_size=48, sigmoid=SigmoidRouting(scaling=1.7)
        ),
    ),
    "deepseek_v2": ModelShapes(
        "deepseek_v2", 41, 32, 2, 4, 4, 20, 48, 128, False, rotary_interleaved=True, latent=LatentAttention(16, 12, 8, 10), rope_scaling=YARN,
        experts=ExpertShapes(8, 3, 24, False, dense_layers=(0,), shared_intermediate_size=24, softmax=SoftmaxRouting(4, 3, 1.3)),
    ),
    "deepseek_v3": ModelShapes(
        "deepseek_v3", 41, 32, 2, 4, 4, 20, 48, 128, False, rms_norm_eps=1e-4, rotary_interleaved=True, latent=LatentAttention(16, 12, 8, 10, 24),
        rope_scaling=replace(YARN, mscale=0.7, mscale_all_dim=1.3),
        experts=ExpertShapes(8, 4, 24, dense_layers=(0,), shared_intermediate_size=24, sigmoid=SigmoidRouting(4, 2, 1.7)),
    ),
    "smollm3": ModelShapes("smollm3", 41, 32, 4, 4, 2, 16, 48, 128, True, unrotated_layers=(1, 3)),
    "phi3": ModelShapes("phi3", 41, 32, 2, 4, 2, 16, 48, 128, False, rotary_fraction=0.75),
    "qwen3_moe": ModelShapes("qwen3_moe", 41, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, experts=ExpertShapes(4, 2, 24)),
}
MODELS["all_experts"] = replace(MODELS["deepseek_v3"], experts=ExpertShapes(8, 8, 24, shared_intermediate_size=24, sigmoid=SigmoidRouting(4, 4, 1.7)))


class Trained(NamedTuple):
    """What the ranks of a mesh answered: whole weights by name, and the rest of each rank."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    metrics: list[dict[str, float]]
    logprobs: list[list[list[float]]]
    in_flight: list[int]


def make_folder(folder: Path, name: str) -> Path:
    """Writes the model ``name`` of ``MODELS`` with small random weights, so that its distribution is close to uniform."""
    decoder, generator = Decoder(MODELS[name], select("reference")), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.08 * noise)
    save_model(decoder, folder, eos_token_id=2)
    return folder


def train(
    model: Path, folder: Path, backend: str, shape: MeshShape, zero: int = 0, steps: int = 20, save_at: tuple[int, ...] = (), sidecar: Path | None = None,
    trainer: Mapping[str, object] | None = None, parallel: Mapping[str, object] | None = None,
) -> Trained:  # fmt: skip
    """``trainer``, ``parallel``: further settings of these sections.

    ``sidecar``: the interpreter of an environment (``None``: this one). ``folder``: of the run, whose checkpoints it continues from."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / uuid.uuid4().hex
    place.mkdir()
    given: dict[str, Any] = {
        "trainer": dict(trainer or {}), "parallel": {"sequence_parallel": False, **(parallel or {})},
        "model": str(model), "run": str(folder), "backend": backend, "zero": zero, "steps": steps, "save_at": save_at, "rendezvous": str(place / "meet"),
        "shape": {axis: getattr(shape, axis) for axis in ("data", "tensor", "pipeline", "expert")},
    }  # fmt: skip
    path = tandem_path(folder) if sidecar is not None else os.environ.get("PYTHONPATH", str(SCRIPT.parents[2]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [str(sidecar or sys.executable), "-W", "ignore", str(SCRIPT), json.dumps(given | {"rank": rank, "out": str(place / f"{rank}.pt")})],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(shape.world)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
    answers = [torch.load(place / f"{rank}.pt") for rank in range(shape.world)]
    first = answers[0]
    return Trained(_whole(answers, "before"), _whole(answers, "after"), first["metrics"], first["logprobs"], [each["in_flight"] for each in answers])


def _whole(answers: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]] = {}
    for answer in answers:
        for name, start, stop, tensor in answer[key]:
            parts.setdefault(name, []).append((start, stop, tensor))
    whole = {}
    for name, held in parts.items():
        size = [max(stop[axis] for _, stop, _ in held) for axis in range(len(held[0][0]))]
        whole[name] = torch.full(size, float("nan"))
        for start, stop, tensor in held:
            whole[name][tuple(map(slice, start, stop))] = tensor
    return whole


def assert_close(found: Trained, expected: Trained, tolerance: float = 1e-5, of_norms: float | None = None) -> None:
    """``of_norms``: of gradient norms, which are sums over all parameters (``None``: as of all else)."""
    assert len(found.metrics) == len(expected.metrics) > 0
    for step, (own, other) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert own.keys() == other.keys()
        for name, value in other.items():
            allowed = of_norms if of_norms is not None and name == "actor/grad_norm" else tolerance
            assert abs(own[name] - value) <= allowed, (step, name, own[name], value)
    assert all(float((found.after[name] - weight).abs().max()) <= tolerance for name, weight in expected.after.items())
    flat = lambda trained: list(itertools.chain.from_iterable(itertools.chain.from_iterable(trained.logprobs)))
    assert max(abs(a - b) for a, b in zip(flat(found), flat(expected), strict=True)) <= tolerance
