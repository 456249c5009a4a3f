"""The names that ``import tandem`` exports."""

import ast
import dataclasses
import importlib
import pydoc
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
from helpers_cli import ROOT

import tandem
from tandem.types import UserError


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    """What is imported for them under TYPE_CHECKING is what a program gets."""
    tree = ast.parse(Path(tandem.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(tandem.__all__) == {*seen, "__version__"} and dir(tandem) == sorted(tandem.__all__)
    for name, module in seen.items():
        assert getattr(tandem, name) is getattr(importlib.import_module(module), name)


def test_help_shows_the_public_names_and_every_option_of_an_engine() -> None:
    text = pydoc.plain(pydoc.render_doc(tandem))
    for name in ("class LLM", "class AsyncLLM", "class SamplingParams", "class Callback", "    train(recipe:", "    load_config(path:"):
        assert name in text, name
    shown = pydoc.plain(pydoc.render_doc(tandem.LLM))
    assert all(f"{field.name}: " in shown for field in dataclasses.fields(tandem.EngineArgs)) and "max_num_seqs: int = 256" in shown


def test_the_options_that_type_checkers_know_are_the_fields_of_engine_args() -> None:
    from tandem.engine.llm_options import EngineOptions

    fields, typed = typing.get_type_hints(tandem.EngineArgs), typing.get_type_hints(EngineOptions)
    assert set(typed) == set(fields) - {"model", "tokenizer"}
    for name in typed.keys() & fields.keys():
        assert set(parts(fields[name])) <= set(parts(typed[name])), name


def parts(hint: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a union, the type itself where it is none."""
    return tuple(part for each in typing.get_args(hint) for part in parts(each)) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def test_a_name_of_vllm_or_trl_is_answered_with_what_has_its_place() -> None:
    with pytest.raises(ImportError, match="tandem has no AsyncEngineArgs; use EngineArgs"):
        from tandem import AsyncEngineArgs  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(ImportError, match=r"tandem has no GRPOTrainer; use train"):
        tandem.GRPOTrainer  # noqa: B018


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tandem.SamplingParams(temperatur=1), "SamplingParams has no 'temperatur'; did you mean 'temperature'?"),
        (lambda: tandem.SamplingParams(max_new_tokens=3), "SamplingParams has no 'max_new_tokens': use max_tokens"),
        (lambda: tandem.SamplingParams(best_of=2), "best_of is 2; it is not supported: ask for n"),
        (lambda: tandem.SamplingParams(guided_json={}), "use structured_outputs=StructuredOutputsParams(json=...)"),
        (lambda: tandem.SamplingParams(temperature="0.7"), "sampling temperature is '0.7'; it must be a number"),
        (lambda: tandem.SamplingParams(stop=5), "sampling stop is 5; it must be a text or a list of texts"),
        (lambda: tandem.SamplingParams(logit_bias=[1]), "sampling logit_bias is [1]; it must be a mapping"),
        (lambda: tandem.SamplingParams(allowed_token_ids=7), "sampling allowed_token_ids is 7; it must be a list"),
        (lambda: tandem.SamplingParams(*range(40)), "positional arguments"),
        (lambda: tandem.StructuredOutputsParams(schema={}), "StructuredOutputsParams has no 'schema': use json"),
        (lambda: tandem.LoRARequest("a", 1), "missing 1 required positional argument: 'lora_path'"),
        (lambda: tandem.LoRARequest("a", 1, lora_local_path="x"), "LoRARequest has no 'lora_local_path': use lora_path"),
        (lambda: tandem.EngineArgs(modle="x"), "EngineArgs has no 'modle'; did you mean 'model'?"),
        (lambda: tandem.EngineArgs("x", pipeline_parallel_size=2), "EngineArgs has no 'pipeline_parallel_size': use tensor_parallel_size"),
        (lambda: tandem.LLM("x", trust_remote_code=True), "'engine.trust_remote_code' is true, which is not read: engine.model_impl is 'auto'"),
        (lambda: tandem.LLM("x", speculative_model="y"), "LLM has no 'speculative_model': use speculative_config={'method': 'ngram'}"),
        (lambda: tandem.LLM("x", speculative_config={"method": "eagle"}), "'engine.speculative_config.method' is 'eagle'; it must be one of ngram, suffix"),
        (lambda: tandem.LLM("x", max_num_seq=3), "LLM has no 'max_num_seq'; did you mean 'max_num_seqs'?"),
        (lambda: tandem.LLM("x", quantization="awq"), "LLM quantization is 'awq', which is the format of a folder and recognised without it"),
        (lambda: tandem.LLM("x", dtype="halve"), "'engine.dtype' is 'halve'; it must be one of"),
        (lambda: tandem.LLM("x", gpu_memory_utilization=90), "gpu_memory_utilization is 90.0; it must be above 0"),
        (lambda: tandem.LLM("x", foo=None), "LLM has no 'foo'; known are "),
        # Neutral values of vLLM's options are taken; only the folder is missing.
        (lambda: tandem.LLM("x", trust_remote_code=False, pipeline_parallel_size=1, seed=None, disable_log_stats=True, task="generate"), "'x' "),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_that_names_it_and_what_to_use(make: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert says in str(caught.value) and "\n" not in str(caught.value)


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
