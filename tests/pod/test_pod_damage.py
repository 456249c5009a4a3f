"""Published weights that change in shared memory before the engine has read them are detected, reported and registered again, or the run
ends."""

from pathlib import Path

import pytest
import torch
import yaml
from pod_runs import HERE, RECIPE, PodRun, difference

from tandem.config.model import NewModelConfig
from tandem.config.recipe import Recipe, load_config, recipe_of
from tandem.engine.llm import DUMMY_VERSION
from tandem.jobs.start import train
from tandem.model.create_model import create_model
from tandem.model.weight_digests import packed_tensors
from tandem.pod.rollout_worker import RolloutWorker
from tandem.types import EngineDied, RunError
from tandem.weight_transfer.convert import OwnPart


def run_with_damage(folder: Path, step: int, times: int) -> PodRun:
    """Runs a pod in which a bit of the weights of ``step`` is flipped after each of their first ``times`` registrations."""
    return PodRun(folder, program=(str(HERE / "damaged_memory.py"), str(step), str(times)))


@pytest.mark.full
def test_weights_that_are_damaged_in_shared_memory_are_registered_again_and_the_run_is_the_same(undisturbed: PodRun, tmp_path: Path) -> None:
    run = run_with_damage(tmp_path, step=3, times=1)
    done = run.train()
    assert done.returncode == 0, done.stdout + done.stderr
    (event,) = run.events("weights_damaged")
    assert event.detail["step"] == 3 and event.detail["repair"] == "registering them again"
    assert "was read twice and does not have its digest" in event.detail["what"]
    at_step = [(t.sidecar, t.state) for t in run.transitions() if t.step == 3 and t.state in ("register", "update_weight")]
    once = [("trainer", "register"), ("trainer", "update_weight"), ("rollout", "update_weight")]
    assert at_step == once * 2
    assert difference(run, undisturbed) == []
    assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * 6
    assert run.left_behind() == [] and run.events("recovery") == []


@pytest.mark.parametrize("name", ["layers.1.qkv.data", "embed_tokens"])
def test_an_engine_names_the_tensor_that_has_changed_in_its_memory(name: str, tmp_path: Path) -> None:
    recipe = load_config(RECIPE, ["--rollout.verify_weights_every_steps=1"])
    assert isinstance(recipe, Recipe) and recipe.model.create is not None
    create_model(recipe.model.create, 0, tmp_path / "model")
    (tmp_path / "pod").mkdir()
    worker, quiet = RolloutWorker(recipe, tmp_path), lambda *_: None
    worker.start_engine({"folder": str(tmp_path / "model"), "kernels": "auto"}, {}, quiet)
    worker.update_weight({"version": list(DUMMY_VERSION)}, {}, quiet)
    worker.verify_engine({}, {}, quiet)
    assert worker.llm is not None
    held = dict(packed_tensors(worker.llm.engine.decoder))[name]
    with torch.no_grad():
        held.view(-1).view(torch.int32)[held.numel() // 2] ^= 1
    with pytest.raises(EngineDied, match=f"^tensor '{name}' and 0 more of the engine's rank 0 have changed in its memory since they were updated"):
        worker.verify_engine({}, {}, quiet)
    worker.llm.close()


@pytest.mark.full
def test_a_bit_that_flips_inside_an_engine_is_named_and_the_rollout_is_drawn_again_from_whole_weights(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path, program=(str(HERE / "damaged_memory.py"), "3", "1", "--inside-engine"))
    done = run.train("--rollout.verify_weights_every_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (event,) = run.events("recovery")
    assert (event.detail["role"], event.detail["part"], event.detail["step"]) == ("rollout", "worker", 3)
    assert event.detail["reason"].startswith("tensor 'embed_tokens' and 0 more of the engine's rank 0 have changed in its memory since they were updated to")
    assert difference(run, undisturbed) == [] and run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [("--pods=2",), ("--rollout.workers=2", "--residents.plan=sleep"), ("--rollout.max_staleness=1",)], ids=["pods", "workers", "ahead"]
)
def test_a_bit_that_flips_inside_an_engine_is_found_in_every_kind_of_run(settings: tuple[str, ...], tmp_path: Path) -> None:
    alone, run = PodRun(tmp_path / "alone"), PodRun(tmp_path / "run", program=(str(HERE / "damaged_memory.py"), "3", "1", "--inside-engine"))
    plain = ("--rollout.max_staleness=1", "--algorithm.old_logprobs=rollout") if "--rollout.max_staleness=1" in settings else ()
    done = alone.train(*plain)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run.train("--rollout.verify_weights_every_steps=1", *settings, *plain)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("have changed in its memory since they were updated" in event.detail["reason"] for event in run.events("recovery"))
    assert difference(run, alone) == [] and run.left_behind() == []


@pytest.mark.full
def test_two_workers_that_took_damaged_weights_take_them_again_and_the_run_is_the_same(undisturbed: PodRun, tmp_path: Path) -> None:
    run = run_with_damage(tmp_path, step=3, times=1)
    done = run.train("--rollout.workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (event,) = run.events("weights_damaged")
    assert event.detail["step"] == 3 and event.detail["repair"] == "registering them again"
    assert "does not have its digest" in event.detail["what"] and "was read twice" not in event.detail["what"]
    assert difference(run, undisturbed) == [] and run.left_behind() == [] and run.events("recovery") == []


@pytest.mark.full
def test_weights_that_are_damaged_again_end_the_run_in_one_line_and_it_is_resumed_with_the_same_bits(
    undisturbed: PodRun, tmp_path: Path
) -> None:
    run = run_with_damage(tmp_path, step=3, times=2)
    done = run.train()
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "the weights in shared memory are damaged" in done.stderr
    assert len(run.events("weights_damaged")) == 1 and run.left_behind() == []
    resumed = PodRun(tmp_path).resume()
    assert resumed.returncode == 0, resumed.stderr
    assert difference(run, undisturbed) == []


@pytest.mark.full
def test_a_log_probability_that_rollout_and_trainer_disagree_on_is_an_alarm_that_stops_the_run_or_is_told(tmp_path: Path) -> None:
    run = PodRun(tmp_path, program=(str(HERE / "altered_sample.py"), "3"))
    done = run.train("--run.on_mismatch=stop")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "step 3: mismatch_kl is" in done.stderr and "must be 0" in done.stderr and "--run.on_mismatch=warn" in done.stderr
    rows = [row["mismatch_max_abs"] for row in run.rows()]
    assert rows[:3] == [0.0] * 3 and rows[3] == pytest.approx(2.0**-12, rel=1e-3) and len(rows) == 4
    resumed = PodRun(tmp_path).resume("--run.on_mismatch=warn")
    assert resumed.returncode == 0, resumed.stderr
    assert [event.detail["step"] for event in run.events("mismatch")] == [3, 3]
    assert "step 3: mismatch_kl is" in resumed.stdout and "step 3: mismatch_kl is" in (run.directory / "report.html").read_text()
    assert [row["mismatch_kl"] > 0 for row in run.rows()] == [False] * 3 + [True] + [False] * 2


@pytest.mark.parametrize(
    ("is_stale", "reward"),
    [
        (True, "rewards.py:digits"),
        pytest.param(False, "rewards.py:digits", marks=pytest.mark.full),
        pytest.param(False, "rewards.py:nothing", marks=pytest.mark.full),
    ],
)
def test_a_step_that_does_not_reach_the_published_weights_stops_the_run(
    is_stale: bool, reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer reads every part of its weights once and publishes these values for ever, as a view of memory that has moved would be. Without a gradient
    the weights stay the same and nothing is wrong."""
    own, first = OwnPart.read, dict[str, torch.Tensor]()
    if is_stale:
        monkeypatch.setattr(OwnPart, "read", lambda part: first.setdefault(part.shard.name, own(part).clone()))
    data = yaml.safe_load(RECIPE.read_text())
    create_model(NewModelConfig(**data["model"]["create"], initializer_range=0.3), 0, tmp_path / "model")
    del data["sft"], data["checkpoint"]
    data |= {"model": {"path": str(tmp_path / "model")}, "run": {"directory": str(tmp_path), "name": "run", "max_steps": 2}}
    data["trainer"]["warmup_steps"], data["algorithm"]["kl_coef"] = 0, 0.0
    data["rewards"]["functions"][0]["function"] = f"{HERE}/{reward}"
    data["evaluation"] = {"prompts": 2, "final_prompts": 2}

    def run() -> None:
        train(recipe_of(data), inline=True, progress=False)

    if not is_stale:
        run()
    else:
        with pytest.raises(RunError, match=r"^the weights of step 1 were registered with the digest of those of step 0 \(.*although the trainer took step 0"):
            run()
    registered = {t.step: t.detail["digest"] for t in PodRun(tmp_path).transitions() if t.state == "register" and t.detail}
    assert len(set(registered.values())) == (3 if reward.endswith("digits") and not is_stale else 1), registered
