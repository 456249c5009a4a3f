"""``generation_config.json`` gives what a request does not, as in vLLM."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.huggingface.generation_config import default_sampling
from tandem.types import UserError

QWEN3 = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip
"""The file of Qwen3-0.6B."""


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_keys_that_vllm_reads_are_the_defaults(tmp_path: Path) -> None:
    assert default_sampling(write(tmp_path, QWEN3)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    more = {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048, "num_beams": 4, "temperature": None}
    assert default_sampling(write(tmp_path, more)) == {"min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 2048}
    assert default_sampling(tmp_path, "vllm") == default_sampling(tmp_path / "nothing") == {}
    assert default_sampling(tmp_path / "nothing", str(tmp_path))["min_p"] == 0.1
    assert default_sampling(tmp_path, override={"min_p": 0, "top_k": -1, "max_new_tokens": None}) == {"min_p": 0.0, "repetition_penalty": 1.05, "top_k": -1}
    assert default_sampling(tmp_path, "vllm", {"temperature": 0}) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ({"temperature": "hot"}, {}, "generation_config.json' has temperature 'hot', which no request may have"),
        ({"top_p": 0}, {}, "has top_p 0, which no request may have"),
        ({"top_k": 1.5}, {}, "has top_k 1.5"),
        ({"repetition_penalty": float("nan")}, {}, "has repetition_penalty nan"),
        ({"max_new_tokens": True}, {}, "has max_new_tokens True"),
        ([], {}, "contains a JSON list"),
        ({}, {"override": {"eos_token_id": 3}}, "engine override_generation_config has 'eos_token_id'; it may set temperature, top_k"),
        ({}, {"override": {"top_p": 2}}, "engine override_generation_config has top_p 2, which no request may have"),
        ({}, {"source": "elsewhere"}, "engine generation_config is 'elsewhere', which has no generation_config.json; give auto"),
    ],
)
def test_a_value_that_no_request_may_have_is_one_line(content: Any, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        default_sampling(write(tmp_path, content), **options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_llm_draws_with_the_models_defaults_unless_it_is_given_parameters(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(make_folder(), tmp_path / "model")
    content = {**json.loads((folder / "generation_config.json").read_text()), "temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.3}
    write(folder, content)
    prompt = {"prompt_token_ids": [3, 4, 5]}
    with LLM(folder) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.3)
        (default,) = llm.generate(prompt, use_tqdm=False)
        (given,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.3), use_tqdm=False)
        assert default.outputs[0].token_ids == given.outputs[0].token_ids
        (plain,) = llm.generate(prompt, SamplingParams(), use_tqdm=False)
        assert len(plain.outputs[0].token_ids) <= 16
    with LLM(folder, generation_config="vllm", override_generation_config={"max_new_tokens": 3}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3)
