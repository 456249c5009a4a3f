"""Asynchronous scheduling and graphs: the same tokens and bits as synchronous steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.preemption import Preemption
from tandem.engine.executor.cuda_graphs import Bucket, DecodeGraphs, Replay, bucket_of
from tandem.engine.executor.model_runner import ModelRunner
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.types import RunError, UserError, WeightVersion

PROMPTS = ["q", "sort 4 1 9 2", "the quick brown fox jumps over the lazy dog", "x" * 48]
PARAMS = [
    SamplingParams(n=3, max_tokens=40, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True),
    SamplingParams(n=2, max_tokens=1, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.0, stop=["e"]),
    SamplingParams(n=2, max_tokens=33, seed=5, top_k=7, stop_token_ids=[5, 9], ignore_eos=True),
]


def generate(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[list[CompletionOutput]]:
    answers = llm.generate(PROMPTS, params, request_keys=[0, 1, 2, 3])
    llm.engine.check_integrity()
    return [answer.outputs for answer in answers]


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[CompletionOutput]]]:
    return {}


@pytest.fixture
def expected(make_llm: Callable[..., LLM], known: dict[str, Any]) -> list[list[CompletionOutput]]:
    if not known:
        known["plain"] = generate(make_llm(async_scheduling=False))
    return known["plain"]  # type: ignore[no-any-return]


def captured(step: Replay) -> Replay:
    """The behaviour of a CUDA graph: the same work again on the same tensors."""
    return step


def with_graphs(llm: LLM) -> DecodeGraphs:
    """Gives ``llm`` graphs whose replay on a CPU is the step itself over the graph's tensors."""
    return llm.engine._runner.make_graphs(captured)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    {"kv_cache_tokens": 128, "enable_prefix_caching": False},
    {"kv_cache_tokens": 128, "swap_space": 2**-12, "preemption_mode": "swap"},
    {"batching": "static", "max_num_batched_tokens": 128, "max_num_seqs": 4},
    {"cache_implementation": "static", "kv_cache_tokens": 512, "max_num_seqs": 4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_launched_ahead_change_no_bit(
    make_llm: Callable[..., LLM], expected: list[list[CompletionOutput]], settings: dict[str, Any]
) -> None:
    llm = make_llm(async_scheduling=True, **settings)
    ahead = Ahead(llm)
    assert generate(llm) == expected
    assert ahead.launched_ahead > 0
    if "kv_cache_tokens" in settings and "cache_implementation" not in settings:
        counts = llm.engine.transitions()
        assert counts[Transition.RECOMPUTE] + counts[Transition.SWAP_OUT] > 0
    assert generate(llm) == expected, "warm"


class Ahead:
    """Counts the steps of an engine that were launched before the previous one was synchronized."""

    def __init__(self, llm: LLM) -> None:
        self.launched_ahead = self._under_way = 0
        runner: ModelRunner = llm.engine._runner
        execute_model, synchronize = runner.execute_model, runner.synchronize

        def counted_execute(*given: Any) -> Any:
            self.launched_ahead += self._under_way > 0
            self._under_way += 1
            return execute_model(*given)

        def counted_synchronize(*given: Any) -> Any:
            self._under_way -= 1
            return synchronize(*given)

        runner.execute_model, runner.synchronize = counted_execute, counted_synchronize  # type: ignore[method-assign]


def test_replayed_steps_change_no_bit_and_batches_are_filled_up(make_llm: Callable[..., LLM], expected: list[list[CompletionOutput]]) -> None:
    llm = make_llm(async_scheduling=True, max_num_seqs=6)
    graphs = with_graphs(llm)
    assert generate(llm) == expected
    assert generate(llm) == expected
    rows = llm.engine._runner.batch.on_device
    assert int(rows.length[rows.padding]) == 1
    # Five rows and three are no bucket sizes, so both were padded.
    assert {bucket.rows for bucket in graphs._graphs} <= {1, 2, 4, 6}
    assert graphs._graphs


def test_graphs_are_made_anew_after_an_update_and_a_sleep(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], expected: list[list[CompletionOutput]]
) -> None:
    llm = make_llm(weights=1, async_scheduling=True)
    graphs = with_graphs(llm)
    generate(llm)
    assert graphs._graphs
    llm.update_weights(read_tensors(make_folder("qwen3", 0)), WeightVersion(0, 7))
    made: list[int] = []
    graphs._capture = lambda step: (made.append(1), step)[1]
    updated = generate(llm)
    assert [[c.token_ids for c in answer] for answer in updated] == [[c.token_ids for c in answer] for answer in expected]
    assert [[c.raw_logprobs for c in answer] for answer in updated] == [[c.raw_logprobs for c in answer] for answer in expected]
    before = len(made)
    assert before > 0
    llm.engine.sleep()
    assert not graphs._graphs
    llm.engine.wake_up()
    assert generate(llm) == updated
    assert len(made) > before


def test_an_engine_that_sleeps_at_level_2_holds_no_packed_weights_and_no_cache_until_it_is_updated(
    make_llm: Callable[..., LLM], make_folder: Callable[..., Path], expected: list[list[CompletionOutput]]
) -> None:
    llm = make_llm()
    held = llm.engine.kv_cache_bytes
    assert generate(llm) == expected and held > 0 and llm.engine.decoder.is_packed
    llm.engine.sleep(level=2)
    assert llm.engine.is_sleeping and llm.engine.kv_cache_bytes == 0 and not llm.engine.decoder.is_packed
    llm.update_weights(read_tensors(make_folder("qwen3", 0)), WeightVersion(0, 7))
    llm.engine.wake_up()
    assert llm.engine.kv_cache_bytes == held
    answers = [[(one.token_ids, one.raw_logprobs) for one in answer] for answer in generate(llm)]
    assert answers == [[(one.token_ids, one.raw_logprobs) for one in answer] for answer in expected]


def test_a_step_that_cannot_be_captured_goes_on_without_graphs(
    make_llm: Callable[..., LLM], expected: list[list[CompletionOutput]], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(async_scheduling=True)
    graphs = with_graphs(llm)

    def fails(step: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphs._capture = fails
    assert generate(llm) == expected
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        "CUDA graphs: a decoding step cannot be captured (operation not permitted when stream is capturing); continuing without graphs"
    ]


def test_a_bucket_holds_what_it_is_asked_for_and_little_more() -> None:
    for rows in range(1, 257):
        for columns in (1, 16, 17, 100, 512):
            bucket = bucket_of(rows, columns, 256, 512)
            assert rows <= bucket.rows < 2 * rows + 8 and columns <= bucket.columns <= max(16, 2 * columns)
    assert len({bucket_of(rows, 1, 256, 512).rows for rows in range(1, 257)}) == 17
    assert bucket_of(5, 3, 6, 8) == Bucket(6, 8)


def test_requests_whose_tokens_the_host_must_see_stand_among_others(make_llm: Callable[..., LLM]) -> None:
    mixed = [PARAMS[0], SamplingParams(max_tokens=9, logprobs=2, seed=3), SamplingParams(max_tokens=12, frequency_penalty=0.7, seed=1), PARAMS[3]]
    llm = make_llm(async_scheduling=True)
    ahead = Ahead(llm)
    assert generate(llm, mixed) == generate(make_llm(async_scheduling=False), mixed)
    # When these are finished, the others are launched ahead.
    assert ahead.launched_ahead > 0


def test_an_urgent_request_preempts_and_changes_no_bit(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=40, seed=4, ignore_eos=True)
    found = []
    for is_ahead in (False, True):
        llm = make_llm(async_scheduling=is_ahead, max_num_seqs=2)
        engine, answers = llm.engine, {}
        for i in range(2):
            engine.add_request(f"late {i}", [3 + i] * 20, params, key=i, priority=5)
        for _ in range(4):
            engine.step()
        engine.add_request("urgent", [9] * 8, params, key=7, priority=0)
        while engine.has_unfinished_requests:
            answers |= {answer.request_id: answer.outputs for answer in engine.step()}
        engine.check_integrity()
        assert engine.transitions()[Transition.RECOMPUTE] > 0
        found.append(answers)
    assert found[0] == found[1]


def test_streams_aborts_pauses_and_updates_meet_a_step_under_way(make_llm: Callable[..., LLM], make_folder: Callable[..., Path]) -> None:
    streamed = SamplingParams(max_tokens=30, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    whole = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    results = []
    for is_ahead in (False, True):
        engine = make_llm(async_scheduling=is_ahead).engine
        engine.add_request("stream", [4, 5, 6], streamed, key=0)
        engine.add_request("whole", [7, 8, 9], whole, key=1)
        engine.add_request("gone", [7, 8], whole, key=2)
        tokens: list[int] = []
        answers = {}
        for step in range(400):
            if step == 5:
                assert engine.abort("gone")
                engine.check_integrity()
            if step == 9:
                engine.pause("recompute")
                engine.update_weights(read_tensors(make_folder("qwen3", 0)), WeightVersion(0, 1))
                engine.resume()
            for output in engine.step():
                if output.request_id == "stream":
                    tokens += output.outputs[0].token_ids
                else:
                    answers[output.request_id] = output.outputs[0]
            if not engine.has_unfinished_requests:
                break
        engine.check_integrity()
        results.append((tokens, answers["whole"].token_ids, answers["whole"].raw_logprobs, answers["gone"].finish_reason))
    assert results[0] == results[1]


@pytest.mark.parametrize("where", ["execute_model", "synchronize"])
def test_a_step_that_fails_ahead_loses_nothing(make_llm: Callable[..., LLM], expected: list[list[CompletionOutput]], where: str) -> None:
    llm = make_llm(async_scheduling=True)
    engine, runner = llm.engine, llm.engine._runner
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), llm.get_tokenizer().encode(prompt, add_special_tokens=True), params, prompt=prompt, key=i)
    for _ in range(6):
        engine.step()
    own = getattr(runner, where)
    setattr(runner, where, lambda *_: (_ for _ in ()).throw(RunError("the device is lost")))
    with pytest.raises(RunError, match="device is lost"):
        engine.step()
    setattr(runner, where, own)
    answers = {}
    while engine.has_unfinished_requests:
        answers |= {int(answer.request_id): answer.outputs for answer in engine.step()}
    engine.check_integrity()
    assert [answers[i] for i in range(len(PROMPTS)) if i in answers] == [expected[i] for i in range(len(PROMPTS)) if i in answers]
    assert {0, 3} <= answers.keys()


def test_no_plan_is_made_ahead_that_could_take_a_block_away(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(async_scheduling=True, kv_cache_tokens=128, enable_prefix_caching=False)
    engine = llm.engine
    own = Preemption.preempt_one

    def watched(*given: Any, **named: Any) -> Any:
        assert engine._core.in_flight is None
        return own(*given, **named)

    monkeypatch.setattr(Preemption, "preempt_one", watched)
    generate(llm)
    assert engine.transitions()[Transition.RECOMPUTE] > 0


@pytest.mark.parametrize("wrong", [{"async_scheduling": "yes"}, {"enforce_eager": "on"}])
def test_an_unknown_switch_is_refused(make_llm: Callable[..., LLM], wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match="must be true or false"):
        make_llm(**wrong)


def test_overlap_with_speculation_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(UserError, match="speculation needs each token"):
        make_llm(async_scheduling=True, speculative_config={"method": "ngram"})


@pytest.mark.parametrize(
    ("device", "wrong"),
    [("cuda:99", "this machine has . CUDA devices, use one of them or 'cpu'"), ("gpu", "must be 'cpu', 'cuda'"), ("meta", "must be 'cpu', 'cuda'")],
)
def test_a_device_that_is_not_there_is_refused(make_llm: Callable[..., LLM], device: str, wrong: str) -> None:
    with pytest.raises(UserError, match=f"engine device is '{device}'; .*{wrong}"):
        make_llm(device=device)
