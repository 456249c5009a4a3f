"""``parallel.layout: auto``: the planner's answer in a recipe."""

from dataclasses import replace

import pytest

from tandem.config.recipe import load_config
from tandem.estimate.hardware.load import load_hardware
from tandem.jobs.prepare import refuse_automatic
from tandem.planner.automatic import best_layout, with_layout
from tandem.types.errors import UserError

H100 = load_hardware("H100-80GB")


def test_the_fastest_layout_that_fits_is_applied_and_named() -> None:
    recipe = load_config("sort", ["--parallel.layout=auto"])
    chosen, line = with_layout(recipe, ["NVIDIA H100 80GB HBM3"] * 4, H100, 2)
    best = best_layout(recipe, 4, H100)
    assert chosen.parallel.world == 4
    assert chosen.parallel.layout == "given"
    assert chosen.parallel.data == best.layout.parallel.data
    assert chosen.trainer.micro_batch_tokens == best.layout.micro_batch * best.layout.sequence
    assert line.startswith("layout: ")
    chosen.check()
    # Whatever is not chosen stays.
    assert replace(chosen, parallel=recipe.parallel, trainer=recipe.trainer) == recipe


def test_a_run_that_trains_a_draft_head_has_the_fastest_layout_of_those_that_a_head_is_trained_on() -> None:
    speculative = "--rollout.engine.speculative_config={method: eagle3, model: head}"
    plain = load_config("sort", ["--parallel.layout=auto"])
    recipe = load_config("sort", ["--parallel.layout=auto", speculative, "--draft={}"])
    chosen, line = with_layout(recipe, ["NVIDIA H100 80GB HBM3"] * 4, H100, 2)
    best = best_layout(recipe, 4, H100)
    assert chosen.parallel.world == 4 and chosen.parallel.zero < 3 and line.startswith("layout: ")
    assert best.step_seconds >= best_layout(plain, 4, H100).step_seconds
    chosen.check()


@pytest.mark.parametrize(("cores", "data"), ((2, 2), (3, 2), (7, 4), (1, 1)))
def test_without_gpus_ranks_are_the_cores_that_divide_the_batch(cores: int, data: int) -> None:
    recipe = load_config("sort", ["--parallel.layout=auto", "--rollout.prompts_per_step=4", "--algorithm.group_size=2"])
    chosen, _ = with_layout(recipe, [], None, cores)
    assert (chosen.parallel.data, chosen.parallel.zero) == (data, int(data > 1))


def test_a_layout_that_is_given_stays() -> None:
    recipe = load_config("sort")
    assert with_layout(recipe, ["NVIDIA H100 80GB HBM3"] * 8, H100, 2) == (recipe, "")


def test_ranks_beside_an_automatic_layout_are_refused() -> None:
    with pytest.raises(UserError, match=r"'parallel.data' is 2, which is not read: parallel.layout is 'auto', which chooses it; set parallel.layout to given"):
        load_config("sort", ["--parallel.layout=auto", "--parallel.data=2"])


def test_a_run_that_is_placed_elsewhere_cannot_leave_its_layout_open() -> None:
    with pytest.raises(UserError, match=r"tandem plan RECIPE --gpu KIND --gpus N --emit recipe"):
        refuse_automatic(load_config("sort", ["--parallel.layout=auto"]))


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="the planner has no figures of 'Some GPU'"):
        with_layout(load_config("sort", ["--parallel.layout=auto"]), ["Some GPU"], None, 2)
