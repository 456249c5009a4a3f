"""``AsyncLLM``: requests of several tasks in one engine process, with vLLM's interface."""

import asyncio
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM, AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind, RunError, SamplingParams, StructuredOutputsParams, UserError

LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM.from_engine_args(EngineArgs(model=str(model), max_num_seqs=16)) as running:
        yield running


async def outputs_of(engine: AsyncLLM, prompt: str, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt=prompt, sampling_params=params, request_id=request_id)]


def test_concurrent_requests_give_the_completions_of_an_llm(engine: AsyncLLM, llm: LLM) -> None:
    asked = {f"the quick {i}": SamplingParams(max_tokens=12, seed=i, n=2, logprobs=1) for i in range(4)}
    asked["a choice:"] = SamplingParams(max_tokens=12, seed=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), logit_bias={5: 2.0})

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(outputs_of(engine, prompt, params, prompt) for prompt, params in asked.items()))

    # Twice: an engine outlives an event loop.
    asyncio.run(all_of_them())
    for (prompt, params), outputs in zip(asked.items(), asyncio.run(all_of_them()), strict=True):
        (expected,) = llm.generate(prompt, params)
        assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == (prompt, expected.prompt_token_ids)
        assert outputs[-1].outputs == expected.outputs and outputs[-1].finished
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)


def test_each_output_holds_what_its_kind_says(engine: AsyncLLM, llm: LLM) -> None:
    def run(kind: RequestOutputKind | None) -> list[RequestOutput]:
        return asyncio.run(outputs_of(engine, "over the", SamplingParams(max_tokens=10, seed=3, ignore_eos=True, output_kind=kind), "kind"))

    (expected,) = llm.generate("over the", SamplingParams(max_tokens=10, seed=3, ignore_eos=True))
    tokens = expected.outputs[0].token_ids
    deltas, (final,) = run(RequestOutputKind.DELTA), run(RequestOutputKind.FINAL_ONLY)
    assert [token for output in deltas for completion in output.outputs for token in completion.token_ids] == tokens == final.outputs[0].token_ids
    assert "".join(completion.text for output in deltas for completion in output.outputs) == expected.outputs[0].text
    for cumulative in (run(None), run(RequestOutputKind.CUMULATIVE)):
        seen = [output.outputs[0].token_ids for output in cumulative]
        assert len(seen) > 3 and seen[-1] == tokens and all(tokens[: len(part)] == part for part in seen)


def test_an_aborted_request_ends_with_its_tokens_and_one_that_is_left_is_dropped(engine: AsyncLLM) -> None:
    async def abort() -> RequestOutput:
        async for output in engine.generate("lazy", LONG, "aborted"):
            if len(output.outputs[0].token_ids) == 3:
                await engine.abort("aborted")
        return output

    async def leave() -> None:
        outputs = engine.generate("lazy", LONG, "left")
        await anext(outputs)
        with pytest.raises(UserError, match="'left' is in use"):
            await outputs_of(engine, "lazy", LONG, "left")
        await outputs.aclose()
        # The answer of the dropped request, which is still to come, is not that of the next with its id.
        again = (await outputs_of(engine, "lazy", SamplingParams(max_tokens=20, ignore_eos=True), "left"))[-1]
        assert (again.request_id, again.outputs[0].finish_reason, len(again.outputs[0].token_ids)) == ("left", "length", 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await outputs_of(engine, "lazy", LONG, "cancelled")
        async with asyncio.timeout(30):
            while engine._streams:
                await asyncio.sleep(0.01)

    ended = asyncio.run(abort())
    assert ended.outputs[0].finish_reason == "abort" and 3 <= len(ended.outputs[0].token_ids) < 400
    asyncio.run(leave())
    assert engine._streams == engine._names == {}


def test_mistakes_are_user_errors_and_the_engine_goes_on(engine: AsyncLLM) -> None:
    for prompt, params, says in (
        ({"prompt_token_ids": [10**6]}, SamplingParams(), "token id 1000000"),
        ({"prompt_ids": [1]}, SamplingParams(), "prompt_token_ids"),
        ("fox " * 400, SamplingParams(), "max_model_len"),
        ("fox", SamplingParams(logit_bias={10**6: 1}), "logit_bias names token 1000000"),
    ):
        with pytest.raises(UserError, match=says):
            asyncio.run(outputs_of(engine, prompt, params, "wrong"))  # type: ignore[arg-type]
    assert asyncio.run(outputs_of(engine, "fox", SamplingParams(max_tokens=1), "right"))[-1].finished


@pytest.mark.full
def test_a_dead_or_stopped_engine_ends_every_request_with_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        AsyncLLM.from_engine_args(EngineArgs(model=str(tmp_path)))
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(model)))

    async def killed() -> None:
        outputs = engine.generate("lazy", LONG, "1")
        await anext(outputs)
        os.kill(engine._info.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"the engine died: .*SIGKILL.*create a new AsyncLLM"):
            while True:
                await anext(outputs)
        with pytest.raises(RunError, match="the engine died"):
            await outputs_of(engine, "lazy", LONG, "2")

    asyncio.run(killed())
    assert not engine.is_running
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RunError, match="shut down"):
        asyncio.run(outputs_of(engine, "lazy", LONG, "3"))
    with pytest.raises(ProcessLookupError):
        os.kill(engine._info.pid, 0)


def answers(llm: LLM, prompts: list[str], params: SamplingParams) -> list[str]:
    return [f"{prompt!r} {llm.generate(prompt, params)[0].outputs[0].text!r}" for prompt in prompts]


def run_program(name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the lines that a program of ``vllm_programs`` prints."""
    monkeypatch.setattr(sys, "argv", [name, str(model)])
    runpy.run_path(str(Path(__file__).parent / "vllm_programs" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_programs_written_for_vllm_run_with_the_import_changed(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    basic = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=0)
    prompts = ["the quick brown", "over the lazy", "1234 and", "naïve"]
    expected = [f"{prompt!r} {output.outputs[0].text!r}" for prompt, output in zip(prompts, llm.generate(prompts, basic), strict=True)]
    assert run_program("basic", model, monkeypatch, capsys) == expected

    pytest.importorskip("jinja2")
    short = "[system] You are brief.\n[user] the quick\n[assistant] "
    long = "[system] You are brief.\n[user] the quick\n[assistant] brown fox\n[user] over the\n[assistant] "
    rendered = [long, long, short, "You are brief. the quick brown fox over the jump"]
    found = run_program("chat", model, monkeypatch, capsys)
    assert found[:-1] == answers(llm, rendered, SamplingParams(temperature=0, max_tokens=6))
    (last,) = answers(llm, ["lazy dog"], SamplingParams(temperature=0, max_tokens=6))
    assert found[-1] == last.replace("'lazy dog'", "None", 1)


@pytest.mark.full
def test_a_streaming_program_written_for_vllm_runs_with_the_import_changed(
    model: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, seed=42)
    assert run_program("streaming", model, monkeypatch, capsys) == answers(llm, ["the quick brown", "over the lazy"], drawn)


def test_methods_of_vllm_that_are_not_here_are_answered_with_what_to_use(llm: LLM) -> None:
    fixes = {"reward": r"encode\(prompts, pooling_task='classify'\)", "beam_search": "ask for n samples", "sleep": r"llm\.engine\.sleep"}
    for name, says in fixes.items():
        with pytest.raises(UserError, match=f"LLM has no '{name}': .*{says}"):
            getattr(llm, name)(["text"])
    assert not hasattr(llm, "reward") and not hasattr(llm, "no_such")
    with pytest.raises(UserError, match=r"no 'apply_chat_template': use llm\.chat\(messages\)"):
        llm.get_tokenizer().apply_chat_template([])  # type: ignore[attr-defined]
