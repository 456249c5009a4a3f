"""The page of a plan, in a real Chromium without a network: the memory of each phase and stage, the pipeline, the front, with the figures of the JSON."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, browser, tab
from recipes_of_models import grpo_recipe

from tandem.cli.main import main
from tandem.config.recipe import Recipe, load_config
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.estimate.processes import CONTROLLER_BYTES
from tandem.jobs.pod_plan import plan_of
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import eagle3_shapes
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import eagle3_tensors, initialise_eagle3, save_eagle3
from tandem.planner.page_bars import figure
from tandem.planner.pod_memory import plan_pod_memory, planned_recipe
from tandem.planner.recipe_layout import recipe_layout
from tandem.planner.recipe_step import sequence_tokens
from tandem.planner.score import score
from tandem.pod.residents import plan as residents_plan
from tandem.runtime.machine.gpus import room

GIB = 2**30
PHASES = ["train", "offload", "convert", "rollout", "inference"]
H100, H200 = load_hardware("H100-80GB"), load_hardware("H200")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A page and the JSON of the same plan, of an 8B model whose trainer is a pipeline."""
    folder = tmp_path_factory.mktemp("plan")
    recipe, page = grpo_recipe(folder), folder / "plan.html"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: said.append(text))
        layout = ["--gpus", "16", "--tp", "2", "--pp", "4", "--dp", "2", "--micro-batch", "2", "--recompute", "full"]
        assert main(["plan", str(recipe), *layout, "--json", "--html", str(page)]) == 0
    return page, json.loads(said[-1])


def table_of(opened: Tab, section: str) -> dict[str, list[str]]:
    """Returns the rows of the table in the section of this title by their first cell."""
    rows = opened.page.evaluate(
        "(title) => [...[...document.querySelectorAll('section')].find((each) => each.querySelector('h2').textContent === title)"
        ".querySelectorAll('tr')].map((row) => [...row.cells].map((cell) => cell.textContent))",
        section,
    )
    return {row[0]: row[1:] for row in rows}


def widths(opened: Tab, section: str) -> list[dict[str, float]]:
    """Returns the pixels of every part of each bar of a section, and of the bar itself as ``all``."""
    drawn: list[dict[str, float]] = opened.page.evaluate(
        "(title) => [...[...document.querySelectorAll('section')].find((each) => each.querySelector('h2').textContent === title)"
        ".querySelectorAll('.bar')].map((bar) => Object.fromEntries([['all', bar.getBoundingClientRect().width], "
        "...[...bar.querySelectorAll('i')].map((part) => [part.title.split(':')[0], part.getBoundingClientRect().width])]))",
        section,
    )
    return drawn


@pytest.mark.parametrize(("width", "scheme"), ((1200, "light"), (400, "dark")))
def test_the_page_shows_the_memory_of_every_phase_and_stage_with_the_figures_of_the_json(
    chromium: Any, planned: tuple[Path, dict[str, Any]], width: int, scheme: str
) -> None:
    page, answer = planned
    with tab(chromium, offline=True, viewport={"width": width, "height": 900}, color_scheme=scheme) as opened:
        opened.page.goto(page.as_uri())
        titles = [f"Memory of the pod, by phase: {place}" for place in ("the fullest GPU", "the host of a machine", "the disk of a machine")]
        phases = answer["pod_memory"]["phases"]
        assert [each["phase"] for each in phases] == PHASES
        titles += [f"Memory of the pod, by phase: the {kind}s of all 2 machines" for kind in ("host", "disk")]
        for kind, title in zip(("device", "host", "disk", "all_hosts", "all_disks"), titles, strict=True):
            expected = {
                name.replace("_", " "): [figure(each[kind].get(name, 0) / GIB) for each in phases]
                for name in dict.fromkeys(name for each in phases for name in each[kind] if name != "total")
            }
            assert table_of(opened, title) == {"": PHASES, **expected, "total": [figure(each[kind]["total"] / GIB) for each in phases]}
        most = max(H100.memory_bytes, *(each["device"]["total"] for each in phases))
        for drawn, each in zip(widths(opened, titles[0]), phases, strict=True):
            assert set(drawn) - {"all"} == {name.replace("_", " ") for name in each["device"] if name != "total"}
            for name, pixels in drawn.items():
                if name != "all":
                    assert pixels == pytest.approx(drawn["all"] * each["device"][name.replace(" ", "_")] / most, abs=0.6)
        stages = widths(opened, "Memory of a GPU in training, by pipeline stage")
        assert len(stages) == len(answer["memory_bytes_by_stage"]) == 4
        shown = opened.page.locator("section:has(h2:text-is('Memory of a GPU in training, by pipeline stage')) .bars b").all_inner_texts()
        assert shown == [f"{figure(stage['total'] / GIB)} GiB" for stage in answer["memory_bytes_by_stage"]]
        assert opened.page.locator("section:has(h2:text-is('Pipeline')) rect").count() == 2 * 4 * min(16, answer["layout"]["micro_batches"])
        # Nothing is wider than the screen, and the smallest letters are large enough to be read.
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width
        assert opened.page.evaluate("Math.min(...[...document.querySelectorAll('svg text')].map((each) => each.getBoundingClientRect().height))") > 11
        assert opened.violations() == []
        assert (opened.problems, opened.addresses) == ([], [page.as_uri()])


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    recipe = load_config(str(grpo_recipe(folder)), list(overrides))
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize("plan", ("keep", "sleep", "offload", "figure", "terminate"))
def test_the_phases_are_those_that_a_run_on_these_gpus_is_checked_with(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.planner.model_input import recipe_shapes

    recipe = recipe_of(
        tmp_path, "--parallel.data=8", "--parallel.zero=3", "--trainer.recompute=full", "--trainer.precision=bf16", "--machine.device=cuda",
        f"--residents.plan={plan}", "--residents.to=auto", "--rollout.prompts_per_step=16",
    )  # fmt: skip
    shapes = recipe_shapes(recipe.model)
    scored = score(shapes, recipe_layout(recipe, shapes), H200)
    pod = plan_pod_memory(recipe, scored)
    monkeypatch.setattr(residents_plan, "least_room", lambda ranks: room(H200.memory_bytes))
    monkeypatch.setattr(residents_plan, "available_bytes", lambda limit: 2**50)
    monkeypatch.setattr(residents_plan, "free_bytes", lambda folder: 2**50)
    checked = plan_of(replace(planned_recipe(recipe, scored), machine=recipe.machine), shapes, sequence_tokens(recipe, shapes))
    assert pod.plan == checked.chosen.name
    host, gpu = checked.host, checked.gpu
    assert gpu is not None
    device = {each.phase: sum(each.device.values()) for each in pod.phases}
    assert device["train"] == gpu.train_phase and device["rollout"] == gpu.rollout_phase and device["inference"] == gpu.inference_phase
    assert max(device.values()) == gpu.largest_phase
    memory = {each.phase: sum(each.host.values()) for each in pod.phases}
    assert memory["train"] == host.train_phase and memory["rollout"] == host.rollout_phase and memory["inference"] == host.inference_phase
    assert all(each.disk["moved_residents"] == checked.chosen.disk for each in pod.phases)
    assert all(size >= 0 for each in pod.phases for kind in (each.device, each.host, each.disk) for size in kind.values())
    parts = {each.phase: each.device for each in pod.phases}
    # An update's activations are dropped when residents begin to move; what a rollout does not need has moved when the weights are written.
    assert "activations" not in parts["offload"] and parts["offload"]["actor"] == parts["convert"]["actor"]
    assert ("optimizer" in parts["convert"]) == (plan in ("keep", "sleep")) and "kv_cache" in parts["rollout"]
    assert ("kv_cache" in parts["train"]) == (plan == "keep")


def test_a_draft_head_is_in_the_phases_of_the_pod_with_the_bytes_of_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.planner.model_input import recipe_shapes

    plain = load_config("sort", ["--machine.device=cuda"])
    assert isinstance(plain, Recipe)
    shapes = recipe_shapes(plain.model)
    head = Eagle3Head(eagle3_shapes(shapes, shapes.vocab_size), ReferenceKernels())
    initialise_eagle3(head, 0)
    save_eagle3(head, tmp_path / "head")
    speculative = f"--rollout.engine.speculative_config={{method: eagle3, model: {tmp_path / 'head'}}}"
    drafting = load_config("sort", ["--machine.device=cuda", speculative, "--draft={}"])
    assert isinstance(drafting, Recipe)
    scored = score(shapes, recipe_layout(plain, shapes), H200)
    with_head, without = (plan_pod_memory(each, scored) for each in (drafting, plain))
    weights = sum(tensor.nbytes for tensor in eagle3_tensors(head).values())
    cached = 2 * head.shapes.layer.key_value_size * 4
    tokens = next(each for each in without.phases if each.phase == "rollout").device["kv_cache"] // kv_bytes_per_token(shapes, "float32")
    for own, other in zip(with_head.phases, without.phases, strict=True):
        more = {name: size - other.device.get(name, 0) for name, size in own.device.items() if size != other.device.get(name, 0)}
        # Weights, gradients and two moments; on the host the copy of weights and moments that a checkpoint is written from.
        assert own.host["checkpoint_copy"] - other.host["checkpoint_copy"] == 3 * weights
        assert more.pop("draft_head") == 4 * weights and (more.pop("draft_activations", 0) > 0) == (own.phase == "train")
        if "kv_cache" in own.device:
            assert more.pop("draft_weights") == weights and more.pop("draft_cache") == tokens * cached
        assert not more and own.host["weight_buffers"] - other.host["weight_buffers"] == 2 * weights
    monkeypatch.setattr(residents_plan, "least_room", lambda ranks: room(H200.memory_bytes))
    planned = replace(planned_recipe(drafting, scored), machine=drafting.machine)
    checked = plan_of(planned, shapes, sequence_tokens(drafting, shapes))
    assert checked.gpu is not None and max(sum(each.device.values()) for each in with_head.phases) == checked.gpu.largest_phase


@pytest.mark.parametrize(("place", "moved"), (("memory", "host"), ("disk", "disk")))
def test_all_machines_have_what_each_of_them_has_and_once_what_is_in_one_place(place: str, moved: str, tmp_path: Path) -> None:
    from tandem.planner.model_input import recipe_shapes

    recipe = recipe_of(
        tmp_path, "--parallel.data=16", "--parallel.zero=3", "--machine.device=cuda", "--residents.plan=offload", f"--residents.to={place}",
        "--rollout.prompts_per_step=16", "--trainer.offload=cpu",
    )  # fmt: skip
    shapes = recipe_shapes(recipe.model)
    pod = plan_pod_memory(recipe, score(shapes, recipe_layout(recipe, shapes), H200))
    assert (pod.machines, pod.ranks) == (2, 8)
    for one, everywhere in zip(pod.phases, pod.everywhere, strict=True):
        assert everywhere.device == one.device
        # Ranks, engines and the buffers that they read are on both, moments and a checkpoint's copy are those of all ranks, and the controller is on one.
        for name in ("weight_buffers", "engines", *(name for name in one.host if name.startswith("moved_"))):
            assert everywhere.host[name] == 2 * one.host[name], name
        assert {everywhere.host[name] - one.host[name] for name in ("checkpoint_copy", "offloaded_moments")} == {0}
        assert everywhere.host["processes"] == 2 * one.host["processes"] - CONTROLLER_BYTES
        assert everywhere.disk["checkpoints_and_models"] == one.disk["checkpoints_and_models"] > 0
        assert everywhere.disk["moved_residents"] == 2 * one.disk["moved_residents"]
        assert (one.disk["moved_residents"] > 0) == (moved == "disk")


def test_a_pod_that_fits_in_no_plan_says_why_and_nothing_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    recipe = grpo_recipe(tmp_path, residents={"device_gib": 2.0})
    assert main(["plan", str(recipe), "--gpus", "8", "--dp", "8", "--html", str(page), "--json"]) == 0
    refused = json.loads(capsys.readouterr().out)["pod_memory"]
    assert list(refused) == ["refused"] and "of each GPU at its worst moment and may take 2.00 GiB" in refused["refused"]
    assert "Not predicted: this run needs" in page.read_text()
