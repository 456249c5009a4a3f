"""Every listed family, served by two tensor-parallel ranks: the tokens and the bits of one process, or a refusal that names the family and the setting."""

from pathlib import Path
from typing import Any

import pytest
from listed_families import SEQUENCES, Tiny

from tandem import LLM, SamplingParams
from tandem.model.huggingface.model_config import read_shapes
from tandem.types import UserError

REFUSED = ("olmo2", "olmo3")
"""Families whose norms of queries and keys are over all heads."""
PROMPTS: list[Any] = [{"prompt_token_ids": sequence.tolist()} for sequence in SEQUENCES]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def start(folder: Path, ranks: int) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=80, max_num_seqs=8, max_num_batched_tokens=23, tensor_parallel_size=ranks)


@pytest.mark.full
def test_two_ranks_have_the_tokens_and_bits_of_one_process_or_the_family_is_refused_by_name(tiny: Tiny) -> None:
    assert read_shapes(tiny.folder).qk_norm_all_heads is (tiny.family in REFUSED)
    if tiny.family in REFUSED:
        refusal = f"^engine tensor_parallel_size is 2: this {tiny.family} model has norms of queries and keys over all heads; leave it at 1$"
        with pytest.raises(UserError, match=refusal):
            start(tiny.folder, 2)
        return
    with start(tiny.folder, 1) as one, start(tiny.folder, 2) as two:
        expected, ours = ([answer.outputs for answer in llm.generate(PROMPTS, GREEDY)] for llm in (one, two))
        two.engine.check_integrity()
    assert all(len(output.token_ids) == len(output.raw_logprobs) == 20 for outputs in expected for output in outputs)
    assert ours == expected
