"""Pauses: every request is completed as its mode promises, and weights never change within a completion's token."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.engine.core.lifecycle import State, Transition
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import UserError, WeightVersion

PARAMS = SamplingParams(n=2, seed=1, max_tokens=30, ignore_eos=True)
OLD, NEW = WeightVersion(0, 0), WeightVersion(0, 1)


def begin(llm: LLM, steps: int, count: int = 3) -> None:
    """Adds ``count`` requests, of which an engine with four rows starts two."""
    for key in range(count):
        llm.engine.add_request(str(key), [5 + key] * (20 + 3 * key), PARAMS, key=key)
    for _ in range(steps):
        llm.engine.step()


def rest(llm: LLM) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests:
        found.update((output.request_id, output) for output in llm.engine.step())
        llm.engine.check_integrity()
    return found


def test_abort_answers_everybody_at_once_and_new_requests_wait(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4)
    begin(llm, 5)
    llm.engine.pause("abort")
    found = {output.request_id: output for output in llm.engine.step()}
    assert {c.finish_reason for output in found.values() for c in output.outputs} == {"abort"} and len(found) == 3
    assert [len(c.token_ids) for c in found["0"].outputs] == [5, 5] and not found["2"].outputs[0].token_ids
    llm.engine.add_request("later", [5] * 20, PARAMS, key=0)
    assert llm.engine.is_paused and llm.engine.step() == [] and llm.engine.counts()[State.WAITING] == 2
    llm.engine.resume()
    assert [c.finish_reason for c in rest(llm)["later"].outputs] == ["length", "length"]


def test_wait_lets_those_that_began_end_and_nobody_begin(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4, kv_cache_tokens=128)
    begin(llm, 5)
    llm.engine.pause("wait")
    found: dict[str, RequestOutput] = {}
    while len(found) < 2:
        found.update((output.request_id, output) for output in llm.engine.step())
    assert sorted(found) == ["0", "1"] and llm.engine.step() == []
    assert not any(llm.engine.counts()[state] for state in (State.PREFILLING, State.DECODING, State.PREEMPTED))
    assert llm.engine.transitions()[Transition.RECOMPUTE] > 0, "a preempted sequence has begun, and must come to its end"
    llm.engine.resume()
    found |= rest(llm)
    other = make_llm(max_num_seqs=4)
    begin(other, 0)
    assert {name: output.outputs for name, output in found.items()} == {name: output.outputs for name, output in rest(other).items()}


def test_recompute_stands_still_and_goes_on_under_new_weights(make_llm: Callable[..., LLM], make_folder: Callable[..., Path]) -> None:
    llm, unpaused = make_llm(max_num_seqs=4), make_llm(max_num_seqs=4)
    begin(llm, 9)
    begin(unpaused, 9)
    llm.engine.pause()
    assert [llm.engine.step() for _ in range(3)] == [[], [], []]
    assert llm.engine.counts() == unpaused.engine.counts()
    for one in (llm, unpaused):
        one.update_weights(read_tensors(make_folder("qwen3", 1)), NEW)
    llm.engine.resume()
    found, expected = rest(llm), rest(unpaused)
    assert {name: output.outputs for name, output in found.items()} == {name: output.outputs for name, output in expected.items()}
    assert found["0"].outputs[0].weight_versions == [OLD] * 9 + [NEW] * 21
    assert llm.engine.transitions()[Transition.UPDATE] == 4


def test_keep_is_refused_where_bits_are_promised(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="deterministic=False"):
        make_llm().engine.pause("keep")
    with pytest.raises(UserError, match="pause mode is 'sleep'"):
        make_llm().engine.pause("sleep")


def test_keep_goes_on_over_old_keys_and_values_that_nobody_else_finds(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path]
) -> None:
    llm = make_llm(max_num_seqs=4, deterministic=False, max_num_batched_tokens=40)
    begin(llm, 9, count=2)
    before = llm.engine.transitions()
    llm.engine.pause("keep")
    llm.update_weights(read_tensors(make_folder("qwen3", 1)), NEW)
    llm.engine.resume()
    found = rest(llm)
    assert llm.engine.transitions()[Transition.ADMIT] == before[Transition.ADMIT], "something was computed again"
    versions = found["0"].outputs[0].weight_versions
    assert versions[0] == OLD and versions[-1] == NEW and versions == sorted(versions)
    recomputed = make_llm(max_num_seqs=4, max_num_batched_tokens=40)
    begin(recomputed, 9, count=2)
    recomputed.update_weights(read_tensors(make_folder("qwen3", 1)), NEW)
    assert found["0"].outputs[0].raw_logprobs != rest(recomputed)["0"].outputs[0].raw_logprobs
    fresh = make_llm(weights=1)
    prompt = {"prompt_token_ids": found["0"].prompt_token_ids + found["0"].outputs[0].token_ids}
    again, expected = (one.generate([prompt], PARAMS, request_keys=[0])[0] for one in (llm, fresh))
    assert again.num_cached_tokens == 0
    assert [c.raw_logprobs for c in again.outputs] == [c.raw_logprobs for c in expected.outputs]


def test_a_failed_update_under_keep_leaves_everything_as_it_was(make_llm: Callable[..., LLM]) -> None:
    llm, other = make_llm(max_num_seqs=4, deterministic=False), make_llm(max_num_seqs=4)
    for one in (llm, other):
        begin(one, 9)
    llm.engine.pause("keep")
    with pytest.raises(UserError):
        llm.update_weights({}, NEW)
    llm.engine.resume()
    assert {k: v.outputs for k, v in rest(llm).items()} == {k: v.outputs for k, v in rest(other).items()}


def test_generate_says_that_the_engine_is_paused(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.engine.pause()
    with pytest.raises(UserError, match=r"engine\.resume\(\)"):
        llm.generate("sort", PARAMS)
