"""Rolling updates: no request fails, whether servers take the version or go back to the one before, and a stream ends with the weights it began with."""

import asyncio
import itertools
import json
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway
from http_processes import COMMAND, LIMIT_S, until
from server_groups import Running, running_group
from test_gateway_routes import entry
from test_gateway_servers import serving

from tandem.cli.main import main
from tandem.gateway.servers.places import Machine
from tandem.gateway.servers.update import choose_method
from tandem.gateway.servers.versions import find_version, have_equal_descriptions, stage_of, with_own_weights
from tandem.model_registry.local import LocalRegistry
from tandem.types import UserError, WeightVersion


def test_only_weights_are_loaded_in_place_and_only_while_another_server_answers() -> None:
    cases = itertools.product(("auto", "in_place", "replace"), (True, False), (0, 1), (True, False))
    chosen = {case: choose_method(case[0], are_equal=case[1], others_ready=case[2], has_room=case[3]) for case in cases}
    assert {case for case, method in chosen.items() if method == "in_place"} == {
        ("auto", True, 1, True), ("auto", True, 1, False), *(("in_place", True, others, room) for others in (0, 1) for room in (True, False))
    }  # fmt: skip
    assert all(method == ("surge" if case[3] else "stop_first") for case, method in chosen.items() if method != "in_place")


def test_models_that_differ_in_more_than_weights_are_not_equal(tmp_path: Path) -> None:
    left, right = tmp_path / "left", tmp_path / "right"
    for folder in (left, right):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text(json.dumps({"hidden_size": 32, "_name_or_path": folder.name}))
        (folder / "model.safetensors").write_text(folder.name)
    assert have_equal_descriptions(str(left), str(right))
    (right / "tokenizer.json").write_text("{ }")
    assert not have_equal_descriptions(str(left), str(right))
    (right / "tokenizer.json").write_text("{}")
    (right / "generation_config.json").write_text("{}")
    assert not have_equal_descriptions(str(left), str(right))
    (left / "generation_config.json").write_text("{}")
    (left / "config.json").write_text(json.dumps({"hidden_size": 48}))
    assert not have_equal_descriptions(str(left), str(right)) and not have_equal_descriptions(str(left), "Qwen/Qwen3-8B")


def test_versions_are_found_in_the_registry_with_weights_of_their_own(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    made = [registry.register(entry(tmp_path, step)) for step in (20, 40)]
    for version in made:
        Path(version.entry.path, "model.safetensors").write_text("")
    registry.promote(made[1], "staging")

    def find(given: str) -> Any:
        return find_version(given, str(tmp_path / "registry"), tmp_path, WeightVersion(2, 40))

    assert (find("models/qwen/1").name, find("models/qwen/1").weights_text) == ("qwen/1", "1.20")
    assert (find("models/qwen@staging").name, find("models/qwen@staging").weights, find("models/qwen").name) == ("qwen/2", (2, 40), "qwen/2")
    assert find("models/qwen@staging").path.endswith("registry/models/qwen/2"), "where the registry keeps it"
    assert find("some/folder").weights == (3, 0) and find_version("some/folder", "", tmp_path, None).weights == (0, 0)
    assert stage_of("models/qwen@staging") == "qwen@staging" and stage_of("models/qwen/1") is None and stage_of("runs/sort/model") is None
    used = {WeightVersion(0, 0): "first", WeightVersion(2, 40): "some/folder"}
    assert with_own_weights(find("models/qwen/1"), used).weights == (1, 20)
    assert with_own_weights(find("models/qwen/2"), used).weights == (3, 40), "a folder had that number before"
    assert with_own_weights(find("models/qwen/2"), {**used, WeightVersion(2, 40): find("models/qwen/2").path}).weights == (2, 40)
    for wrong, says in (("models/qwen@production", "has no version"), ("models/other", "the registry has no model 'other'"), ("models/qwen@x", "stage 'x'")):
        with pytest.raises(UserError, match=says):
            find(wrong)
    with pytest.raises(UserError, match="holds no registry"):
        find_version("models/qwen/1", str(tmp_path / "nothing"), tmp_path, None)


def test_a_stage_without_a_version_is_found_by_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = LocalRegistry(tmp_path / "registry", create=True)
    registry.promote(registry.register(entry(tmp_path, 1)), "staging")
    file = tmp_path / "gateway.yaml"
    for stage, status, says in (("production", 2, "no version is in that stage; promote one (there is models/qwen@staging)"), ("staging", 0, "")):
        file.write_text(json.dumps({"registry": "registry", "servers": {"m": {"model": f"models/qwen@{stage}"}}}))
        assert main(["gateway", str(file), "--check"]) == status
        told = capsys.readouterr()
        assert says in told.err and told.out == ("" if status else "m: 1 server of 'models/qwen@staging' at the start\n")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "models/qwen@production"}, "a stage of the model registry; name the folder of that in 'registry'"),
        ({"model": "x", "update": {"method": "inplace"}}, "did you mean 'in_place'?"),
        ({"model": "x", "update": {"settle_s": -1}}, "'servers.update.settle_s' is -1"),
        ({"model": "x", "flags": {"weight-version": "1.2"}}, "it says which weights they are"),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"servers": {"m": settings}, "port": 0}))
    assert main(["gateway", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0], lines


async def ended(running: Running) -> str:
    """Waits until the update has ended; returns what came of it."""
    update = running.group.update
    assert update is not None
    await running.until(lambda: update.is_over, "the end of the update")
    return update.outcome


def serving_now(running: Running) -> list[str]:
    return sorted(server.version.name for server in running.group.ready)


def test_servers_are_replaced_one_by_one_and_finish_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, count=2, update={"settle_s": 0.05}) as running:
            await running.until_ready(2)
            group = running.group
            first, second = group.servers
            held = [running.take(first), running.take(second)]
            await running.updates.begin("m", "better")
            with pytest.raises(UserError, match="are being updated; wait"):
                await running.updates.begin("m", "best")
            assert await ended(running) == "done"
            assert serving_now(running) == ["better", "better"] and group.version.name == "better" and group.version.weights == (1, 0)
            assert first.process.poll() is None and second.process.poll() is None, "each has a request still"
            for attempt in held:
                attempt.release()
            await running.until_ready(2)
            assert first.process.poll() is not None and second.process.poll() is not None
            group.servers[0].process.kill()
            await running.until(lambda: group.restarts == 1, "the loss")
            await running.until_ready(2)
            assert serving_now(running) == ["better", "better"], "what is started again has the new version"
            with pytest.raises(UserError, match="serve better already"):
                await running.updates.begin("m", "better")
            with pytest.raises(UserError, match="no servers of 'other'; there is m"):
                await running.updates.begin("other", "better")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        pytest.param("broken", "server m-2 was not ready: exit status 1; its last line: RuntimeError: out of memory", marks=pytest.mark.full),
        pytest.param("missing", "server m-2 was not ready: exit status 2; its last line: 'missing' does not exist", marks=pytest.mark.full),
        pytest.param("sick", "server m-2 answers a request with 500: m-2 says 500", marks=pytest.mark.full),
        # The first server takes it, and goes back when the second does not, whose name is free again or not.
        ("sick but m-2", "server m-[03] answers a request with 500: m-[03] says 500"),
    ],
)
def test_a_version_that_does_not_serve_is_given_up(target: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, count=2, update={"settle_s": 0.05}) as running:
            await running.until_ready(2)
            group = running.group
            fewest = len(group.ready)
            await running.updates.begin("m", target)
            update = group.update
            assert update is not None
            while not update.is_over:
                fewest = min(fewest, len(group.ready))
                await asyncio.sleep(0.005)
            assert update.outcome == "failed" and re.match(says, update.reason), update.reason
            assert fewest == 2, "never fewer than before"
            await running.until_ready(2)
            assert serving_now(running) == ["model", "model"] and group.version.name == "model"
            assert group.restarts == 0 and running.failure is None and group.outcomes == {"done": 0, "failed": 1, "stuck": 0}
            await running.updates.begin("m", "better")
            assert await ended(running) == "done" and group.version.weights == (2, 0), "the weights of what failed are used for nothing else"

    asyncio.run(run())


@pytest.mark.full
def test_where_no_gpu_is_free_a_server_ends_before_the_next_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"flags": {"device": "cuda"}, "gpus": ["0", "1"], "update": {"settle_s": 0.05}}

    async def run() -> None:
        async with running_group(tmp_path, monkeypatch, Machine((), (), 1), count=2, **settings) as running:
            await running.until_ready(2)
            group = running.group
            await running.updates.begin("m", "better")
            update = group.update
            assert update is not None
            while not update.is_over:
                alive = [server.place.gpus for server in group.servers]
                assert len(set(alive)) == len(alive) <= 2, "two servers on one GPU"
                await asyncio.sleep(0.005)
            await running.until_ready(2)
            assert update.outcome == "done" and serving_now(running) == ["better", "better"] and {each.place.gpus for each in group.servers} == {("0",), ("1",)}
            await running.updates.begin("m", "broken")
            assert await ended(running) == "failed"
            await running.until_ready(2)
            assert serving_now(running) == ["better", "better"]

    asyncio.run(run())


class Load:
    """Clients that ask without a pause, whole and streamed, and what they were answered."""

    def __init__(self, running: Gateway, clients: int) -> None:
        self._running, self._ends = running, threading.Event()
        self.answers: list[tuple[float, set[str]]] = []
        """When each was asked, and the weights that its answer names."""
        self.failed: list[str] = []
        self._threads = ThreadPoolExecutor(clients)
        self._asked = [self._threads.submit(self._ask, number) for number in range(clients)]

    def _ask(self, number: int) -> None:
        for turn in itertools.count():
            if self._ends.is_set():
                return
            is_stream = bool((number + turn) % 2)
            body = {"model": "tiny", "prompt": f"Hello {number}", "max_tokens": 60, "ignore_eos": True, "stream": is_stream}
            began = time.monotonic()
            response = self._running.post("/v1/completions", body)
            versions = set(response.headers.get("x-tandem-weight-version", "").split(","))
            whole = response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text if is_stream else response.text.endswith("}")
            if is_stream:
                events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
                versions |= {".".join(map(str, version)) for event in events for version in event.get("weight_versions", [])}
            if response.status_code != 200 or not whole:
                self.failed.append(f"{response.status_code} {response.text[-300:]}")
            self.answers.append((began, versions))

    def end(self) -> None:
        self._ends.set()
        for each in self._asked:
            each.result()
        self._threads.shutdown()


def update_of(running: Gateway) -> Any:
    (group,) = running.get("/admin/api/state").json()["servers"]
    return group


@pytest.mark.full
def test_under_load_no_request_fails_through_updates_and_one_that_is_given_up(tmp_path: Path) -> None:
    """Real servers: weights loaded in place, servers replaced, a version whose weights do not fit and one that cannot be loaded."""
    from tiny_model import make_model

    with serving(tmp_path, count=2, update={"settle_s": 0.3}) as running:
        better = make_model(tmp_path / "better", tmp_path / "tokenizer", 1)
        other = make_model(tmp_path / "other", tmp_path / "tokenizer", 2)
        # Another description, so that servers are replaced; and weights which its own description does not fit.
        (other / "generation_config.json").write_text('{"temperature": 0.5}')
        bad = make_model(tmp_path / "bad", tmp_path / "tokenizer", 3)
        (bad / "model.safetensors").write_bytes((bad / "model.safetensors").read_bytes()[:2000])
        until(lambda: running.metric("backend_ready") == 2, "both servers")
        load, versions_of = Load(running, 4), dict[str, list[str]]()

        def watch() -> str:
            group = update_of(running)
            for server in group["servers"]:
                seen = versions_of.setdefault(server["name"], [])
                if not seen or seen[-1] != server["weight_version"]:
                    seen.append(server["weight_version"])
            return str(group["update"]["outcome"])

        def take(folder: Path, outcome: str) -> float:
            answer = running.post("/admin/api/update", {"model": "tiny", "version": str(folder)})
            assert answer.status_code == 200, answer.text
            until(lambda: watch() in ("done", "failed", "stuck"), "the update")
            assert watch() == outcome, update_of(running)
            return time.monotonic()

        until(lambda: len(load.answers) > 8, "the load")
        in_place = take(better, "done")
        assert {each["name"] for each in update_of(running)["servers"]} == {"tiny-0", "tiny-1"}, "the same servers"
        until(lambda: load.answers[-1][0] > in_place, "answers after it")
        take(bad, "failed")
        replaced = take(other, "done")
        until(lambda: load.answers[-1][0] > replaced + 0.5, "answers after it")
        load.end()
        assert load.failed == []
        assert all(len(versions) == 1 for _, versions in load.answers), "every answer has one version"
        assert {version for began, (version,) in load.answers if began > replaced} == {"3.0"}
        assert {version for began, (version,) in load.answers if began < in_place} >= {"0.0", "1.0"}
        assert {version for _, (version,) in load.answers} == {"0.0", "1.0", "3.0"}, "nothing was answered with what was given up"
        order = ["0.0", "1.0", "2.0", "3.0"]
        assert all(seen == sorted(seen, key=order.index) for seen in versions_of.values()), versions_of
        assert update_of(running)["updates"] == {"done": 2, "failed": 1, "stuck": 0} and running.metric("server_updates", outcome="done") == 2
        assert "refuses /update_weights" in running.log.read_text()
        assert running.post("/admin/api/update", {"model": "tiny", "version": str(other)}).status_code == 400
        assert running.post("/admin/api/update", {"model": "tiny"}).status_code == 400


@pytest.mark.full
def test_weights_that_are_given_up_in_place_give_way_to_those_before_under_their_own_number(tmp_path: Path) -> None:
    """One real server has the new weights, the other one refuses them: after the way back the number is the one before, and so are all the bits."""
    from tiny_model import make_model

    with serving(tmp_path, count=2, update={"settle_s": 3}) as running:
        better = make_model(tmp_path / "better", tmp_path / "tokenizer", 1)
        until(lambda: running.metric("backend_ready") == 2, "both servers")

        def ask() -> tuple[str, Any]:
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": 2}
            response = running.post("/v1/completions", body)
            return response.headers["x-tandem-weight-version"], response.json()["choices"][0]["logprobs"]

        before = ask()
        assert before[0] == "0.0" and ask() == before
        assert running.post("/admin/api/update", {"model": "tiny", "version": str(better)}).status_code == 200
        until(lambda: "1.0" in [each["weight_version"] for each in update_of(running)["servers"]], "the first server")
        seen = {}
        until(lambda: seen.update([ask()]) or "1.0" in seen, "an answer of the new weights")
        assert seen["1.0"] != before[1]
        cut = tmp_path / "cut"
        cut.write_bytes((better / "model.safetensors").read_bytes()[:2000])
        cut.rename(better / "model.safetensors")
        until(lambda: update_of(running)["update"]["outcome"] in ("done", "failed", "stuck"), "the end of the update")
        assert update_of(running)["update"]["outcome"] == "failed" and "refuses /update_weights" in running.log.read_text()
        assert {each["name"] for each in update_of(running)["servers"]} == {"tiny-0", "tiny-1"}, "the same processes"
        assert [ask() for _ in range(6)] == [before] * 6
        other = make_model(tmp_path / "other", tmp_path / "tokenizer", 2)
        assert running.post("/admin/api/update", {"model": "tiny", "version": str(other)}).status_code == 200
        until(lambda: update_of(running)["update"]["outcome"] == "done", "the next update")
        assert ask()[0] == "2.0", "the number of weights that were given up is used for nothing else"


RECIPE = """
algorithm: {name: pretrain}
model:
  create: {architecture: qwen3, tokenizer: tokenizer, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
           intermediate_size: 48, max_position_embeddings: 128}
data: {train: [{path: data}], sequence_length: 32, global_batch_size: 2}
trainer: {learning_rate: 1.0e-3, micro_batch_tokens: 64}
checkpoint: {every_steps: 1}
registry: {path: registry, name: library}
run: {max_steps: 2, directory: runs}
"""


@pytest.mark.full
def test_servers_follow_the_stage_of_the_registry_with_checkpoints_of_a_run(tmp_path: Path) -> None:
    """``tandem train`` registers two checkpoints; ``tandem models promote`` moves the servers from one to the other while clients ask."""

    def tandem(*words: str) -> None:
        subprocess.run([COMMAND, *words], cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT_S)

    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the quick brown fox jumps over the lazy dog {number}\n" * 200)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    tandem("tokenize", "text", "data", "--tokenizer", "tokenizer", "--new-vocabulary", "300", "--suffix", ".txt")
    tandem("train", "recipe.yaml")
    tandem("models", "promote", "library/2", "production", "--registry", "registry")
    (tmp_path / "gateway").mkdir()
    with serving(tmp_path / "gateway", {"registry": "../registry"}, model="models/library@production", update={"settle_s": 0.1}) as running:
        until(lambda: running.get("/readiness").status_code == 200, "the server")
        load = Load(running, 2)
        until(lambda: len(load.answers) > 2, "the load")
        tandem("models", "promote", "library/3", "production", "--registry", "registry")
        until(lambda: update_of(running)["updates"]["done"] == 1, "the update")
        done = time.monotonic()
        until(lambda: load.answers[-1][0] > done, "answers after it")
        load.end()
        assert load.failed == [] and {version for _, (version,) in load.answers} == {"2.1", "3.2"}, "version and step"
        assert {version for began, (version,) in load.answers if began > done} == {"3.2"}
        assert update_of(running)["version"] == "library/3" and running.get("/v1/models").json()["data"][0]["weight_versions"] == ["3.2"]
