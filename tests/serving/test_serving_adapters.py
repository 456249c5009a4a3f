"""LoRA adapters over HTTP: each is a model with its own name, its content follows its folder, and speculation and swap work in a server
too."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lora_adapters import write_adapter, write_merged
from server_process import CONTROL, Server, server, until

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams

SIZES = {"q_proj": (64, 32), "o_proj": (32, 64), "up_proj": (48, 32)}
PROMPT = "the quick brown fox"


def make_adapter(folder: Path, seed: int) -> Path:
    return write_adapter(folder, SIZES, seed, rank=4)


def merged_text(model: Path, adapter: Path, to: Path) -> str:
    """Returns the completion of the model with the merged adapter."""
    llm = LLM(write_merged(model, adapter, to), max_num_seqs=16)
    return llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].text


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_adapter(tmp_path_factory.mktemp("adapters") / f"adapter-{i}", i) for i in range(3)]


@pytest.fixture(scope="module")
def running(model: Path, folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--lora-modules", f"first={folders[0]}", f"second={folders[1]}", "--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
    with server(model, tmp_path_factory.mktemp("serve"), "--served-model-name", "base", "--swap-space", "0.001", *options) as found:
        yield found
        assert "Traceback" not in found.log.read_text()


def text(running: Server, name: str, **fields: object) -> str:
    return str(running.complete(PROMPT, model=name, max_tokens=12, temperature=0, **fields)["choices"][0]["text"])


def test_each_adapter_is_a_model_that_says_what_merged_weights_say(running: Server, model: Path, folders: list[Path], tmp_path: Path) -> None:
    expected = {name: merged_text(model, folder, tmp_path / name) for name, folder in zip(("first", "second"), folders, strict=False)}
    expected["base"] = LLM(model, max_num_seqs=16).generate([PROMPT], SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].text
    assert len(set(expected.values())) == 3
    assert {name: text(running, name) for name in expected} == expected
    body = {"model": "second", "prompt": PROMPT, "sampling_params": {"max_tokens": 12, "temperature": 0}}
    assert running.post("/generate", body).json()["outputs"][0]["text"] == expected["second"]
    listed = {entry["id"]: entry for entry in running.get("/v1/models").json()["data"]}
    assert list(listed) == ["base", "first", "second"]
    assert listed["first"]["parent"] == "base" and listed["first"]["root"] == str(folders[0])


def test_an_adapter_that_is_written_anew_reaches_the_next_request(running: Server, model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "changing", 7)
    running.control("/v1/load_lora_adapter", {"lora_name": "changing", "lora_path": str(folder)})
    before = text(running, "changing")
    make_adapter(folder, 8)
    after = text(running, "changing")
    assert after != before and after == merged_text(model, folder, tmp_path / "merged")
    running.control("/v1/unload_lora_adapter", {"lora_name": "changing"})
    response = running.post("/v1/completions", {"model": "changing", "prompt": "x"})
    assert response.status_code == 404 and "base, first, second" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_name": "first", "lora_path": "."}, "unload it first"),
        ({"lora_name": "base", "lora_path": "."}, "the model's own name"),
        ({"lora_name": "new", "lora_path": "/nowhere"}, "not a folder"),
        ({"lora_name": "new", "lora_path": "."}, "adapter_config.json"),
    ],
    ids=["taken", "own", "missing", "none"],
)
def test_an_adapter_that_cannot_be_is_refused_and_not_known(running: Server, body: dict[str, str], said: str) -> None:
    response = running.post("/v1/load_lora_adapter", body, headers=CONTROL)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    assert running.post("/v1/load_lora_adapter", body).status_code == 401
    assert [entry["id"] for entry in running.get("/v1/models").json()["data"]] == ["base", "first", "second"]


def test_an_engine_that_died_comes_back_with_its_adapters(running: Server) -> None:
    before = text(running, "first")
    os.kill(running.engines()[0], signal.SIGKILL)
    until(lambda: running.metric("tandem:engine_restarts_total") == 1, "the engine's end to be noticed")
    until(lambda: running.get("/readiness").status_code == 200, "the engine to be back")
    assert text(running, "first") == before


def test_speculation_is_counted_may_be_switched_off_by_request_and_changes_no_token(running: Server) -> None:
    prompt = "1 2 3 1 2 3 1 2 3 1 2 3"
    names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [running.metric(name) for name in names]
    off = running.complete(prompt, max_tokens=24, seed=3, num_draft_tokens=0)["choices"][0]["text"]
    assert [running.metric(name) for name in names] == before
    on = running.complete(prompt, max_tokens=24, seed=3)["choices"][0]["text"]
    assert on == off
    drafts, tokens, accepted = (running.metric(name) - old for name, old in zip(names, before, strict=True))
    assert 0 < drafts <= tokens and 0 <= accepted <= tokens
