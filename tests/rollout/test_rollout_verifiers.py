"""Episodes of ``verifiers`` environments, played by the real package against the engine, and against a scripted model for its tools."""

import asyncio
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tandem.config.agent import AgentConfig
from tandem.config.model import NewModelConfig
from tandem.config.rollout import RolloutConfig
from tandem.engine.llm import LLM
from tandem.model.create_model import create_model
from tandem.rl.agents.in_flight import Agents, InFlightAgents
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.types import Prompt

pytest.importorskip("verifiers")
FUNCTION = "tandem.rl.agents.verifiers_agent:episode"


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    folder = str(Path(__file__).parents[1] / "data" / "environments")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))  # Of the servers of tools.


@pytest.mark.full
def test_an_environment_plays_its_turns_and_says_what_they_are_worth(tmp_path):
    folder = tmp_path / "model"
    create_model(NewModelConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
                                max_position_embeddings=256, chat=True, characters="ascii"), 1, folder)  # fmt: skip
    engine = LLM(str(folder)).engine
    agents = Agents(AgentConfig(function=FUNCTION, workers=2, start_deadline_s=600.0), folder, tmp_path / "logs")
    settings = {**sampling_settings(RolloutConfig(max_tokens=200), 2, 7), "n": 4}
    columns = {"environment": "guessing_game", "settings": {}, "data": {"idx": 3, "prompt": "guess 3", "system_prompt": "short", "answer": 3}}
    try:
        runs = []
        for _ in range(2):
            episodes = InFlightAgents(engine, agents, 256)
            episodes.add(0, [Prompt("p", "?", (1,), question="guess 3", columns=columns)], settings)
            runs.append(episodes.draw("all", lambda done, total: None))
    finally:
        agents.close()
    assert runs[0] == runs[1]
    for sample in runs[0]:
        assert not sample.fault and not sample.branches
        said = [str(message["content"]) for message in sample.messages if message["role"] == "assistant"]
        asked = [str(message["content"]) for message in sample.messages if message["role"] == "user"]
        assert asked == ["no 0", "no 1"][: len(said) - 1] and sample.text == said[-1].strip()
        right = sample.text.count("3") / max(len(sample.text), 1)
        assert sample.outcome == pytest.approx({"reward": 2 * right, "right": right, "turns": len(said)})
    assert any(len(sample.messages) == 5 for sample in runs[0])


class Scripted(BaseHTTPRequestHandler):
    """Answers chat completions with the calls of ``answers`` in turn, and keeps what it was asked."""

    answers: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = self.answers[len(self.asked)]
        self.asked.append(body)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": reason}
        answer = json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "tandem", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.mark.full
def test_the_tools_of_an_environment_run_on_its_servers_and_a_bad_call_is_answered(monkeypatch):
    from tandem.rl.agents.verifiers_agent import episode

    call = lambda name, arguments: {"tool_calls": [{"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}]}
    Scripted.asked, Scripted.answers = [], [call("subtract", "{}"), call("", "not JSON"), {"content": "it is 3"}]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    try:
        played = asyncio.run(episode("?", "with_adder", {}, {"idx": 1, "prompt": "add 1 and 2"}))
        assert played == {"used": 0.0, "reward": 0.0, "text": "it is 3"}
        (tool,) = Scripted.asked[0]["tools"]
        assert tool["function"]["description"] == "Adds two numbers." and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
        results = [message["content"] for message in Scripted.asked[-1]["messages"] if message["role"] == "tool"]
        assert results[0] == "error: there is no tool 'subtract'" and results[1].startswith("error: the arguments are not JSON")
        Scripted.asked, Scripted.answers = [], [call(tool["function"]["name"], '{"a": 1, "b": 2}'), {"content": "it is 3"}]
        assert asyncio.run(episode("?", "with_adder", {}, {"idx": 1, "prompt": "add 1 and 2"})) == {"used": 1.0, "reward": 1.0, "text": "it is 3"}
    finally:
        server.shutdown()
