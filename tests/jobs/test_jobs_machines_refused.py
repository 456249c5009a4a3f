"""What a run on data over several machines is refused for, in one line and before any work, and what of it each machine has."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pretrain_recipe import recipe_sections

from tandem.config.bundled import recipe_file
from tandem.config.load import to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config, recipe_of
from tandem.config.trainer import TrainerConfig
from tandem.estimate.kept_checkpoints import keeper_bytes
from tandem.estimate.training_bytes import checkpoint_bytes
from tandem.jobs.checks.check_data import data_run_needs
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError

PODS = ("--parallel.data=4", "--pods.trainer_count=2", "--pods.credential_file=/secret", "--coordination.store=etcd")

STAGES = (*PODS[1:], "--parallel.data=1", "--parallel.pipeline=2")


def recipe(folder: Path, *overrides: str) -> PretrainRecipe:
    sections: dict[str, Any] = recipe_sections(folder, data={"train": [{"path": "/data"}]}, run={"name": "run"})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    read = load_config(folder / "recipe.yaml", overrides)
    assert isinstance(read, PretrainRecipe)
    return read


def test_as_many_pods_may_join_as_train_beside_that_of_the_run(tmp_path: Path) -> None:
    two = recipe(tmp_path, *PODS)
    assert (two.pods.max_count, two.ranks_here, two.parallel.world) == (2, 2, 4)
    assert recipe(tmp_path, *PODS, "--pods.max_count=3").pods.max_count == 3
    assert recipe_of(to_mapping(two)) == two


@pytest.mark.parametrize(("more", "here"), [((), 1), (("--parallel.data=2", "--pods.trainer_count=4", "--parallel.tensor=2"), 2)])
def test_a_replica_has_its_stages_on_as_many_machines_as_there_are_for_it(more: tuple[str, ...], here: int, tmp_path: Path) -> None:
    divided = recipe(tmp_path, *STAGES, *more)
    assert divided.ranks_here == here == divided.parallel.world // divided.pods.max_count


def test_stages_of_reinforcement_learning_stay_in_a_pod(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        load_config(recipe_file("sort"), ["--pods.count=2", "--pods.trainer_count=2", "--parallel.pipeline=2"])
    assert str(refused.value) == (
        "'pods.trainer_count' is 2, which does not divide parallel.data 1: a pod has whole replicas, because pipeline stages over several pods are for runs on "
        "data in this version; set parallel.data to a multiple"
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            (*PODS, "--parallel.data=3"),
            "'pods.trainer_count' is 2, which divides neither parallel.data 3 nor the stages (parallel.pipeline 1) of each replica evenly; "
            "set parallel.data to a multiple of 2",
        ),
        (
            (*PODS, "--parallel.data=2", "--parallel.pipeline=3", "--pods.trainer_count=4"),
            "'pods.trainer_count' is 4, which divides neither parallel.data 2 nor the stages (parallel.pipeline 3) of each replica evenly; "
            "set parallel.data to a multiple of 4, or parallel.pipeline to a multiple of 2, whose stages are then on 2 machines",
        ),
        ((*PODS, "--parallel.data=1", "--parallel.pipeline=2", "--parallel.context=2", "--parallel.zero=3"), "'pods.trainer_count' is 2 with parallel.zero 3"),
        (
            (*PODS, "--parallel.data=2", "--parallel.pipeline=2", "--pods.trainer_count=4", "--parallel.expert=2"),
            "'pods.trainer_count' is 4 with parallel.expert 2, so that a pod of 1 data-parallel rank would not have all experts",
        ),
        ((*PODS, "--parallel.data=1", "--parallel.pipeline=2", "--run.elastic=true"), "'pods.trainer_count' is 2 with run.elastic"),
        ((*PODS, "--parallel.zero=3"), "'pods.trainer_count' is 2 with parallel.zero 3"),
        ((*PODS, "--run.elastic=true"), "'pods.trainer_count' is 2 with run.elastic"),
        ((*PODS, "--run.name="), "which find a run by its name; set run.name"),
        ((*PODS, "--coordination.store=embedded"), "which reach no 'embedded' store; set coordination.store to etcd"),
        ((*PODS, "--pods.count=2"), "'pods.count' cannot be set: a run on data has one pod on its own machine"),
        ((*PODS[:2], PODS[3]), "'pods.credential_file' is not given"),
        (("--pods.max_count=2", "--pods.credential_file=/secret"), "'pods.max_count' is 2, which is not read: all ranks of the run are on one machine"),
        (("--coordination.store=etcd",), "'coordination.store' is 'etcd', which is not read: all ranks of the run are on one machine"),
        (
            ("--parallel.data=2", "--checkpoint.memory_every_steps=1", "--checkpoint.memory_directory=/dev/shm/t"),
            "'checkpoint.memory_directory' is '/dev/shm/t', which is not read: all ranks of the run are on one machine",
        ),
        (("--cluster.spares=1",), "'cluster.spares' is 1, which is not read: all ranks of the run are on one machine"),
    ],
)  # fmt: skip
def test_what_ranks_on_several_machines_cannot_be_combined_with_is_one_line(overrides: tuple[str, ...], line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        recipe(tmp_path, *overrides)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_machine_is_checked_for_the_memory_of_its_own_ranks(tmp_path: Path) -> None:
    shapes = ModelShapes(
        architecture="qwen3", tie_word_embeddings=False, vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    half = recipe(tmp_path, "--parallel.data=2", "--data.global_batch_size=4")
    of_two, of_one = (data_run_needs(which, shapes, "cpu").host for which in (recipe(tmp_path, *PODS, "--data.global_batch_size=8"), half))
    kept = data_run_needs(recipe(tmp_path, *PODS, "--checkpoint.memory_every_steps=1"), shapes, "cpu")
    # The files of its own two ranks, and of the two of the other machine.
    assert kept.kept == keeper_bytes(checkpoint_bytes(shapes, TrainerConfig(learning_rate=3e-3)), 4)
    # The embedding is in the first stage, the head in the last, which both have half of the layers.
    stages = data_run_needs(recipe(tmp_path, *STAGES, "--checkpoint.memory_every_steps=1"), shapes, "cpu")
    assert stages.kept == pytest.approx(keeper_bytes(checkpoint_bytes(shapes, TrainerConfig(learning_rate=3e-3)), 2), rel=0.05)
    assert stages.kept >= keeper_bytes(checkpoint_bytes(shapes, TrainerConfig(learning_rate=3e-3)), 2)
    assert of_two == pytest.approx(of_one, rel=0.01) and of_two < data_run_needs(recipe(tmp_path, PODS[0]), shapes, "cpu").host
