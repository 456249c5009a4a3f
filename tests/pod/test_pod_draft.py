"""A draft head that is trained while the policy moves: it changes no bit of the policy, drafts better than one that stays, and is part of the run's state."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pod_runs import RECIPE, PodRun, difference
from safetensors.torch import load_file

from tandem.config.load import apply_overrides, read_yaml
from tandem.config.recipe import Recipe, recipe_of
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import eagle3_shapes
from tandem.layout.shapes import ModelShapes
from tandem.model.create_model import create_model
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import initialise_eagle3, save_eagle3
from tandem.model.huggingface.model_config import read_shapes
from tandem.types import UserError

DRAFT = "--draft={learning_rate: 0.01, draft_steps: 3}"


def drafting(head: Path) -> str:
    return f"--rollout.engine.speculative_config={{method: eagle3, model: {head}, num_speculative_tokens: 3, disable_by_batch_size: 64, adaptive: false}}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelShapes:
    """The shapes of the model of the tiny recipe."""
    folder = tmp_path_factory.mktemp("model")
    recipe = recipe_of(read_yaml(RECIPE))
    assert isinstance(recipe, Recipe) and recipe.model.create is not None
    create_model(recipe.model.create, 0, folder / "model")
    return read_shapes(folder / "model")


@pytest.fixture(scope="module")
def head(model: ModelShapes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights for this model."""
    made = Eagle3Head(eagle3_shapes(model, model.vocab_size), ReferenceKernels())
    initialise_eagle3(made, 0)
    save_eagle3(made, folder := tmp_path_factory.mktemp("head") / "head")
    return folder


def policy(run: PodRun) -> tuple[list[dict[str, Any]], list[Any], dict[str, bytes]]:
    """Returns what a run says of its policy: its rows, its evaluations and the trained model."""
    rows = [{name: value for name, value in row.items() if not name.startswith("draft/")} for row in run.rows()]
    return rows, run.evaluations(), {name: content for name, content in run.results().items() if name.startswith("model/")}


@pytest.fixture(scope="module")
def undisturbed(head: Path, tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("undisturbed"))
    done = run.train(drafting(head), DRAFT)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.full
def test_the_policy_has_the_bits_of_a_run_without_speculation(undisturbed: PodRun, head: Path, tmp_path: Path) -> None:
    plain = PodRun(tmp_path)
    assert plain.train().returncode == 0
    assert policy(plain) == policy(undisturbed)
    rows = undisturbed.rows()
    assert len({row["draft/loss"] for row in rows}) == len(rows) == 6
    assert all(row["draft/grad_norm"] > 0 and {f"draft/acceptance/{place}" for place in range(3)} <= row.keys() for row in rows)
    began, ended = (load_file(folder / "model.safetensors") for folder in (head, undisturbed.directory / "draft"))
    assert began.keys() == ended.keys() and all(not began[name].equal(ended[name]) for name in began)


@pytest.mark.full
def test_copied_weights_and_one_step_off_draw_with_the_trained_head_too(head: Path, undisturbed: PodRun, tmp_path: Path) -> None:
    copied = PodRun(tmp_path / "copied")
    assert copied.train(drafting(head), DRAFT, "--rollout.weights=copied", "--rollout.workers=2", "--machine.threads=2").returncode == 0
    assert difference(copied, undisturbed) == []
    ahead = [PodRun(tmp_path / "ahead", name=name) for name in ("plain", "trained")]
    for run, options in zip(ahead, ((), (drafting(head), DRAFT)), strict=True):
        done = run.train("--rollout.max_staleness=1", "--algorithm.tis_cap=2.0", *options)
        assert done.returncode == 0, done.stderr
    assert policy(ahead[0]) == policy(ahead[1])


@pytest.mark.full
@pytest.mark.parametrize("fault", ["trainer_worker:after:train:3", "pod:after:commit_scores:5", "rollout_worker:after:update_weight:4"])
def test_a_killed_run_has_the_bits_of_an_undisturbed_one_in_policy_head_and_checkpoints(fault: str, undisturbed: PodRun, head: Path, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--fault", fault, drafting(head), DRAFT)
    if fault.startswith("pod:"):
        assert done.returncode == -9, done.stdout + done.stderr
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((run.directory / "faults").iterdir())) == 1
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    assert any(name.startswith("draft/") for name in run.results())


@pytest.mark.full
def test_a_damaged_head_is_refused_before_the_first_step_and_before_a_resume(head: Path, undisturbed: PodRun, tmp_path: Path) -> None:
    own = tmp_path / "head"
    shutil.copytree(head, own)
    content = (own / "model.safetensors").read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    (own / "model.safetensors").write_bytes(flipped)
    refused = PodRun(tmp_path / "begun").train(drafting(own), DRAFT)
    assert refused.returncode == 1 and "does not have" in refused.stderr and "it belongs to the draft head" in refused.stderr, refused.stderr
    (own / "model.safetensors").write_bytes(content)
    run = PodRun(tmp_path / "stopped")
    assert run.train(drafting(own), DRAFT, "--run.max_steps=2").returncode == 0
    (own / "model.safetensors").write_bytes(flipped)
    refused = run.resume("--run.max_steps=6")
    assert refused.returncode == 1 and "it belongs to the draft head" in refused.stderr, refused.stderr
    (own / "model.safetensors").write_bytes(content)
    assert run.resume("--run.max_steps=6").returncode == 0
    assert load_file(run.directory / "draft" / "model.safetensors").keys() == load_file(head / "model.safetensors").keys()


@pytest.mark.full
def test_a_head_with_a_part_of_the_vocabulary_and_an_embedding_of_its_own_keeps_both(model: ModelShapes, tmp_path: Path) -> None:
    made = Eagle3Head(replace(eagle3_shapes(model, model.vocab_size - 5), own_embedding=True), ReferenceKernels())
    initialise_eagle3(made, 0)
    made.target_ids = torch.arange(5, model.vocab_size)
    save_eagle3(made, tmp_path / "head")
    run = PodRun(tmp_path)
    done = run.train(drafting(tmp_path / "head"), DRAFT, "--run.max_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    began, ended = (load_file(folder / "model.safetensors") for folder in (tmp_path / "head", run.directory / "draft"))
    kept = {"d2t", "t2d", "embed_tokens.weight"}
    assert began.keys() == ended.keys() and {name for name in began if began[name].equal(ended[name])} == kept


@pytest.mark.full
def test_data_parallel_ranks_train_the_same_head_with_zero_and_after_a_kill_of_one(head: Path, tmp_path: Path) -> None:
    mesh = ("--parallel.data=2", "--machine.threads=2", "--run.max_steps=4")
    plain, quiet, killed = (PodRun(tmp_path, name=name) for name in ("plain", "quiet", "killed"))
    fault = ("--fault", "trainer_rank1:after:train:2", "--parallel.zero=2")
    for run, options in ((plain, ()), (quiet, (drafting(head), DRAFT)), (killed, (drafting(head), DRAFT, *fault))):
        done = run.train(*mesh, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (killed.directory / "faults").iterdir()] == ["trainer_rank1-after-train-2"]
    assert policy(plain) == policy(quiet) == policy(killed)
    assert quiet.rows() == killed.rows() and len({row["draft/loss"] for row in quiet.rows()}) == 4
    heads = [{name: content for name, content in run.results().items() if name.startswith("draft/")} for run in (quiet, killed)]
    assert heads[0] == heads[1] and heads[0]


@pytest.mark.full
@pytest.mark.parametrize(("settings", "holder"), [
    (("--parallel.tensor=2", "--model.create.num_key_value_heads=2"), "trainer_worker"), (("--parallel.pipeline=2",), "trainer_rank1"),
], ids=["tensor", "pipeline"])  # fmt: skip
def test_ranks_that_divide_the_policy_train_the_head_and_change_no_bit_of_it_after_a_kill_of_the_one_that_has_it(
    settings: tuple[str, ...], holder: str, head: Path, undisturbed: PodRun, tmp_path: Path
) -> None:
    mesh = (*settings, "--machine.threads=2", "--run.max_steps=4")
    plain, killed = (PodRun(tmp_path, name=name) for name in ("plain", "killed"))
    for run, options in ((plain, ()), (killed, (drafting(head), DRAFT, "--fault", f"{holder}:after:train:2"))):
        done = run.train(*mesh, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (killed.directory / "faults").iterdir()] == [f"{holder}-after-train-2"]
    assert policy(plain) == policy(killed)
    ours, theirs = killed.rows(), undisturbed.rows()
    assert len({row["draft/loss"] for row in ours}) == 4
    if len(settings) == 1:
        # The same model: that of one process needs no second head of keys and values.
        for name in ("draft/loss", "draft/grad_norm", "draft/acceptance/0"):
            assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-4)
    began, ended = (load_file(folder / "model.safetensors") for folder in (head, killed.directory / "draft"))
    assert began.keys() == ended.keys() and all(not began[name].equal(ended[name]) for name in began)


def write(path: Path, sections: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.mark.full
def test_a_head_that_is_trained_follows_a_policy_that_moves_and_one_that_stays_does_not(tmp_path: Path) -> None:
    (tmp_path / "sixes.py").write_text(
        "def sixes(completions, **_):\n    return [min(text.count('6'), 12) / 12 for text in completions]\n", encoding="utf-8"
    )
    sections = yaml.safe_load(RECIPE.read_text())
    sections["rewards"] = {"functions": [{"function": f"{tmp_path / 'sixes.py'}:sixes"}]}
    sections["task"] |= {"min_digits": 6, "max_digits": 8}
    sections["algorithm"]["kl_coef"] = 0.0
    sections["evaluation"] = {"every_steps": 100, "prompts": 8, "final_prompts": 8}

    def trained(name: str, recipe: dict[str, Any]) -> PodRun:
        run = PodRun(tmp_path, write(tmp_path / f"{name}.yaml", recipe), name)
        done = run.train()
        assert done.returncode == 0, done.stdout + done.stderr
        return run

    # A policy that sorts digits, and a head that drafts what it says.
    start = trained("start", sections | {
        "sft": sections["sft"] | {"steps": 150, "corrupted_share": 0.0}, "rollout": {"prompts_per_step": 24, "max_tokens": 16},
        "run": {"max_steps": 1}, "trainer": {"learning_rate": 1.0e-9},
    })  # fmt: skip
    model = {"path": str(start.directory / "model")}
    draft = trained("head", {
        "algorithm": {"name": "draft", "draft_steps": 3}, "model": model, "machine": {"threads": 1}, "run": {"max_steps": 80, "seed": 3},
        "data": {"train": [], "rollouts": [str(start.directory)], "sequence_length": 48, "global_batch_size": 24},
        "trainer": {"learning_rate": 5.0e-3, "warmup_steps": 2, "weight_decay": 0.0, "micro_batch_tokens": 1024, "schedule": "cosine"},
    })  # fmt: skip
    # It then learns to write one digit.
    del sections["sft"]
    sections |= {"model": model, "run": {"max_steps": 14}, "trainer": {"learning_rate": 0.01, "warmup_steps": 1, "micro_batch_tokens": 1024}}
    sections["rollout"] = {"prompts_per_step": 6, "max_tokens": 16, "engine": {"speculative_config": {
        "method": "eagle3", "model": str(draft.directory / "model"), "num_speculative_tokens": 3, "disable_by_batch_size": 64, "adaptive": False,
    }}}  # fmt: skip
    runs = [trained("fixed", sections), trained("moved", sections | {"draft": {"learning_rate": 5.0e-3, "draft_steps": 3}})]
    assert policy(runs[0])[:2] == policy(runs[1])[:2]
    rates = [[json.loads(line)["perf/spec_accept_rate"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()] for run in runs]
    # The first step drafts with the same head.
    assert rates[0][0] == rates[1][0] > 0.1
    fixed, moved = (sum(own[-4:]) / 4 for own in rates)
    assert fixed < 0.1 < 0.6 < moved, rates


REFUSED = {
    "rollout.engine.speculative_config=null": "'rollout.engine.speculative_config' is not given",
    "rollout.engine.speculative_config={method: suffix}": "has method 'suffix'; set it to {method: eagle3, model: FOLDER}",
    "parallel.context=2": "'parallel.context' is 2 and section 'draft' is given, whose head is trained on whole sequences; set it to 1",
    "parallel={data: 2, zero: 3}": "'parallel.zero' is 3 and section 'draft' is given, whose head reads whole weights of the policy; set it to 0 or 1 or 2",
    "trainer.lora={rank: 2}": "'trainer.lora' is given",
    "trainer={offload: nvme, offload_parameters: nvme, offload_folder: state}": "'trainer.offload_parameters' is nvme",
    "rollout.backend=vllm": "'rollout.backend' is vllm",
    "trainer.backend=megatron": "'trainer.backend' is megatron",
    "rollout.engine.tensor_parallel_size=2": "'rollout.engine.tensor_parallel_size' is 2",
    "pods.count=2": "'pods.count' is 2",
    "draft.draft_steps=0": "'draft.draft_steps' is 0; it must be from 1 to 16",
    "draft.learning_rate=0": "'draft.learning_rate' is 0",
}


@pytest.mark.parametrize(("override", "said"), REFUSED.items())
def test_what_a_trained_head_cannot_be_combined_with_is_refused_in_one_line(override: str, said: str) -> None:
    given = [drafting(Path("head")).removeprefix("--"), "draft={learning_rate: 0.01}"]
    assert isinstance(recipe_of(apply_overrides(read_yaml(RECIPE), given)), Recipe)
    with pytest.raises(UserError) as refused:
        recipe_of(apply_overrides(read_yaml(RECIPE), [*given, override]))
    assert said in str(refused.value) and "\n" not in str(refused.value)
