"""The limit of prompt tokens beside decoding sequences, which is tuned from measured times."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tandem.config.engine import EngineArgs
from tandem.engine.core.prefill_budget import PrefillBudget
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import Scheduler, SchedulerConfig
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.types import UserError


def simulate(budget: PrefillBudget, decode_s: float, token_s: float, steps: int, sequences: int = 16, fixed_s: float = 0.0) -> list[tuple[int, float]]:
    """Prompt tokens and seconds of each of ``steps`` steps beside ``sequences`` sequences, while prompts wait without end. A step takes ``decode_s`` and, with
    prompt tokens, ``fixed_s`` and ``token_s`` for each of them."""
    taken = []
    for _ in range(steps):
        tokens = budget.limit(sequences)
        assert tokens is not None
        seconds = decode_s + (fixed_s + token_s * tokens if tokens else 0.0)
        budget.observe(sequences, tokens, seconds)
        taken.append((tokens, seconds))
    return taken


@pytest.mark.parametrize(("decode_s", "token_s", "fixed_s"), [(0.01, 1e-4, 0.0), (0.05, 1e-5, 0.002), (0.002, 2e-5, 2e-4)])
@pytest.mark.parametrize("slowdown", [1.5, 2.0, 4.0])
def test_steps_with_prompt_tokens_take_at_most_the_slowdown_and_use_what_it_allows(decode_s: float, token_s: float, fixed_s: float, slowdown: float) -> None:
    taken = simulate(PrefillBudget(slowdown), decode_s, token_s, 300, fixed_s=fixed_s)
    settled = [(tokens, seconds) for tokens, seconds in taken[100:] if tokens]
    best = ((slowdown - 1) * decode_s - fixed_s) / token_s
    assert best > 16 and all(0.8 * best <= tokens <= best + 1 for tokens, _ in settled)
    assert max(seconds for _, seconds in settled) <= slowdown * decode_s * 1.001


def test_every_step_but_one_in_sixty_four_computes_at_least_a_block_of_the_prompt() -> None:
    taken = simulate(PrefillBudget(1.01), 0.001, 1.0, 1000)
    assert sum(tokens == 0 for tokens, _ in taken) <= 1 + 1000 // 64
    assert {tokens for tokens, _ in taken} == {0, 16}


def test_a_step_that_another_program_delays_does_not_stop_prompts_for_long() -> None:
    budget = PrefillBudget(2.0)
    before = simulate(budget, 0.01, 1e-4, 100)[-1][0]
    budget.observe(16, before, 10.0)
    after = [tokens for tokens, _ in simulate(budget, 0.01, 1e-4, 10)]
    assert min(after) >= 0.5 * before and after[-1] >= 0.8 * before


def test_the_limit_follows_sequences_that_became_slower() -> None:
    budget = PrefillBudget(2.0)
    short = simulate(budget, 0.01, 1e-4, 300)[-1][0]
    long = simulate(budget, 0.03, 1e-4, 3000)[-1][0]
    assert long >= 2 * short


def test_nothing_limits_a_prompt_beside_which_nothing_decodes() -> None:
    assert PrefillBudget(2.0).limit(0) is None


def test_chunks_beside_decoding_sequences_keep_to_the_budget_and_the_prompt_is_computed_whole() -> None:
    budget = PrefillBudget(2.0)
    kv_cache = KVCacheManager(256, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(4, 1024), kv_cache, lambda sequences: None, prefill_budget=budget)
    numbers = itertools.count()

    def add(length: int) -> None:
        request = Request(str(next(numbers)), None, [1] * length, SamplingParams(), 0, 0, 0, max_length=length + 500)
        scheduler.add_group([Sequence(request, 0, 0)])

    add(20)
    assert [len(chunk.tokens) for chunk in scheduler.schedule().prefills] == [20]
    budget.observe(0, 20, 0.002)
    scheduler.schedule()
    budget.observe(1, 0, 0.01)
    add(2000)
    chunks = []
    while sum(chunks) < 2000:
        limit = budget.limit(1)
        step = scheduler.schedule()
        sizes = [len(chunk.tokens) for chunk in step.prefills]
        assert limit is not None and sum(sizes) <= limit and len(step.decode_rows) == 1
        chunks += sizes
        budget.observe(1, sum(sizes), 0.01 + 1e-4 * sum(sizes))
    assert sum(chunks) == 2000 and 90 <= chunks[len(chunks) // 2] <= 100


def test_tokens_are_the_same_with_a_limit_of_the_slowdown(make_llm: Callable[..., LLM]) -> None:
    prompts = [{"prompt_token_ids": [1 + (7 * i + j) % 38 for j in range(length)]} for i, length in enumerate((5, 90, 11, 100, 3))]
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    found = []
    for slowdown in (None, 1.01):
        llm = make_llm(max_num_seqs=3, max_num_batched_tokens=64, max_prefill_slowdown=slowdown)
        found.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("values", "line"), [
    ({"max_prefill_slowdown": 1.0}, "max_prefill_slowdown is 1.0; it must be above 1"),
    ({"max_prefill_slowdown": float("nan")}, "max_prefill_slowdown is nan; it must be above 1"),
    ({"max_prefill_slowdown": 2.0, "enable_chunked_prefill": False, "max_model_len": 64}, "leave it out, or enable chunked prefill"),
])  # fmt: skip
def test_a_slowdown_that_cannot_be_kept_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        EngineArgs(model="m", **values).check()
