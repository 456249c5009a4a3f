"""How many steps a run may take when it is resumed: any number that changes no step it has taken."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.recipe import AnyRecipe, load_config
from tandem.jobs.finished import check_steps, describe_finished, first_other_rate
from tandem.jobs.result import RunResult
from tandem.jobs.run_files import record_config, write_recipe
from tandem.runtime.records.journal import Journal
from tandem.types import UserError

SORT = Path(__file__).resolve().parents[2] / "recipes" / "sort.yaml"


def recipe(*overrides: str) -> AnyRecipe:
    return load_config(SORT, ["trainer.warmup_steps=10", "run.max_steps=100", *overrides])


@pytest.mark.parametrize(
    ("schedule", "taken", "first"),
    [
        # The rate of the first step after the warm-up is that of its end, in a schedule of any length.
        (("trainer.schedule=cosine",), 11, None), (("trainer.schedule=cosine",), 12, 11), (("trainer.schedule=linear",), 100, 11),
        # The decay over the last 20 of 100 steps begins with a share of 0 at step 80.
        (("trainer.schedule=wsd", "trainer.decay_steps=20"), 81, None), (("trainer.schedule=wsd", "trainer.decay_steps=20"), 100, 81),
        ((), 100, None),
    ],
)  # fmt: skip
def test_steps_may_change_while_every_rate_so_far_stays(schedule: tuple[str, ...], taken: int, first: int | None) -> None:
    assert first_other_rate(recipe(*schedule), 200, taken) == first


def test_steps_of_an_edited_recipe_are_checked_like_those_of_the_command(tmp_path: Path) -> None:
    begun = recipe("trainer.schedule=cosine")
    write_recipe(begun, tmp_path)
    with Journal(tmp_path / "journal.sqlite") as journal:
        record_config(tmp_path, journal)
    (tmp_path / "checkpoints" / "step-50").mkdir(parents=True)
    check_steps(begun, tmp_path)
    longer = replace(begun, run=replace(begun.run, max_steps=200))
    with pytest.raises(UserError, match=r"cannot change from 100 to 200: it is where trainer.schedule 'cosine' ends, and step 11, already taken"):
        check_steps(longer, tmp_path)
    with pytest.raises(UserError, match=r"'run.max_steps' is 49, and '.*' has taken 50 steps; give 50 or more"):
        check_steps(replace(begun, run=replace(begun.run, max_steps=49)), tmp_path)


def test_finished_run_says_how_it_can_be_trained_further(tmp_path: Path) -> None:
    result = RunResult(tmp_path, 100, {}, tmp_path / "model", tmp_path / "report.html", ())
    assert describe_finished(recipe(), result).endswith(f"give it more steps: 'tandem resume {tmp_path} --run.max_steps=200'")
    ended = describe_finished(recipe("trainer.schedule=linear"), result)
    load_config(SORT, [f"--model.path={tmp_path}", "--model.create=null", "--sft=null"])
    assert f"start a new run with --model.path={tmp_path / 'model'} --model.create=null --sft=null: trainer.schedule 'linear' ended with its last step" in ended
