"""A reference that follows the actor: after each update it has the weights that the formula gives, computed here from exported states; it is state of the
run, which survives kills, is replayed and verified, under every plan of residents and on meshes."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from pod_runs import PodRun
from torch import Tensor

from tandem.model.huggingface.model_folder import read_tensors
from tandem.trainer.checkpoint.format.manifest import read_manifest
from tandem.trainer.checkpoint.format.shard import REFERENCE
from tandem.trainer.checkpoint.read import Contents

COPY = "--reference.update=copy --reference.every_steps=2"
EMA = "--reference.update=ema --reference.mixup_alpha=0.25"
EVERY_STEP = ("--run.max_steps=4", "--sft.steps=6", "--checkpoint.every_steps=1", "--checkpoint.keep=9", "--evaluation.every_steps=10")
RunOf = Callable[..., PodRun]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """A run with these settings and without faults, made once. Its checkpoints of every step are kept."""

    @cache
    def made(settings: str, *arguments: str) -> PodRun:
        run = PodRun(tmp_path_factory.mktemp("reference"))
        done = run.train(*EVERY_STEP, *settings.split(), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return run

    return made


def weights(run: PodRun, step: int, of: str = "") -> dict[str, Tensor]:
    folder = run.directory / "checkpoints" / f"step-{step}"
    contents = Contents(folder, read_manifest(folder)[0], of)
    return {key.name: contents.tensor(key) for key in contents.held if key.state == "weights"}


def start_of(run: PodRun) -> dict[str, Tensor]:
    return dict(read_tensors(run.directory / "sft" / "model"))


def assert_follows(run: PodRun, start: dict[str, Tensor], alpha: float, every: int) -> None:
    """The reference in each checkpoint is the recurrence over the actors of the same checkpoints, in float32."""
    wanted = start
    for step in (1, 2, 3, 4):
        actor = weights(run, step)
        if step % every == 0:
            wanted = {name: actor[name] if alpha == 1 else wanted[name] * (1 - alpha) + actor[name] * alpha for name in wanted}
        found = weights(run, step, REFERENCE)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_the_reference_is_a_mean_of_the_actors_and_each_step_measures_its_kl_to_it(run_of: RunOf) -> None:
    run = run_of(EMA, "--inline")
    assert_follows(run, start_of(run), 0.25, 1)
    folder = run.directory / "checkpoints" / "step-4"
    assert {key.state for key in Contents(folder, read_manifest(folder)[0], REFERENCE).held} == {"weights"}
    assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * 4


def test_a_copied_reference_has_the_actors_bits_so_that_the_kl_is_0_until_the_next_update(run_of: RunOf) -> None:
    run = run_of(COPY, "--inline")
    assert_follows(run, start_of(run), 1.0, 2)
    # One update a step: the KL of step 2 is that of the actor to itself, of step 1 and 3 to the actor one step before.
    kl = [row["kl"] for row in run.rows()]
    assert kl[0] == kl[2] == 0.0 and kl[1] > 0 and kl[3] > 0
