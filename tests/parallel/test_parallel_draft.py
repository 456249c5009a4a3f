"""A draft head takes the updates of one process on the ranks of any mesh that divides its target, and those of plain torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_ranks import Draft, by_drafting_anew, checkpointed, follow_policy, train_draft, write_folders
from model_ranks import LLAMA, QWEN3, QWEN3_MOE, Case, distance
from ranks import Ranks

from tandem.layout.mesh import MeshShape

FULL = pytest.mark.full
pytestmark = pytest.mark.usefixtures("one_thread")
UNTIED, TIED = Case(replace(LLAMA, num_hidden_layers=4)), Case(replace(QWEN3, num_hidden_layers=4))
MIXTURE = Case(QWEN3_MOE)
EXACT = Case(replace(LLAMA, num_hidden_layers=4), "float32", "cpu", deterministic=True)
INTERLEAVED: Any = ("interleaved", 2)
ROWS = {
    "tensor 2, sequence": (MeshShape(tensor=2), Draft(replace(UNTIED, sequence=True))),
}
SLOW = {
    "pipeline 2, tied": (MeshShape(pipeline=2), Draft(TIED)),
    "data 2, zero 2": (MeshShape(data=2), Draft(replace(UNTIED, zero=2))),
    "tensor 2, tied": (MeshShape(tensor=2), Draft(TIED)),
    "tensor 4, own embedding": (MeshShape(tensor=4), Draft(replace(UNTIED, sequence=True), own_embedding=True)),
    "pipeline 2, interleaved": (MeshShape(pipeline=2), Draft(UNTIED, INTERLEAVED)),
    "pipeline 4, own embedding": (MeshShape(pipeline=4), Draft(UNTIED, own_embedding=True)),
    "data 2 x tensor 2, zero 2": (MeshShape(data=2, tensor=2), Draft(replace(UNTIED, sequence=True, zero=2))),
    "data 2 x pipeline 2, zero 1": (MeshShape(data=2, pipeline=2), Draft(replace(TIED, zero=1))),
    "tensor 2 x pipeline 2": (MeshShape(tensor=2, pipeline=2), Draft(replace(UNTIED, sequence=True))),
    "tensor 2 x pipeline 2, interleaved": (MeshShape(tensor=2, pipeline=2), Draft(replace(TIED, deterministic=True), INTERLEAVED)),
    "data 2 x tensor 2 x pipeline 2": (MeshShape(data=2, tensor=2, pipeline=2), Draft(replace(UNTIED, sequence=True))),
    "data 2, expert 2, zero 1": (MeshShape(data=2, expert=2), Draft(replace(MIXTURE, zero=1))),
    "data 2 x tensor 2, expert 2": (MeshShape(data=2, tensor=2, expert=2), Draft(replace(MIXTURE, sequence=True))),
}
WORKED: dict[tuple[str, Draft], dict[str, Any]] = {}


def rows(some: dict[str, Any], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*row, id=name, marks=marks) for name, row in some.items()]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of the target and the head of a ``Draft``, written once."""
    made: dict[Any, Path] = {}

    def folder(draft: Draft) -> Path:
        key = (draft.case.shapes, draft.own_embedding)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("draft")
            write_folders(draft, made[key])
        return made[key]

    return folder


def alone(function: Any, draft: Draft, folder: Path) -> dict[str, Any]:
    """Returns the results of one process, computed once."""
    plain = replace(draft, case=replace(draft.case, deterministic=False, sequence=False, zero=0), schedule=("1f1b", 1))
    key = (function.__name__, plain)
    if key not in WORKED:
        WORKED[key] = function(None, plain, folder)
    return WORKED[key]


def check(every: list[dict[str, Any]], wanted: dict[str, Any], mesh: MeshShape, close: float = 1e-10) -> None:
    """Raises ``AssertionError`` if a rank's results differ from those of one process, or other ranks have the head than should."""
    holders = [mesh.world - mesh.data * mesh.tensor + place * mesh.tensor for place in range(mesh.data)]
    assert [rank for rank, own in enumerate(every) if own["parameters"]] == holders
    for own in every:
        assert own["metrics"] == every[0]["metrics"], "all ranks write the same row"
        for mine, its in zip(own["metrics"], wanted["metrics"], strict=True):
            assert mine == pytest.approx(its, rel=1e-9, abs=1e-11)
    for rank in holders:
        for kind in ("gradients", "parameters"):
            if kind in wanted:
                assert distance(every[rank][kind], wanted[kind]) < close, kind


@pytest.mark.parametrize("draft", [Draft(UNTIED), Draft(TIED)], ids=["untied", "tied"])
def test_the_loss_and_gradients_of_one_process_are_those_of_drafting_anew_with_transformers(draft: Draft, folder_of: Any) -> None:
    own, (loss, gradients) = alone(train_draft, draft, folder_of(draft)), by_drafting_anew(draft, folder_of(draft))
    assert own["metrics"][0]["train/loss"] == pytest.approx(loss, rel=1e-6)
    # Tables of cosines are fp32.
    assert distance(own["gradients"], gradients) < 1e-6


@pytest.mark.parametrize(("mesh", "draft"), rows(ROWS) + rows(SLOW, FULL))
def test_ranks_take_the_updates_of_one_process(ranks: Ranks, mesh: MeshShape, draft: Draft, folder_of: Any) -> None:
    folder = folder_of(draft)
    check(ranks.run(mesh, train_draft, draft, folder), alone(train_draft, draft, folder), mesh)


BITS = {
    "tensor 2": (MeshShape(tensor=2), Draft(EXACT)),
    "pipeline 2": (MeshShape(pipeline=2), Draft(EXACT)),
}
SLOW_BITS = {
    "tensor 2, sequence": (MeshShape(tensor=2), Draft(replace(EXACT, sequence=True))),
    "pipeline 2, interleaved": (MeshShape(pipeline=2), Draft(EXACT, INTERLEAVED)),
    "tensor 2 x pipeline 2": (MeshShape(tensor=2, pipeline=2), Draft(replace(EXACT, sequence=True))),
}


def check_bits(every: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for own in every:
        assert own["metrics"] == wanted["metrics"]
        for kind in ("gradients", "parameters"):
            for name, tensor in own.get(kind, {}).items():
                assert torch.equal(tensor, wanted[kind][name]), (kind, name)
    assert wanted["parameters"].keys() == every[-1]["parameters"].keys() | every[-2]["parameters"].keys()


@pytest.mark.parametrize(("mesh", "draft"), rows(BITS) + rows(SLOW_BITS, FULL))
def test_deterministic_tensor_ranks_and_pipeline_stages_have_the_bits_of_one_process(ranks: Ranks, mesh: MeshShape, draft: Draft, folder_of: Any) -> None:
    folder = folder_of(draft)
    check_bits(ranks.run(mesh, train_draft, draft, folder), alone(train_draft, draft, folder))


MOVES = {
    "alone to tensor 2": (MeshShape(), MeshShape(tensor=2)),
    "tensor 2 x pipeline 2 to alone": (MeshShape(tensor=2, pipeline=2), MeshShape()),
    "pipeline 2 to data 2 x tensor 2, zero 2": (MeshShape(pipeline=2), MeshShape(data=2, tensor=2)),
    "data 2 x pipeline 2, zero 2 to tensor 2": (MeshShape(data=2, pipeline=2), MeshShape(tensor=2)),
}


@pytest.mark.parametrize(("before", "after"), rows(dict(list(MOVES.items())[:1])) + rows(dict(list(MOVES.items())[1:]), FULL))
def test_a_head_goes_on_from_a_checkpoint_of_another_mesh(ranks: Ranks, before: MeshShape, after: MeshShape, tmp_path: Path) -> None:
    draft = Draft(UNTIED)
    write_folders(draft, tmp_path)
    whole = train_draft(None, draft, tmp_path)

    def run(mesh: MeshShape, steps: int, at: int) -> list[dict[str, Any]]:
        own = replace(draft, case=replace(draft.case, zero=2)) if mesh.data > 1 else draft
        return [checkpointed(None, own, tmp_path, steps, at)] if mesh.world == 1 else ranks.run(mesh, checkpointed, own, tmp_path, steps, at)

    begun, ended = run(before, 1, 0), run(after, 3, 1)
    for rank in begun:
        assert rank["metrics"][0] == pytest.approx(whole["metrics"][0], rel=1e-9, abs=1e-11)
    check(ended, {"metrics": whole["metrics"][1:], "parameters": whole["parameters"]}, after)


def test_stages_and_then_tensor_ranks_have_the_bits_of_one_process_with_moments_of_8_bits(ranks: Ranks, tmp_path: Path) -> None:
    wide = replace(LLAMA, hidden_size=96, intermediate_size=160, num_hidden_layers=4)
    draft = Draft(replace(EXACT, shapes=wide, optimizer="adamw8bit"))
    write_folders(draft, tmp_path)
    whole = train_draft(None, draft, tmp_path)
    begun = ranks.run(MeshShape(pipeline=2), checkpointed, draft, tmp_path, 1, 0)
    ended = ranks.run(MeshShape(tensor=2), checkpointed, draft, tmp_path, 3, 1)
    assert all(rank["metrics"] == whole["metrics"][:1] for rank in begun) and all(rank["metrics"] == whole["metrics"][1:] for rank in ended)
    assert ended[0]["parameters"].keys() == whole["parameters"].keys() and not ended[1]["parameters"]
    assert all(torch.equal(tensor, whole["parameters"][name]) for name, tensor in ended[0]["parameters"].items())


FOLLOWING = {"tensor 2": (MeshShape(tensor=2), Draft(replace(UNTIED, sequence=True)))}
SLOW_FOLLOWING = {
    "pipeline 2": (MeshShape(pipeline=2), Draft(TIED)),
    "pipeline 2, interleaved": (MeshShape(pipeline=2), Draft(UNTIED, INTERLEAVED)),
    "data 2 x tensor 2, zero 2": (MeshShape(data=2, tensor=2), Draft(replace(UNTIED, zero=2))),
    "data 2 x pipeline 2, zero 1": (MeshShape(data=2, pipeline=2), Draft(replace(UNTIED, zero=1))),
    "tensor 2 x pipeline 2": (MeshShape(tensor=2, pipeline=2), Draft(replace(UNTIED, sequence=True))),
}


@pytest.mark.parametrize(("mesh", "draft"), rows(FOLLOWING) + rows(SLOW_FOLLOWING, FULL))
def test_a_head_follows_a_policy_that_moves_on_ranks_as_in_one_process(ranks: Ranks, mesh: MeshShape, draft: Draft, folder_of: Any) -> None:
    folder = folder_of(draft)
    every, wanted = ranks.run(mesh, follow_policy, draft, folder), alone(follow_policy, draft, folder)
    check(every, wanted, mesh)
    for mine, its in zip(every[0]["moved"], wanted["moved"], strict=True):
        assert mine == pytest.approx(its, rel=1e-9, abs=1e-11)
    assert all(step["actor/grad_norm"] > 0 for step in wanted["moved"])
