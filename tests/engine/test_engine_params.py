"""Sampling parameters: vLLM's defaults, and one clear line for every invalid value."""

import subprocess
import sys
from typing import Any

import pytest

from tandem import SamplingParams
from tandem.types import UserError


def test_the_defaults_are_those_of_vllm() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (1, 1.0, 1.0, 0, 0.0, None)
    assert (p.max_tokens, p.min_tokens, p.ignore_eos, p.logprobs) == (16, 0, False, None)
    assert (p.detokenize, p.skip_special_tokens, p.include_stop_str_in_output) == (True, True, False)


def test_equal_meanings_become_equal_values() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop="x").stop_texts == SamplingParams(stop=["x"]).stop_texts == ("x",)
    assert SamplingParams(temperature=1e-6) == SamplingParams(temperature=0)
    assert SamplingParams(logit_bias={3: 250.0}).logit_bias == {3: 100.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 2.0}, "n is 2.0"),
        ({"n": 2, "temperature": 0}, "n must be 1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens is -1"),
        ({"best_of": 2}, "best_of is 2; it is not supported"),
        ({"min_tokens": 17}, "min_tokens is 17"),
        ({"logprobs": -2}, "logprobs is -2"),
        ({"stop": [""]}, "stop is"),
        ({"stop": "a", "detokenize": False}, "stop needs detokenize"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"bad_words": ["a", ""]}, "bad_words is"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids holds -1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"structured_outputs": {"regex": "a"}}, "give a StructuredOutputsParams"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        SamplingParams(**given)
    assert "\n" not in str(caught.value)


def test_parameters_are_read_without_torch() -> None:
    program = "import sys; from tandem import SamplingParams, StructuredOutputsParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
