"""The names that ``import tandem`` exports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import ROOT

import tandem
from tandem.types import UserError


def test_the_public_names_are_those_of_their_modules() -> None:
    from tandem.config.recipe import load_config
    from tandem.engine.llm import LLM
    from tandem.engine.sample.sampling_params import SamplingParams
    from tandem.jobs.start import train

    assert (tandem.LLM, tandem.SamplingParams, tandem.load_config, tandem.train) == (LLM, SamplingParams, load_config, train)
    assert set(tandem.__all__) == {"LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__", "load_config", "train"}


def test_importing_tandem_and_reading_a_recipe_loads_no_torch() -> None:
    code = "import sys, tandem; tandem.load_config('recipes/sort.yaml'); tandem.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        tandem.LLMs  # noqa: B018


def test_a_recipe_trains_from_python_and_the_model_answers(recipe: Path) -> None:
    code = (
        "import sys; from tandem import LLM, SamplingParams, load_config, train\n"
        "result = train(load_config(sys.argv[1], ['run.name=mine']), inline=True)\n"
        "assert result.steps == 1 and result.model.is_dir() and result.report.is_file()\n"
        "print(LLM(result.model).generate(['21='], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recipe)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"[\[(]\d+", done.stdout)


def test_mistakes_from_python_are_user_errors(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"run\.seed"):
        tandem.load_config(recipe, ["run.sed=1"])
    with pytest.raises(UserError, match="GiB"):
        tandem.train(tandem.load_config(recipe, ["machine.memory_gib=0.001"]))
