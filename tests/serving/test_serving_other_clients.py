"""LangChain, LiteLLM and LlamaIndex against ``tandem serve``, each in a process of an environment that the test makes."""

import json
import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pooling_models import sentence_transformer
from server_process import Server, server
from tool_server import CALLS, FLAGS

from tandem import LLM

PROGRAMS = Path(__file__).parent / "client_programs"
PACKAGES = (["langchain-openai", "litellm", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"], ["mcp"])
"""Installed one after the other: LiteLLM imports ``mcp`` and does not ask for it, and asks for other versions of what it needs."""
ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""LiteLLM asks the network for prices otherwise."""
ARGUMENTS: list[dict[str, int]] = [{"a": 1, "b": 2}, {}]

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the clients."""
    folder = tmp_path_factory.mktemp("clients")
    venv.create(folder, with_pip=True)
    for names in PACKAGES:
        done = subprocess.run([folder / "bin" / "pip", "install", "--quiet", *names], capture_output=True, text=True, timeout=400)
        if done.returncode:
            pytest.skip(f"{', '.join(names)} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def open_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(model, tmp_path_factory.mktemp("others"), *FLAGS) as started:
        yield started
        assert "Traceback" not in started.log.read_text(), started.log.read_text()


def answers(python: Path, open_server: Server, name: str, *given: str) -> dict[str, Any]:
    """Returns what the program ``name`` prints."""
    command = [str(python), str(PROGRAMS / f"{name}.py"), open_server.url, *(given or (CALLS, "It is 3."))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=open_server.log.parent, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_langchain_calls_tools_streams_and_reads_structured_output(python: Path, open_server: Server) -> None:
    found = answers(python, open_server, "with_langchain")
    assert found["names"] == [["add", "now"]] * 2 and found["arguments"] == [ARGUMENTS] * 2
    assert found["text"] == "It is 3." and set(found["structured"]) == {"a", "b"} and found["forced"] == ["Sum"] and found["tokens"]


def test_litellm_calls_tools_streams_and_reads_reasoning(python: Path, open_server: Server) -> None:
    found = answers(python, open_server, "with_litellm")
    assert found["names"] == [["add", "now"]] * 2 and found["arguments"] == [ARGUMENTS] * 2
    assert (found["text"], found["reasoning"], found["reasons"]) == ("It is 3.", "hm", ["tool_calls"] * 2)


def test_llama_index_calls_tools_and_streams(python: Path, open_server: Server) -> None:
    found = answers(python, open_server, "with_llama_index")
    assert (found["names"], found["arguments"]) == (["add", "now"], ARGUMENTS)
    assert found["text"] == found["streamed"] == "It is 3."


def test_langchain_and_llama_index_embed_and_search(python: Path, model: Path, tmp_path: Path) -> None:
    texts = ["the quick brown fox", "jumps over", "the lazy dog 你好"]
    embedder = sentence_transformer(model, tmp_path / "embedder")
    wanted = [output.outputs.embedding for output in LLM(embedder, max_num_seqs=8).embed(texts)]
    with server(embedder, tmp_path, "--served-model-name", "tiny") as running:
        found = answers(python, running, "embeddings", json.dumps(texts))
        assert found["langchain"] == found["llama_index"] == [wanted] * 3 and found["nearest"] == [texts] * 2
        assert "Traceback" not in running.log.read_text(), running.log.read_text()
