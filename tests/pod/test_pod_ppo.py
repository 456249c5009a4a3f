"""PPO with a reward model in a pod: actor and critic are one state, which survives kills, is replayed and verified, on one process and on meshes; the
scores of the reward model are those of transformers."""

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from pod_runs import PodRun, difference, finish
from reward_models import write_reward_model

from tandem.config.recipe import Recipe
from tandem.jobs.checks.check_value_model import check_value_model
from tandem.jobs.prepare import read_recipe
from tandem.kernels import select
from tandem.model.huggingface.model_folder import load_model, read_shapes, read_tensors
from tandem.model.value_folder import make_value_folder
from tandem.pod.rl_models import rl_models
from tandem.runtime.records.journal import Journal
from tandem.text.characters import make_character_tokenizer
from tandem.trainer.checkpoint.format.manifest import read_manifest
from tandem.trainer.checkpoint.format.shard import CRITIC
from tandem.trainer.checkpoint.read import Contents
from tandem.types import UserError

PPO = (
    "--algorithm.name=ppo", "--algorithm.gae_lambda=0.9", "--algorithm.minibatches=2", "--critic.warmup_steps=2", "--critic.learning_rate=3e-3",
    "--run.max_steps=4", "--sft.steps=6", "--algorithm.kl_in_reward=true", "--algorithm.kl_estimator=k1",
)  # fmt: skip


WEIGHT = 0.5


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def settings(reward_model: Path) -> tuple[str, ...]:
    return (*PPO, f"--reward_model.path={reward_model}", f"--reward_model.weight={WEIGHT}")


@pytest.fixture(scope="module")
def ppo(settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("ppo"))
    done = run.train(*settings, "--inline")
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_the_critic_learns_alone_at_first_and_the_rollout_has_the_bits_of_the_actor(ppo: PodRun) -> None:
    rows = ppo.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 4
    assert [row["actor/grad_norm"] > 0 for row in rows] == [False, False, True, True]
    assert all(row["critic/grad_norm"] > 0 and row["critic/lr"] == 3e-3 for row in rows)
    names = [f"critic/{kind}/{of}" for kind in ("values", "returns", "advantages") for of in ("mean", "max", "min")]
    assert all(name in row for row in rows for name in (*names, "critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var"))
    assert len({row["critic/values/mean"] for row in rows}) == 4, "the critic changes in every step"


@pytest.mark.full
@pytest.mark.parametrize("plan", ["figure", "terminate"])
def test_critic_and_reward_model_are_away_outside_their_phases_and_no_bit_changes(
    plan: str, settings: tuple[str, ...], ppo: PodRun, tmp_path: Path
) -> None:
    run = PodRun(tmp_path)
    done = run.train(*settings, f"--residents.plan={plan}", "--residents.prefetch=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, ppo) == [] and run.events("residue") == []
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        moves = [(one["resident"], one["move"]) for each in journal.transitions(2) for one in each.detail.get("moves", []) if each.sidecar == "trainer"]
    frozen = ("reference", "reward_model")
    made, given_up = ("instantiate", "destroy") if plan == "terminate" else ("reload", "destroy")
    assert [move for move in moves if move[0] in frozen] == [(name, made) for name in frozen] + [(name, given_up) for name in frozen]
    critic = [move for move in moves if "critic" in move[0]]
    assert critic == [("critic", "offload"), ("critic_optimizer", "offload"), ("critic", "reload"), ("critic_optimizer", "reload")]
    last = moves.index(("reward_model", given_up))
    assert moves.index(("critic", "reload")) < last < moves.index(("critic_optimizer", "reload")), "the critic is needed in both phases"


def test_a_checkpoint_has_the_critic_beside_the_actor_and_both_have_moments(ppo: PodRun) -> None:
    folder = ppo.directory / "checkpoints" / "step-4"
    manifest, _ = read_manifest(folder)
    actor, critic = Contents(folder, manifest), Contents(folder, manifest, CRITIC)
    assert {key.name for key in critic.held} - {key.name for key in actor.held} == {"score.weight", "score.bias"}
    assert {key.state for key in critic.held} == {key.state for key in actor.held} == {"weights", "exp_avg", "exp_avg_sq"}
    # Four steps of two minibatches, of which the actor learned from two steps.
    assert (manifest.state["updates"], manifest.state["critic"]["updates"]) == (4, 8)


def test_the_critic_is_exported_with_the_weights_of_the_last_checkpoint_and_read_by_transformers(ppo: PodRun) -> None:
    from transformers import AutoModelForTokenClassification

    exported, folder = dict(read_tensors(ppo.directory / "critic")), ppo.directory / "checkpoints" / "step-4"
    contents = Contents(folder, read_manifest(folder)[0], CRITIC)
    saved = {key.name: contents.tensor(key) for key in contents.held if key.state == "weights"}
    assert exported.keys() == saved.keys() and [name for name in saved if not torch.equal(exported[name], saved[name])] == []
    peer, loading = AutoModelForTokenClassification.from_pretrained(ppo.directory / "critic", output_loading_info=True)
    assert not loading["missing_keys"] and torch.equal(peer.score.weight, exported["score.weight"]) and peer.config.num_labels == 1
    assert {path.name for path in (ppo.directory / "critic").iterdir()} >= {"tokenizer.json", "manifest.json"}
    recipe = read_recipe(ppo.directory)
    assert isinstance(recipe, Recipe)
    # What is predicted before there is a critic.
    assert rl_models(recipe, read_shapes(ppo.directory / "sft" / "model")).critic == read_shapes(ppo.directory / "critic", "any")


@pytest.mark.full
def test_the_values_of_the_next_step_are_those_of_transformers_with_the_exported_critic(ppo: PodRun, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    run = PodRun(tmp_path)
    shutil.copytree(ppo.directory, run.directory, symlinks=True)
    peer = AutoModelForTokenClassification.from_pretrained(run.directory / "critic")
    before = (run.directory / "critic" / "model.safetensors").read_bytes()
    done = run.resume("--run.max_steps=5")
    assert done.returncode == 0, done.stdout + done.stderr
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        samples = journal.samples(4) or []
    values = []
    for sample in samples:
        with torch.no_grad():
            every = peer(torch.tensor([sample.prompt_token_ids + sample.token_ids])).logits[0, :, 0]
        values += every[len(sample.prompt_token_ids) - 1 : -1].tolist()
    row = run.rows()[4]
    assert row["critic/values/mean"] == pytest.approx(sum(values) / len(values), abs=1e-4)
    assert (row["critic/values/min"], row["critic/values/max"]) == pytest.approx((min(values), max(values)), abs=1e-4)
    assert (run.directory / "critic" / "model.safetensors").read_bytes() != before, "the critic of the new end takes its place"


def test_the_score_of_the_reward_model_is_that_of_transformers_and_part_of_the_reward(ppo: PodRun, reward_model: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    peer = AutoModelForSequenceClassification.from_pretrained(reward_model)
    with Journal(ppo.directory / "journal.sqlite", read_only=True) as journal:
        (samples, scores), *_ = journal.rounds(3)
    assert scores is not None
    found = [score.components["reward_model"] for score in scores]
    with torch.no_grad():
        wanted = [peer(torch.tensor([s.prompt_token_ids + s.token_ids])).logits.item() for s in samples]
    assert found == pytest.approx(wanted, abs=1e-4) and torch.tensor(found).std() > 0.1
    for score in scores:
        assert score.value == score.components["digits"] + WEIGHT * score.components["reward_model"]
    assert ppo.rows()[3]["reward/reward_model"] == pytest.approx(sum(found) / len(found))


FAULTS = ("trainer_worker:after:train:3", "pod:before:train:3", "trainer_worker:after:checkpoint_stage:2")


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_kill_changes_no_bit_of_actor_and_critic(fault: str, ppo: PodRun, settings: tuple[str, ...], tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*settings, "--fault", fault)
    if fault.startswith("pod:"):
        assert done.returncode == -9
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((run.directory / "faults").iterdir())) == 1
    assert run.rows() == ppo.rows() and run.results() == ppo.results()


@pytest.mark.full
def test_a_replayed_step_is_equal_and_the_run_is_verified(ppo: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    shutil.copytree(ppo.directory, run.directory, symlinks=True)
    done = finish(run.begin("replay", str(run.directory), "--step", "3", "--inline"))
    assert done.returncode == 0, done.stdout + done.stderr
    verified = finish(run.begin("verify", str(run.directory)))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    weights = run.directory / "critic" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    verified = finish(run.begin("verify", str(run.directory)))
    assert verified.returncode == 1 and "whatever is done with this critic" in verified.stdout + verified.stderr


@cache
def alone(parent: Path) -> PodRun:
    run = PodRun(parent)
    model = write_reward_model(parent / "reward", num_key_value_heads=2)
    done = run.train("--model.create.num_key_value_heads=2", *PPO, f"--reward_model.path={model}")
    assert done.returncode == 0, done.stdout + done.stderr
    return run


MESHES = {
    "data x tensor, zero 1": "--parallel.data=2 --parallel.tensor=2 --parallel.zero=1",
    "zero 3": "--parallel.data=2 --parallel.zero=3",
    "pipeline": "--parallel.pipeline=2",
    "context": "--parallel.context=2",
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_mesh_has_the_curve_of_one_process_with_its_critic_and_survives_a_dead_rank(mesh: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    one_process = alone(tmp_path_factory.getbasetemp() / "alone")
    wanted, model = one_process.rows(), one_process.parent / "reward" / "models" / "reward"
    run, killed = (PodRun(tmp_path_factory.mktemp("mesh")) for _ in range(2))
    heads = "--model.create.num_key_value_heads=2"
    for one, fault in ((run, ()), (killed, ("--fault", "trainer_rank1:after:train:3"))):
        done = one.train(heads, *PPO, f"--reward_model.path={model}", *mesh.split(), *fault)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in run.rows()] == [(0.0, 0.0)] * 4
    for name in ("reward/mean", "critic/vf_loss", "critic/grad_norm", "critic/values/mean", "reward/reward_model"):
        assert run.rows()[0][name] == pytest.approx(wanted[0][name], rel=1e-3), name
    assert killed.rows() == run.rows() and killed.results() == run.results()
    exported, folder = dict(read_tensors(run.directory / "critic")), run.directory / "checkpoints" / "step-4"
    contents = Contents(folder, read_manifest(folder)[0], CRITIC)
    saved = {key.name: contents.tensor(key) for key in contents.held if key.state == "weights"}
    assert exported.keys() == saved.keys() and [name for name in saved if not torch.equal(exported[name], saved[name])] == []


def test_a_critic_of_another_tokenizer_or_of_several_labels_or_too_short_is_refused_in_one_line(ppo: PodRun, tmp_path: Path) -> None:
    actor = ppo.directory / "sft" / "model"
    shapes = read_shapes(actor)
    other = make_value_folder(actor, "sequence", 0, tmp_path / "runs" / "other" / "critic")
    assert check_value_model(str(other), "critic.path", actor, shapes, 48, needs_head=True).value_head == "sequence"
    for context, needs_head, path, expected in (
        (49, False, other, "reads at most 48 tokens, and a sample may have 49"),
        (48, True, actor, "a language model without a value head, which cannot score"),
        (48, False, tmp_path / "none", "which is not a folder"),
    ):
        with pytest.raises(UserError, match=expected):
            check_value_model(str(path), "critic.path", actor, shapes, context, needs_head)
    bare = make_value_folder(actor, "sequence", 0, tmp_path / "runs" / "other" / "bare")
    for weights in (*bare.glob("*.safetensors"), *bare.glob("*.index.json")):
        weights.unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        check_value_model(str(bare), "critic.path", actor, shapes, 48)
    make_character_tokenizer("0123456789=", other)
    with pytest.raises(UserError, match="reads the tokens of another tokenizer"):
        check_value_model(str(other), "critic.path", actor, shapes, 48)
    config = other / "config.json"
    config.write_text(config.read_text().replace('"0": "LABEL_0"', '"0": "LABEL_0", "1": "LABEL_1"'))
    with pytest.raises(UserError, match="num_labels 2"):
        check_value_model(str(other), "critic.path", actor, shapes, 48)


@pytest.mark.full
def test_a_critic_of_its_own_begins_with_its_weights(ppo: PodRun, tmp_path: Path) -> None:
    given = make_value_folder(ppo.directory / "sft" / "model", "sequence", 7, tmp_path / "given" / "models" / "critic")
    run = PodRun(tmp_path / "runs")
    done = run.train(*PPO[:-3], "--run.max_steps=3", "--sft.steps=6", f"--critic.path={given}", "--inline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (run.directory / "models" / "critic").exists(), "a model with a head is read where it is"
    assert load_model(given, select("reference"), heads="any").shapes.value_head == "sequence"
    score = given / "score.safetensors"
    score.write_bytes(score.read_bytes()[:-1] + b"\x7f")
    verified = finish(run.begin("verify", str(run.directory)))
    assert verified.returncode == 1 and "score.safetensors" in verified.stdout + verified.stderr


SHARED = (
    "--algorithm.name=ppo", "--algorithm.gae_lambda=0.9", "--algorithm.minibatches=2", "--critic.shared=true", "--run.max_steps=3", "--sft.steps=6",
    "--model.create.num_key_value_heads=2",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", "--parallel.data=2 --parallel.zero=3", "--parallel.tensor=2 --parallel.pipeline=2"], ids=["alone", "zero", "both"])
def test_a_critic_on_the_trunk_of_the_actor_learns_survives_a_kill_and_is_not_exported(mesh: str, tmp_path: Path) -> None:
    quiet, run = PodRun(tmp_path / "quiet"), PodRun(tmp_path / "killed")
    fault = "trainer_rank1:after:train:2" if mesh else "trainer_worker:after:train:2"
    for one, more in ((quiet, ()), (run, ("--fault", fault))):
        done = one.train(*SHARED, *mesh.split(), *more)
        assert done.returncode == 0, done.stdout + done.stderr
    assert run.rows() == quiet.rows() and run.results() == quiet.results()
    rows = quiet.rows()
    assert [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in rows] == [(0.0, 0.0)] * 3
    assert len({row["critic/values/mean"] for row in rows}) == 3, "the value head changes in every step"
    exported = load_model(quiet.directory / "model", select("reference"))
    assert exported.shapes.value_head == "none" and exported.shapes.language_head and not (quiet.directory / "critic").exists()
    folder = quiet.directory / "checkpoints" / f"step-{len(rows)}"
    assert {key.name for key in Contents(folder, read_manifest(folder)[0]).held} >= {"score.weight", "score.bias"}
    done = finish(quiet.begin("replay", str(quiet.directory), "--step", "2", "--only", "train"))
    assert done.returncode == 0, done.stdout + done.stderr
