"""Every reachable state of the weights' protocol: none is a mixture, none is a deadlock; and the walk finds what it is to find."""

from pathlib import Path

import pytest
from protocol_states import ALL, Limits
from protocol_walk import walk

from tandem.weight_transfer import publication

REPLACED = Limits(steps=1, deaths=0, flips=0, replacements=1)
DAMAGED = Limits(steps=1, deaths=0, flips=1, replacements=0)
ONCE_DAMAGED = Limits(steps=1, deaths=0, flips=1, replacements=0, once=1)
SHARED = Limits(steps=2, deaths=0, flips=0, replacements=0, shares=1)
EARLY = Limits(steps=2, deaths=0, flips=0, replacements=0, early=1)
LONG = Limits(steps=3, deaths=0, flips=0, replacements=0)
STATES = [
    pytest.param(Limits(steps=2, deaths=1, flips=0, replacements=0), 7_154, id="a death"),
    pytest.param(REPLACED, 1_044, id="a trainer replaced while it runs"),
    pytest.param(Limits(steps=1, deaths=0, flips=0, replacements=1, once=1), 1_406, id="verified once, a trainer replaced while it runs"),
    pytest.param(Limits(steps=2, deaths=1, flips=0, replacements=0, once=1), 10_699, id="verified once, a death", marks=pytest.mark.full),
    pytest.param(ONCE_DAMAGED, 6_058, id="verified once, a flipped bit", marks=pytest.mark.full),
    pytest.param(Limits(steps=1, deaths=1, flips=1, replacements=0, once=1), 91_002, id="verified once, a death and a flipped bit", marks=pytest.mark.full),
    pytest.param(DAMAGED, 6_495, id="a flipped bit", marks=pytest.mark.full),
    pytest.param(Limits(steps=3, deaths=1, flips=0, replacements=0), 45_201, id="a death in three steps", marks=pytest.mark.full),
    pytest.param(Limits(steps=1, deaths=1, flips=1, replacements=0), 84_478, id="a death and a flipped bit", marks=pytest.mark.full),
    pytest.param(Limits(steps=2, deaths=2, flips=0, replacements=0), 74_608, id="two deaths", marks=pytest.mark.full),
    pytest.param(Limits(steps=2, deaths=0, flips=0, replacements=0, deltas=1), 1_049, id="deltas"),
    pytest.param(Limits(steps=2, deaths=1, flips=0, replacements=0, deltas=1), 22_308, id="deltas, a death", marks=pytest.mark.full),
    pytest.param(Limits(steps=2, deaths=0, flips=0, replacements=1, deltas=1), 98_028, id="deltas, a trainer replaced while it runs", marks=pytest.mark.full),
    pytest.param(Limits(steps=2, deaths=0, flips=1, replacements=0, deltas=1), 96_986, id="deltas, a flipped bit", marks=pytest.mark.full),
    pytest.param(Limits(steps=3, deaths=1, flips=0, replacements=0, deltas=1), 135_426, id="deltas, a death in three steps", marks=pytest.mark.full),
    pytest.param(SHARED, 611, id="shared"),
    pytest.param(Limits(steps=2, deaths=1, flips=0, replacements=0, shares=1), 10_574, id="shared, a death", marks=pytest.mark.full),
    pytest.param(Limits(steps=1, deaths=0, flips=1, replacements=0, shares=1), 9_905, id="shared, a flipped bit", marks=pytest.mark.full),
    pytest.param(Limits(steps=1, deaths=0, flips=0, replacements=1, shares=1), 1_524, id="shared, a trainer replaced while it runs", marks=pytest.mark.full),
    pytest.param(EARLY, 2_603, id="early"),
    pytest.param(Limits(steps=1, deaths=0, flips=0, replacements=1, early=1), 10_254, id="early, a trainer replaced while it runs"),
    pytest.param(Limits(steps=1, deaths=0, flips=1, replacements=0, early=1), 43_658, id="early, a flipped bit", marks=pytest.mark.full),
    pytest.param(Limits(steps=2, deaths=1, flips=0, replacements=0, early=1), 93_153, id="early, a death", marks=pytest.mark.full),
    pytest.param(Limits(steps=2, deaths=1, flips=0, replacements=1), 808_433, id="a death and a replacement", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("limits", "states"), STATES)
def test_no_reachable_state_is_a_mixture_and_from_each_engines_come_to_hold_what_is_published(limits: Limits, states: int) -> None:
    walked = walk(limits)
    print(f"{limits}: {walked.states:,} states, {walked.steps:,} steps, {walked.goals:,} goals")
    assert walked.mixture == "", walked.way
    assert walked.stuck == 0, walked.stuck_way
    assert walked.goals > 0 and walked.states == states
    assert f"{walked.states:,}" in (Path(__file__).parents[2] / "docs" / "hybrid.md").read_text(encoding="utf-8")


def test_without_compare_and_swap_a_trainer_that_was_replaced_publishes_over_its_successor() -> None:
    walked = walk(REPLACED, ALL._replace(compare_and_swap=False))
    assert walked.mixture.startswith("engines: (1, 0) was published after (2, 0)") and walked.way[-1] == "trainer 1 publishes"


def test_without_the_order_of_versions_it_does_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "check_newer", lambda *_: None)
    assert walk(REPLACED).mixture.startswith("engines: (1, 0) was published after (2, 0)")


def test_without_the_label_of_a_segment_a_transfer_takes_bytes_of_two_versions_as_one() -> None:
    walked = walk(LONG, ALL._replace(label=False))
    assert walked.mixture == "transfer: bytes of (1, 2), (1, 0) were accepted as one version"


@pytest.mark.parametrize(("limits", "drawn"), [(LONG, "(1, 2), (1, 0) as (1, 0)"), (DAMAGED, "(-1, -1), (1, 0) as (1, 0)")])
def test_without_digests_an_engine_draws_from_two_versions_or_from_damaged_weights(limits: Limits, drawn: str) -> None:
    assert walk(limits, ALL._replace(digest=False)).mixture == f"engine: it draws from {drawn}"


@pytest.mark.parametrize(("off", "comes_before"), [("after", "a bit flips"), ("revision", "trainer 1 publishes")])
def test_engines_that_take_weights_unverified_need_digests_after_it_of_what_was_published_all_the_time(off: str, comes_before: str) -> None:
    walked = walk(ONCE_DAMAGED, ALL._replace(**{off: False}))
    assert walked.mixture == "engine: it draws from (-1, -1), (1, 0) as (1, 0)"
    assert comes_before in walked.way[walked.way.index("engine 0 reads the manifest") :]


def test_without_the_comparison_of_what_comes_of_a_delta_a_damaged_base_becomes_the_weights() -> None:
    walked = walk(Limits(steps=2, deaths=0, flips=1, replacements=0, deltas=1), ALL._replace(delta=False))
    assert walked.mixture == "engine: it draws from (-1, -1), (1, 1) as (1, 1)"
    assert walked.way[-4:] == ("a bit of the other pod flips", "engine 1 applies the delta", "engine 1 applies the delta", "engine 1 holds it")


def test_without_the_comparison_of_what_came_early_a_transfer_takes_bytes_of_two_versions_as_one() -> None:
    walked = walk(EARLY, ALL._replace(early=False))
    assert walked.mixture == "transfer: bytes of (1, 1), (1, 0) were accepted as one version"
    assert walked.way[-4:] == ("engine 1 reads the manifest", "engine 1 has it early", "engine 1 copies", "engine 1 reads again")


def test_without_the_label_an_engine_that_shares_draws_from_two_versions() -> None:
    walked = walk(SHARED._replace(steps=3), ALL._replace(held=False))
    assert walked.mixture.startswith("engine: it draws from ") and walked.mixture.endswith(" as (1, 0)") and "(1, 2)" in walked.mixture
    assert walked.way[-1] == "engine 0 draws samples" and "trainer 1 takes the label away" in walked.way


def test_without_the_repair_of_damaged_weights_engines_wait_for_ever() -> None:
    walked = walk(DAMAGED, ALL._replace(repair=False))
    assert walked.mixture == "" and walked.stuck > 0 and "a bit flips" in walked.stuck_way
