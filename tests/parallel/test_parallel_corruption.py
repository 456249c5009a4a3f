"""Silent data corruption on any mesh: micro-batches that are computed twice change no bit, and a flipped bit of one rank is found and named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ranks import LLAMA, QWEN3, QWEN3_MOE, Case
from pipeline_ranks import named
from policy_ranks import Policy, replica_of, scored_samples
from ranks import RankContext, Ranks

from tandem.layout.mesh import MeshShape
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.corruption.check import corruption_check
from tandem.trainer.corruption.finding import CorruptionFinding, SilentCorruption
from tandem.trainer.corruption.injected_flips import inject_flips
from tandem.trainer.grad_scaler import GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")
DENSE, UNTIED, MIXTURE = Case(QWEN3, "float32", steps=2), Case(LLAMA, "float32", steps=2), Case(QWEN3_MOE, "float32", steps=2)
FLIPPED_STEP = 1


class Flips:
    """Flips a bit of the gradient of ``rank`` in backward pass ``at`` of ``FLIPPED_STEP``, and with ``for_ever`` in all later ones. ``passes``: those of the
    step so far."""

    def __init__(self, here: RankContext, rank: int, at: int, for_ever: bool) -> None:
        self.is_mine, self.at, self.for_ever, self.step, self.passes = here.mesh.rank == rank, at, for_ever, 0, 0

    def now(self, place: str) -> bool:
        if place != "gradient" or self.step != FLIPPED_STEP:
            return False
        self.passes += 1
        return self.is_mine and (self.passes > self.at if self.for_ever else self.passes == self.at + 1)


def train(
    here: RankContext, policy: Policy, rate: float, folder: Path | None = None, rank: int = -1, at: int = 0, for_ever: bool = False
) -> dict[str, Any]:
    """Trains ``policy`` with a check at ``rate``, up to a finding. Returns this rank's ``parameters``, how many micro-batches were ``compared``, the
    backward ``passes`` of the flipped step, and the ``finding``."""
    torch.set_num_threads(1)
    replica, _ = replica_of(policy, here, folder)
    algorithm, guard = replace(policy.algorithm, kl_coef=0.0), GradScaler(policy.trainer)
    check, flips = corruption_check(replica, rate, seed=5), Flips(here, rank, at, for_ever)
    inject_flips(replica.model, flips)  # type: ignore[arg-type]
    found: dict[str, Any] = {"compared": 0, "finding": None, "metrics": []}
    for step in range(policy.case.steps):
        flips.step = step
        samples, scores = scored_samples(policy, step)
        if check is not None:
            check.begin_step(step)
        try:
            batch = make_batch(step, samples, scores, algorithm, 14)
            result = update_policy(replica, batch, algorithm, policy.trainer, guard=guard, check=check)
        except SilentCorruption as corruption:
            found["finding"] = corruption.finding
            break
        found["metrics"].append(result.metrics)
        found["compared"] += 0 if check is None else check.take_compared()
    with replica.whole():
        found["parameters"] = named(replica.model, list(replica.model.parameters()))
    return found | {"passes": flips.passes}


def find(ranks: Ranks, shape: MeshShape, policy: Policy, *arguments: Any, folder: Path | None = None) -> CorruptionFinding:
    """Returns the finding of a run with a flip, which is the same on every rank."""
    findings = [each["finding"] for each in ranks.run(shape, train, policy, 1.0, folder, *arguments)]
    assert findings[0] is not None and all(finding == findings[0] for finding in findings)
    found: CorruptionFinding = findings[0]
    return found


def check_mesh(ranks: Ranks, shape: MeshShape, case: Case, folder: Path | None = None, **policy_fields: Any) -> None:
    policy = Policy(case, **policy_fields)
    without = ranks.run(shape, train, policy, 0.0, folder)
    checked = ranks.run(shape, train, policy, 1.0, folder)
    for one, other in zip(without, checked, strict=True):
        assert other["finding"] is None and other["compared"] >= 4 and one["compared"] == 0 and one["metrics"] == other["metrics"]
        assert all(torch.equal(value, other["parameters"][name]) for name, value in one["parameters"].items())
    wrong = shape.world - 1
    for at in (0, checked[wrong]["passes"] - 1):
        finding = find(ranks, shape, policy, wrong, at, folder=folder)
        assert wrong in finding.ranks and finding.step == FLIPPED_STEP and not finding.is_persistent and not finding.is_undecided
        # Of other ranks, those alone that compute with the wrong one's results.
        assert shape.tensor * shape.pipeline * shape.context > 1 or finding.ranks == (wrong,)


def test_two_ranks_name_the_one_that_flips_a_bit(ranks: Ranks) -> None:
    finding = find(ranks, MeshShape(data=2), Policy(DENSE, micro_batch_tokens=1000), 1, 0)
    assert finding.ranks == (1,) and finding.step == FLIPPED_STEP and not finding.is_persistent


MESHES = {
    "data 2, zero 1": (MeshShape(data=2), replace(DENSE, zero=1)),
    "data 2, plain": (MeshShape(data=2), DENSE),
    "data 2, zero 2": (MeshShape(data=2), replace(DENSE, zero=2)),
    "data 2, zero 3, recompute": (MeshShape(data=2), replace(DENSE, zero=3, recompute="full")),
    "data 3": (MeshShape(data=3), UNTIED),
    "data 2 x tensor 2, zero 1": (MeshShape(data=2, tensor=2), replace(DENSE, sequence=True, zero=1)),
    "data 2 x pipeline 2": (MeshShape(data=2, pipeline=2), DENSE),
    "data 2 x pipeline 2, zero 3": (MeshShape(data=2, pipeline=2), replace(UNTIED, zero=3)),
    "data 2 x context 2": (MeshShape(data=2, context=2), DENSE),
    "data 4, expert 2, balanced": (MeshShape(data=4, expert=2), replace(MIXTURE, balance_loss=0.05, bias_rate=0.01)),
}


@pytest.mark.full
@pytest.mark.parametrize(("shape", "case"), [pytest.param(*row, id=name) for name, row in MESHES.items()])
def test_every_mesh_trains_with_the_same_bits_and_names_the_rank_that_flips_one(shape: MeshShape, case: Case, ranks: Ranks) -> None:
    check_mesh(ranks, shape, case)


@pytest.mark.full
def test_interleaved_stages_do(ranks: Ranks) -> None:
    check_mesh(ranks, MeshShape(data=2, pipeline=2), replace(UNTIED, shapes=replace(LLAMA, num_hidden_layers=4)), schedule=("interleaved", 2))


@pytest.mark.full
def test_moments_in_a_file_do(ranks: Ranks, tmp_path: Path) -> None:
    check_mesh(ranks, MeshShape(data=2), replace(DENSE, zero=3), tmp_path, offloaded=("offload", "offload_parameters", "offload_activations"))


@pytest.mark.full
def test_of_three_ranks_the_one_that_is_always_wrong_is_named_and_of_two_both_are_suspects(ranks: Ranks) -> None:
    policy = Policy(DENSE)
    of_three = find(ranks, MeshShape(data=3), policy, 1, 0, True)
    assert of_three.ranks == (1,) and of_three.is_persistent and not of_three.is_undecided
    of_two = find(ranks, MeshShape(data=2), policy, 1, 0, True)
    assert of_two.ranks == (0, 1) and of_two.is_persistent and of_two.is_undecided
