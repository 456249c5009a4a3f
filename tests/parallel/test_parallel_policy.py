"""GRPO on the ranks of any mesh takes the updates of one process, from the same samples and scores."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ranks import LEARNING_RATE, LLAMA, QWEN3, QWEN3_MOE, Case, distance
from policy_ranks import EACH_ONE, Policy, by_one_process, gather_shards, train_policy
from ranks import Ranks

from tandem.config.algorithm import AlgorithmConfig
from tandem.layout.mesh import MeshShape
from tandem.types.token_entropies import unpack_halves

FULL = pytest.mark.full
pytestmark = pytest.mark.usefixtures("one_thread")
DENSE, UNTIED, MIXTURE = Case(QWEN3), Case(LLAMA), Case(QWEN3_MOE)
WIDE = replace(LLAMA, hidden_size=96, intermediate_size=160)
"""Tensors large enough for moments of 8 bits."""
OPTIMIZERS: tuple[Any, ...] = ("muon", "adamw8bit")


def check(found: list[dict[str, Any]], wanted: dict[str, Any], policy: Policy, close: float = 1e-10) -> None:
    """Raises ``AssertionError`` if a rank's results differ from those of one process, relative to their norm."""
    is_float32 = policy.case.dtype == "float32"
    for rank in found:
        assert rank["tokens"] == wanted["tokens"]
        assert distance(dict(enumerate(rank["logprobs"])), dict(enumerate(wanted["logprobs"]))) < (1e-6 if is_float32 else close)
        assert rank["metrics"] == found[0]["metrics"], "all ranks write the same row"
        for mine, its in zip(rank["metrics"], wanted["metrics"], strict=True):
            assert mine == pytest.approx(its, rel=1e-4 if is_float32 else 1e-9, abs=1e-6 if is_float32 else 1e-11)
        assert all(wanted["biases"][layer] == bias for layer, bias in rank["biases"].items())
        assert rank is found[0] or not any(rank.get("entropies", ())), "the first rank is told"
    # A value model has none.
    for own, alone in zip(found[0].get("entropies", ()), wanted.get("entropies", ()), strict=True):
        assert list(own) == list(alone) != []
        for name, halves in own.items():
            assert unpack_halves(halves) == pytest.approx(unpack_halves(alone[name]), rel=2e-3, nan_ok=True), name
    if "gradients" in found[0]:
        assert distance(gather_shards(found, "gradients", policy), wanted["gradients"]) < (1e-6 if is_float32 else close)
    parameters = gather_shards(found, "parameters", policy)
    if is_float32:
        assert max((parameters[name] - value).abs().max().item() for name, value in wanted["parameters"].items()) < 0.1 * LEARNING_RATE
    else:
        assert distance(parameters, wanted["parameters"]) < close


ROWS = {
    "data 2": (MeshShape(data=2), DENSE),
    "data 2, zero 1": (MeshShape(data=2), replace(DENSE, zero=1)),
    "data 2, zero 3, recompute": (MeshShape(data=2), replace(DENSE, zero=3, recompute="full")),
    "tensor 2": (MeshShape(tensor=2), replace(UNTIED, sequence=True)),
    "pipeline 2, tied": (MeshShape(pipeline=2), DENSE),
    "context 2": (MeshShape(context=2), DENSE),
    "data 2, expert 2, balanced": (MeshShape(data=2, expert=2), replace(MIXTURE, balance_loss=0.05, bias_rate=0.01)),
}
SLOW = {
    "data 2, zero 2": (MeshShape(data=2), replace(DENSE, zero=2)),
    "data 4, zero 3": (MeshShape(data=4), replace(DENSE, zero=3)),
    "tensor 2, deterministic": (MeshShape(tensor=2), replace(DENSE, deterministic=True)),
    "tensor 2, mixture": (MeshShape(tensor=2), replace(MIXTURE, deterministic=True)),
    "context 2, expert 2": (MeshShape(context=2, expert=2), MIXTURE),
    "data 2 x tensor 2, zero 1": (MeshShape(data=2, tensor=2), replace(DENSE, sequence=True, zero=1)),
    "data 2 x tensor 2, zero 3, recompute": (MeshShape(data=2, tensor=2), replace(DENSE, sequence=True, zero=3, recompute="selective")),
    "data 2 x context 2": (MeshShape(data=2, context=2), DENSE),
    "data 2 x pipeline 2": (MeshShape(data=2, pipeline=2), DENSE),
    "data 2 x pipeline 2, zero 3": (MeshShape(data=2, pipeline=2), replace(UNTIED, zero=3)),
    "tensor 2 x pipeline 2": (MeshShape(tensor=2, pipeline=2), replace(UNTIED, sequence=True)),
    "tensor 2 x context 2": (MeshShape(tensor=2, context=2), replace(DENSE, sequence=True)),
    "context 2 x pipeline 2": (MeshShape(context=2, pipeline=2), DENSE),
    "data 2 x tensor 2, expert 2": (MeshShape(data=2, tensor=2, expert=2), replace(MIXTURE, sequence=True)),
    "data 2 x pipeline 2, expert 2, balanced": (MeshShape(data=2, pipeline=2, expert=2), replace(MIXTURE, balance_loss=0.05, bias_rate=0.01)),
    "data 2 x tensor 2 x pipeline 2": (MeshShape(data=2, tensor=2, pipeline=2), replace(DENSE, sequence=True)),
    "data 2 x tensor 2 x context 2, zero 2": (MeshShape(data=2, tensor=2, context=2), replace(DENSE, sequence=True, zero=2)),
}


def policy_of(case: Case) -> Policy:
    """Experts are balanced over the tokens of a pass on all ranks, so one process is comparable if it makes a single pass."""
    return Policy(case, micro_batch_tokens=1000 if case.balance_loss else 40)


def rows(some: dict[str, Any], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*row, id=name, marks=marks) for name, row in some.items()]


@pytest.mark.parametrize(("mesh", "case"), rows(ROWS) + rows(SLOW, FULL))
def test_ranks_take_the_updates_of_one_process(ranks: Ranks, mesh: MeshShape, case: Case) -> None:
    """Two minibatches, masked samples, and ranks with unequal numbers of sequences."""
    policy = policy_of(case)
    policy = replace(policy, algorithm=replace(policy.algorithm, minibatches=2))
    check(ranks.run(mesh, train_policy, policy), by_one_process(policy), policy)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "case"), rows(ROWS) + rows(SLOW))
def test_weights_after_ten_steps_are_those_of_one_process(ranks: Ranks, mesh: MeshShape, case: Case) -> None:
    policy = policy_of(replace(case, steps=10))
    check(ranks.run(mesh, train_policy, policy), by_one_process(policy), policy)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "case"), rows(ROWS) + rows(SLOW))
def test_gradients_in_fp32_are_within_a_millionth_of_their_norm(ranks: Ranks, mesh: MeshShape, case: Case) -> None:
    """The weights are as large as a real model's: with larger ones fp32 in one process differs more from its own float64."""
    policy = replace(policy_of(replace(case, dtype="float32", kernels="cpu", steps=1)), deviation=0.05)
    check(ranks.run(mesh, train_policy, policy), by_one_process(policy), policy)


VARIANTS = {
    "recomputed": AlgorithmConfig(old_logprobs="recompute", minibatches=2, epochs=2, kl_coef=0.1),
    "gspo": AlgorithmConfig(importance_level="sequence", loss_agg_mode="seq-mean-token-mean", dual_clip=3.0),
    "dr_grpo": AlgorithmConfig(name="dr_grpo", loss_agg_mode="seq-mean-token-sum-norm", kl_coef=0.1, kl_estimator="k3+"),
    "rloo": AlgorithmConfig(name="rloo", loss_agg_mode="seq-mean-token-sum", tis_cap=2.0, tis_level="sequence"),
    "online dpo": AlgorithmConfig(name="online_dpo", minibatches=2),
    "cispo": AlgorithmConfig(policy_loss="cispo", minibatches=2),
    "mirror descent": AlgorithmConfig(
        name="dr_grpo", policy_loss="mirror_descent", loss_agg_mode="seq-mean-token-sum", old_logprobs="recompute", epochs=2
    ),
    "reinforce++": AlgorithmConfig(name="reinforce_plus_plus", kl_coef=0.1, kl_in_reward=True, kl_estimator="k1"),
}


@pytest.mark.parametrize("mesh", [MeshShape(data=2), pytest.param(MeshShape(pipeline=2, data=2), marks=FULL)], ids=["data", "pipeline"])
@pytest.mark.parametrize("name", [name if name == "recomputed" else pytest.param(name, marks=FULL) for name in VARIANTS])
def test_variants_of_the_loss_are_those_of_one_process(ranks: Ranks, mesh: MeshShape, name: str) -> None:
    policy = Policy(DENSE, algorithm=VARIANTS[name])
    check(ranks.run(mesh, train_policy, policy), by_one_process(policy), policy)


REPLAYED = {
    "context 2": (MeshShape(context=2), MIXTURE),
    "data 2 x pipeline 2, expert 2": (MeshShape(data=2, pipeline=2, expert=2), MIXTURE),
    "tensor 2, recompute": (MeshShape(tensor=2), replace(MIXTURE, sequence=True, recompute="full")),
    "context 2 x tensor 2, expert 2": (MeshShape(context=2, tensor=2, expert=2), replace(MIXTURE, sequence=True)),
    "data 2, zero 3, balanced": (MeshShape(data=2), replace(MIXTURE, zero=3, balance_loss=0.05)),
}


@pytest.mark.parametrize(("mesh", "case"), [*rows(dict(list(REPLAYED.items())[:1])), *rows(dict(list(REPLAYED.items())[1:]), FULL)])
def test_a_recorded_routing_is_replayed_on_ranks_as_in_one_process(ranks: Ranks, mesh: MeshShape, case: Case) -> None:
    policy = replace(policy_of(case), routed=True)
    policy = replace(policy, algorithm=replace(policy.algorithm, old_logprobs="recompute"))
    wanted = by_one_process(policy)
    check(ranks.run(mesh, train_policy, policy), wanted, policy)
    chosen = by_one_process(replace(policy, routed=False))
    assert wanted["metrics"][0]["actor/grad_norm"] != pytest.approx(chosen["metrics"][0]["actor/grad_norm"], rel=1e-3), "the routers chose"


@pytest.mark.full
@pytest.mark.parametrize("schedule", [("gpipe", 1), ("interleaved", 2)], ids=lambda schedule: schedule[0])
def test_every_schedule_of_a_pipeline_takes_the_updates_of_one_process(ranks: Ranks, schedule: Any) -> None:
    policy = Policy(Case(replace(LLAMA, num_hidden_layers=4)), schedule=schedule)
    check(ranks.run(MeshShape(pipeline=2), train_policy, policy), by_one_process(policy), policy)


def test_ranks_without_a_sequence_and_batches_without_one_take_part(ranks: Ranks) -> None:
    """Four ranks share the two sequences that count, and no rank has one if every sample is masked."""
    algorithm = AlgorithmConfig(kl_coef=0.1)
    for faults in ((2,), (0, 1)):
        policy = Policy(replace(DENSE, zero=3, steps=2), algorithm, counts=(3,), faults=faults)
        found = ranks.run(MeshShape(data=4), train_policy, policy)
        if faults == (2,):
            check(found, by_one_process(policy), policy)
        else:
            wanted = by_one_process(policy)
            assert all(rank["metrics"] == found[0]["metrics"] and rank["tokens"] == [0, 0] for rank in found)
            assert found[0]["metrics"] == [pytest.approx(row, rel=1e-9) for row in wanted["metrics"]]
            assert all(torch.equal(value, wanted["parameters"][name]) for name, value in gather_shards(found, "parameters", policy).items())


@pytest.mark.parametrize("zero", [0, 3, *(pytest.param(zero, marks=FULL) for zero in (1, 2))])
def test_data_ranks_and_every_stage_of_zero_have_the_bits_of_one_process(ranks: Ranks, zero: Any) -> None:
    policy = replace(EACH_ONE, case=replace(EACH_ONE.case, zero=zero))
    same_bits(ranks.run(MeshShape(data=2), train_policy, policy), by_one_process(policy), policy)


@pytest.mark.parametrize("schedule", [("1f1b", 1), pytest.param(("gpipe", 1), marks=FULL)], ids=lambda schedule: schedule[0])
def test_stages_of_an_untied_model_have_the_bits_of_one_process(ranks: Ranks, schedule: Any) -> None:
    policy = Policy(Case(LLAMA, "float32", "cpu"), max_grad_norm=0.0, schedule=schedule)
    same_bits(ranks.run(MeshShape(pipeline=2), train_policy, policy), by_one_process(policy), policy)


def same_bits(found: list[dict[str, Any]], wanted: dict[str, Any], policy: Policy) -> None:
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(rank["logprobs"], wanted["logprobs"], strict=True))
    for kind in ("gradients", "parameters"):
        assert all(torch.equal(value, wanted[kind][name]) for name, value in gather_shards(found, kind, policy).items()), kind


@pytest.mark.parametrize("mesh", [MeshShape(tensor=2), pytest.param(MeshShape(tensor=2, context=2), marks=FULL)], ids=["tensor", "context"])
def test_deterministic_tensor_ranks_infer_the_bits_of_one_process(ranks: Ranks, mesh: MeshShape) -> None:
    policy = Policy(Case(LLAMA, "float32", "cpu", deterministic=True, steps=1))
    found, wanted = ranks.run(mesh, train_policy, policy), by_one_process(policy)
    check(found, wanted, policy)
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(rank["logprobs"], wanted["logprobs"], strict=True))
        assert rank["metrics"][0]["mismatch_kl"] == pytest.approx(wanted["metrics"][0]["mismatch_kl"], rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", [MeshShape(data=2), MeshShape(tensor=2), MeshShape(pipeline=2)], ids=["data", "tensor", "pipeline"])
def test_other_optimizers_take_the_updates_of_one_process(ranks: Ranks, mesh: MeshShape, optimizer: Any) -> None:
    policy = Policy(Case(WIDE, optimizer=optimizer, zero=1 if mesh.data > 1 else 0))
    found, wanted = ranks.run(mesh, train_policy, policy), by_one_process(policy)
    if optimizer == "adamw8bit" and mesh.data == 1 and mesh.tensor > 1:
        # The blocks of a sharded tensor differ, and so do their scales.
        assert distance(gather_shards(found, "gradients", policy), wanted["gradients"]) < 1e-10
    else:
        check(found, wanted, policy)


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [(MeshShape(data=2), 3), pytest.param(MeshShape(data=2, pipeline=2), 3, marks=FULL), pytest.param(MeshShape(data=2, tensor=2), 1, marks=FULL)],
    ids=["zero 3", "pipeline", "tensor"],
)
def test_what_is_offloaded_changes_no_bit(ranks: Ranks, mesh: MeshShape, zero: Any, tmp_path: Path) -> None:
    kept = Policy(Case(LLAMA, "float32", "cpu", zero=zero), algorithm=VARIANTS["recomputed"])
    moved = replace(kept, offloaded=("offload", "offload_activations", *(["offload_parameters"] if zero == 3 else [])))
    for rank, other in zip(ranks.run(mesh, train_policy, moved, tmp_path), ranks.run(mesh, train_policy, kept), strict=True):
        assert rank["metrics"] == other["metrics"]
        assert all(torch.equal(value, other["parameters"][name]) for name, value in rank["parameters"].items())


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_one_process_up_to_rounding(ranks: Ranks, precision: Any) -> None:
    policy = Policy(Case(LLAMA, "float32", "cpu", steps=1), precision=precision)
    found, wanted = ranks.run(MeshShape(data=2), train_policy, policy), by_one_process(policy)
    assert distance(gather_shards(found, "gradients", policy), wanted["gradients"]) < 1e-6


@pytest.mark.parametrize("mesh", [MeshShape(data=2), MeshShape(pipeline=2)], ids=["data", "pipeline"])
@pytest.mark.parametrize("mode", ["rollout", "recompute"])
def test_the_mismatch_is_that_of_all_ranks(ranks: Ranks, mesh: MeshShape, mode: Any) -> None:
    """The records are random. The mismatch covers every sampled token, including masked samples and the last minibatch, and is compared
    with one process."""
    policy = Policy(replace(DENSE, steps=1), AlgorithmConfig(old_logprobs=mode, minibatches=2))
    (wanted,) = by_one_process(policy)["metrics"]
    assert wanted["mismatch_max_abs"] > 0.5
    for rank in ranks.run(mesh, train_policy, policy):
        for name in ("mismatch_kl", "mismatch_max_abs"):
            assert rank["metrics"][0][name] == pytest.approx(wanted[name], rel=1e-12)
