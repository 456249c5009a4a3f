"""The measured speed of the machine, from which a dry run predicts the time of a run."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.engine import SpeculativeConfig
from tandem.config.machine import MachineConfig
from tandem.config.recipe import Recipe, load_config
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.time import Product, Speed
from tandem.jobs.checks import measured_speed, predicted_time
from tandem.jobs.checks.measured_speed import measure, with_exchanges
from tandem.jobs.checks.predicted_time import RLSeconds, describe_rl_time
from tandem.jobs.prediction import rl_prediction
from tandem.kernels.measure import MOST_ROWS
from tandem.layout.residents import Residency
from tandem.layout.shapes import ModelShapes
from tandem.planner.measured_run import prompts_from
from tandem.types import UserError


def test_products_are_measured_and_large_ones_in_proportion() -> None:
    products = [Product(4, 8, 16), Product(MOST_ROWS * 1000, 8, 16), Product(64, 64, 64, trains=True)]
    speed = measure(products, "float32", "cpu", MachineConfig(threads=1))
    assert list(speed.seconds) == list(speed.cpu) == products and min(speed.seconds.values()) > 0 and speed.bytes_per_s > 0


def test_a_dtype_that_torch_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match="floatx"):
        measure([Product(1, 1, 1)], "floatx", "cpu", MachineConfig(threads=1))


def test_products_that_take_too_long_are_said_and_the_time_of_compiling_the_kernels_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product = [Product(4, 8, 16)]
    monkeypatch.setattr(measured_speed, "LIMIT_S", 0.001)
    with pytest.raises(UserError, match=r"^matrix products of the model took more than 0 s$"):
        measure(product, "float32", "cpu", MachineConfig(threads=1))
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nsleep 6\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(measured_speed, "LIMIT_S", 5.0)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert measure(product, "float32", "cpu", MachineConfig(threads=1), environment).seconds[product[0]] > 0


def test_a_dry_run_says_that_drafts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_time, "rl_seconds", lambda recipe, prompt, completion: RLSeconds(1.0, 0.0, 2.0, 0.5, 0.5, 0.0))
    recipe = load_config("sort")
    assert isinstance(recipe, Recipe)
    assert "draft" not in describe_rl_time(recipe, Prompts.of_mean(20))
    engine = replace(recipe.rollout.engine, speculative_config=SpeculativeConfig("ngram"))
    drafted = replace(recipe, rollout=replace(recipe.rollout, engine=engine))
    assert describe_rl_time(drafted, Prompts.of_mean(20)) == describe_rl_time(recipe, Prompts.of_mean(20)) + " (drafts by 'ngram' are not counted)"


def test_what_a_run_journals_of_its_prompts_is_what_a_plan_reads_and_alike_completions_take_less_time() -> None:
    recipe = load_config("sort")
    assert isinstance(recipe, Recipe)
    recipe = replace(recipe, trainer=replace(recipe.trainer, share_prompts=True))
    shapes = ModelShapes("llama", 101, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
    prompts = Prompts.of([(1, 2, 3, 4), (1, 2, 5), (1, 6, 7, 8, 9)])

    def at_one_rate(products: Sequence[Product]) -> dict[str, Any]:
        seconds = [product.flops / 1e9 for product in products]
        return {"seconds": seconds, "cpu_seconds": seconds, "bytes_per_s": 1e12, "bytes_per_cpu_s": 1e12}

    made, alike = (rl_prediction(recipe, shapes, Residency(), prompts, at_one_rate, begun) for begun in (0.0, 0.5))
    assert prompts_from(json.loads(json.dumps(made))["prompts"]) == prompts
    (_, without), (_, half) = (each["at"][-1] for each in (made, alike))
    assert half["train"] < without["train"] and half["rollout"] == without["rollout"]


@pytest.mark.full
def test_a_collective_between_two_ranks_costs_cpu_seconds_by_call_and_by_byte() -> None:
    measured = with_exchanges(Speed({}, 1.0))
    # Between a microsecond and a tenth of a second for a call, and no more than a millionth for a byte.
    assert 1e-6 < measured.call_cpu_s < 0.1 and 0 < measured.sent_byte_cpu_s < 1e-6 and measured.bytes_per_s == 1.0
