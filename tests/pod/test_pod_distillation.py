"""On-policy distillation in a pod: the teacher's log-probabilities are those of transformers, the student comes nearer to it, and the run survives kills, is
replayed and verified, on one process and on meshes."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from pod_runs import RECIPE, PodRun, difference, finish

from tandem.config.load import build, read_yaml
from tandem.config.model import NewModelConfig
from tandem.jobs.checks.check_value_model import check_reference
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_folder import read_shapes
from tandem.model.value_folder import make_value_folder
from tandem.runtime.records.journal import Journal
from tandem.types import UserError

DISTILLATION = ("--algorithm.name=distillation", "--algorithm.kl_coef=0", "--algorithm.group_size=2", "--sft.steps=6", "--run.max_steps=3")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model than the tiny recipe's, with its tokenizer."""
    shape = {"hidden_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = build(NewModelConfig, {**read_yaml(RECIPE)["model"]["create"], **shape}, "model.create")
    folder = tmp_path_factory.mktemp("teacher") / "models" / "wide"
    create_model(config, 11, folder)
    return folder


@pytest.fixture(scope="module")
def distilled(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("distilled"))
    done = run.train(*DISTILLATION, f"--reference.path={teacher}", "--inline")
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_the_kl_to_the_teacher_is_that_of_transformers_on_the_samples_of_the_journal(distilled: PodRun, teacher: Path) -> None:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(teacher)
    assert peer.config.hidden_size == 48 and read_shapes(distilled.directory / "model").hidden_size == 32
    rows = distilled.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 3
    with Journal(distilled.directory / "journal.sqlite", read_only=True) as journal:
        for step, row in enumerate(rows):
            estimates = []
            for sample in journal.samples(step) or ():
                ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
                with torch.no_grad():
                    theirs = peer(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0][len(sample.prompt_token_ids) - 1 :]
                # One update a step, from the weights that drew the samples; k3 of each token.
                estimates += [math.expm1(log_ratio) - log_ratio for log_ratio in (theirs - torch.tensor(sample.logprobs).double()).clamp(-20, 20).tolist()]
            assert row["kl"] == pytest.approx(sum(estimates) / len(estimates), rel=1e-4)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.full
def test_a_damaged_teacher_is_found_by_verify(distilled: PodRun, teacher: Path, tmp_path: Path) -> None:
    run, copied = PodRun(tmp_path), tmp_path / "models" / "wide"
    shutil.copytree(distilled.directory, run.directory)
    weights = teacher / "model.safetensors"
    shutil.copytree(teacher, copied)
    assert finish(run.begin("verify", str(run.directory))).returncode == 0
    try:
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
        found = finish(run.begin("verify", str(run.directory)))
    finally:
        shutil.copy(copied / "model.safetensors", weights)
    assert found.returncode == 1 and "wide" in found.stdout + found.stderr


TWO_HEADS = "--model.create.num_key_value_heads=2"


@pytest.fixture(scope="module")
def alone(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("alone"))
    done = run.train(*DISTILLATION, TWO_HEADS, f"--reference.path={teacher}")
    assert done.returncode == 0, done.stdout + done.stderr
    return run


MESHES = {
    "alone": "",
    "data x tensor, zero 1": "--parallel.data=2 --parallel.tensor=2 --parallel.zero=1",
    "zero 3": "--parallel.data=2 --parallel.zero=3",
    "pipeline": "--parallel.pipeline=2",
    "context": "--parallel.context=2",
    "terminate": "--residents.plan=terminate",
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_mesh_has_the_first_kl_of_one_process_and_a_kill_changes_no_bit(mesh: str, alone: PodRun, teacher: Path, tmp_path: Path) -> None:
    quiet, killed = PodRun(tmp_path / "quiet"), PodRun(tmp_path / "killed")
    fault = "trainer_rank1:after:train:2" if "parallel" in mesh else "trainer_worker:after:train:2"
    settings = (*DISTILLATION, TWO_HEADS, f"--reference.path={teacher}", *mesh.split())
    for run, more in ((quiet, ()), (killed, ("--fault", fault))):
        done = run.train(*settings, *more)
        assert done.returncode == 0, done.stdout + done.stderr
    assert difference(killed, quiet) == [] and len(list((killed.directory / "faults").iterdir())) == 1
    assert [row["mismatch_kl"] for row in quiet.rows()] == [0.0] * 3
    for name in ("kl", "actor/grad_norm"):
        assert quiet.rows()[0][name] == pytest.approx(alone.rows()[0][name], rel=1e-3)
    again = finish(quiet.begin("replay", str(quiet.directory), "--step", "2", "--only", "train"))
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.full
def test_the_student_comes_nearer_to_a_teacher_that_learned_the_task(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    learning = ("--sft.steps=3", "--run.max_steps=40", "--trainer.learning_rate=5e-3", "--evaluation.every_steps=100", "--checkpoint.every_steps=100")
    done = run.train(*DISTILLATION, *learning, f"--reference.path={undisturbed.directory / 'model'}", "--rollout.prompts_per_step=16", "--inline")
    assert done.returncode == 0, done.stdout + done.stderr
    kl = [row["kl"] for row in run.rows()]
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5]), kl


def test_a_teacher_of_another_tokenizer_or_without_a_language_head_is_refused_in_one_line(teacher: Path, tmp_path: Path) -> None:
    shapes = read_shapes(teacher)
    assert check_reference(str(teacher), teacher, shapes, 48).hidden_size == 48
    scorer = make_value_folder(teacher, "token", 0, tmp_path / "models" / "scorer")
    with pytest.raises(UserError, match=r"'reference.path' is .*gives no probabilities of tokens"):
        check_reference(str(scorer), teacher, shapes, 48)
    with pytest.raises(UserError, match=r"'reference.path' is .*reads at most 48 tokens"):
        check_reference(str(teacher), teacher, shapes, 49)
