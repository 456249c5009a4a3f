"""A server that follows a run: each published version is served whole, in-flight requests keep theirs, and what dies or is damaged changes nothing."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from server_process import Server, server, until
from tiny_model import make_model

sys.path.append(str(Path(__file__).parents[1] / "weight_transfer"))
from whole_tensors import converted

from tandem.config.bundled import recipe_file
from tandem.config.load import read_yaml
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.huggingface.model_folder import read_tensors
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.serving.weight_versions import HEADER
from tandem.storage.files import open_storage
from tandem.types import WeightVersion
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.stored.storage_writer import StorageWriter

PROMPT = "the quick brown"


@dataclass
class FakeRun:
    """The folder of a run whose trainer is this process."""

    directory: Path
    start: Path
    buffers: WeightBuffers = field(default_factory=lambda: WeightBuffers.create("followed", 8 << 20))

    def __post_init__(self) -> None:
        recipe = {"model": {"path": str(self.start)}, "task": {"name": "sort"}, "rollout": {"max_tokens": 16}, "run": {"max_steps": 3}}
        self.directory.mkdir()
        (self.directory / "config.yaml").write_text(yaml.safe_dump(recipe))
        (self.directory / "lock").write_text(f"{os.getpid()}\n")
        self.begin()

    def begin(self) -> None:
        """A store of its own, as each start of a run makes one."""
        folder = self.directory / "pod"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.store = EmbeddedStore(folder / "store.sqlite")
        self.writer = WeightWriter(WeightBuffers.open(self.buffers.names), self.store, 1)

    def publish(self, model: Path, step: int, incarnation: int = 1) -> None:
        torch.set_num_threads(1)
        self.writer.publish(converted([(name, tensor.clone()) for name, tensor in read_tensors(model)]), WeightVersion(incarnation, step))


@pytest.fixture
def three_models(tmp_path: Path, tokenizer_folder: Path) -> list[Path]:
    return [make_model(tmp_path / f"model-{seed}", tokenizer_folder, seed) for seed in range(3)]


@pytest.fixture
def followed(tmp_path: Path, three_models: list[Path]) -> Iterator[tuple[FakeRun, Server]]:
    run = FakeRun(tmp_path / "run", three_models[0])
    with server(run.directory, tmp_path, "--follow") as running:
        yield run, running
    run.buffers.close()


def greedy(model: Path, tokens: int = 12) -> list[int]:
    with LLM(str(model), seed=0) as llm:
        return list(llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=tokens))[0].outputs[0].token_ids)


def ask(running: Server, tokens: int = 12, **fields: Any) -> httpx.Response:
    return running.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": tokens, "return_token_ids": True, "ignore_eos": True, **fields})


def test_each_version_is_served_whole_and_named_in_header_and_body(followed: tuple[FakeRun, Server], three_models: list[Path]) -> None:
    run, running = followed
    for step, model in enumerate(three_models):
        if step:
            run.publish(model, step)
        version = [1, step] if step else [0, 0]
        until(lambda version=version: ask(running, 1).json()["weight_versions"] == [version], f"the weights of step {step}")
        answer = ask(running)
        assert answer.headers[HEADER] == f"{version[0]}.{step}" and answer.json()["weight_versions"] == [version]
        expected = greedy(model)
        assert answer.json()["choices"][0]["token_ids"][: len(expected)] == expected
    assert running.log.read_text().count("; staged before, taken in ") == 2
    generated = running.post("/generate", {"prompt": PROMPT, "sampling_params": {"max_tokens": 2}})
    assert generated.headers[HEADER] == "1.2" and generated.json()["weight_versions"] == [[1, 2]]


def test_a_request_in_flight_keeps_its_weights_and_the_next_has_the_new_ones(followed: tuple[FakeRun, Server], three_models: list[Path]) -> None:
    run, running = followed
    versions: list[list[list[int]]] = []
    began = threading.Event()

    def read_stream() -> None:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.headers[HEADER] == "0.0"
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    began.set()
                    versions.append(json.loads(line.removeprefix("data: "))["weight_versions"])

    reader = threading.Thread(target=read_stream)
    reader.start()
    assert began.wait(60)
    run.publish(three_models[1], 1)
    until(lambda: running.log.read_text().count("serving the weights of step 1") == 1, "the update")
    reader.join(60)
    assert len(versions) > 10 and all(each == [[0, 0]] for each in versions)
    assert ask(running, 2).json()["weight_versions"] == [[1, 1]]


@pytest.mark.full
def test_damaged_weights_are_not_served_and_a_dead_engine_and_a_resumed_run_are_followed(followed: tuple[FakeRun, Server], three_models: list[Path]) -> None:
    run, running = followed
    run.publish(three_models[1], 1)
    until(lambda: ask(running, 1).json()["weight_versions"] == [[1, 1]], "the weights of step 1")
    # An engine that dies begins with the published weights, not with those of the folder.
    (engine,) = running.engines()
    os.kill(engine, signal.SIGKILL)
    until(lambda: running.engines() not in ([], [engine]) and running.get("/readiness").status_code == 200, "another engine")
    answer = ask(running)
    expected = greedy(three_models[1])
    assert answer.json()["weight_versions"] == [[1, 1]] and answer.json()["choices"][0]["token_ids"][: len(expected)] == expected
    # A bit flips before the engine has read them.
    original = run.writer._write

    def flipping(segment: Any, *arguments: Any) -> Any:
        digests = original(segment, *arguments)
        segment.memory[5] ^= 1
        return digests

    run.writer._write = flipping  # type: ignore[method-assign]
    run.publish(three_models[2], 2)
    until(lambda: "does not have its digest" in running.log.read_text(), "the damage to be found")
    assert ask(running, 1).json()["weight_versions"] == [[1, 1]]
    run.writer._write = original  # type: ignore[method-assign]
    # The run is started again, with a store of its own and a new incarnation.
    run.begin()
    run.publish(three_models[2], 2, incarnation=2)
    until(lambda: ask(running, 1).json()["weight_versions"] == [[2, 2]], "the weights of the resumed run")


@pytest.mark.full
def test_a_server_elsewhere_follows_a_run_by_the_storage_that_it_writes_to(tmp_path: Path, three_models: list[Path]) -> None:
    """It has the storage and the model's folder, and nothing else of the run; the storage is damaged, repaired and away meanwhile."""
    run, stored = FakeRun(tmp_path / "run", three_models[0]), tmp_path / "stored"
    writer = StorageWriter(open_storage(str(stored), create=True), run.buffers.segments, 100)

    def publish(model: int, step: int) -> Path:
        run.publish(three_models[model], step)
        published = current(run.store)
        assert published is not None
        writer.write(published[0], None)
        assert writer.wait(60)
        return stored / f"weights-000001-{step:010d}.anchor"

    def is_served(running: Server, model: int, step: int) -> None:
        until(lambda: ask(running, 1).json()["weight_versions"] == [[1, step]], f"the weights of step {step}")
        expected = greedy(three_models[model])
        assert ask(running).json()["choices"][0]["token_ids"][: len(expected)] == expected

    with server(three_models[0], tmp_path, "--follow", str(stored)) as running:
        publish(1, 1)
        is_served(running, 1, 1)
        file = publish(2, 2)
        is_served(running, 2, 2)
        stored.rename(tmp_path / "away")
        until(lambda: "the weights stay as they are" in running.log.read_text(), "the storage to be missed")
        assert ask(running, 1).json()["weight_versions"] == [[1, 2]]
        shutil.rmtree(tmp_path / "away")
        stored.mkdir()
        file = publish(1, 3)
        is_served(running, 1, 3)
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        (stored / "weights-000001-0000000004.anchor").write_bytes(data)
        until(lambda: "'weights-000001-0000000004.anchor'" in running.log.read_text(), "the damage to be named")
        assert ask(running, 1).json()["weight_versions"] == [[1, 3]]
        publish(2, 4)
        is_served(running, 2, 4)
    writer.close()
    run.buffers.close()


@pytest.mark.full
def test_an_engine_that_is_killed_while_it_stages_begins_again_with_the_new_weights(followed: tuple[FakeRun, Server], three_models: list[Path]) -> None:
    run, running = followed
    (engine,) = running.engines()
    os.kill(engine, signal.SIGSTOP)
    run.publish(three_models[1], 1)
    time.sleep(1.0)  # It is asked to stage them, and cannot answer.
    assert "serving the weights of step 1" not in running.log.read_text()
    os.kill(engine, signal.SIGKILL)
    until(lambda: ask(running, 1).json().get("weight_versions") == [[1, 1]], "an engine with the weights of step 1")
    expected = greedy(three_models[1])
    assert ask(running).json()["choices"][0]["token_ids"][: len(expected)] == expected
    run.publish(three_models[2], 2)
    until(lambda: ask(running, 1).json()["weight_versions"] == [[1, 2]], "the weights of step 2")


@pytest.mark.parametrize("what", ["no run", "ended", "on data", "adapter"])
def test_what_cannot_be_followed_is_refused_in_one_line(what: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    from tandem.jobs.followed_run import followed_run
    from tandem.types import UserError

    run = tmp_path / "run"
    run.mkdir()
    recipe: dict[str, Any] = {"model": {"path": str(tmp_path)}, "task": {"name": "sort"}}
    if what == "on data":
        recipe = read_yaml(recipe_file("pretrain"))
    if what == "adapter":
        recipe["trainer"] = {"lora": {"rank": 4}}
    if what != "no run":
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    if what == "ended":
        (run / "model").mkdir()
    line = {
        "no run": "is not a run", "ended": r"has ended; serve its model: .* serve .*/model", "on data": "publishes no weights", "adapter": "trains an adapter",
    }  # fmt: skip
    with pytest.raises(UserError, match=line[what]):
        followed_run(run, "wait", print)
