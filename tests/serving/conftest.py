"""A small model with a chat template, and one server that most tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from server_process import Server, server
from tiny_model import make_model, make_tokenizer
from tool_server import API_KEY, FLAGS

from tandem.engine.llm import LLM

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "first", tokenizer_folder, 0)


@pytest.fixture(scope="session")
def other_model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shapes with other weights."""
    return make_model(tmp_path_factory.mktemp("models") / "other", tokenizer_folder, 1)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=16)


@pytest.fixture(scope="session")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not change its state."""
    with server(model, tmp_path_factory.mktemp("serve"), "--served-model-name", "tiny", "also-tiny", "--max-num-seqs", "32") as running:
        yield running
        assert running.process.poll() is None, running.log.read_text()
        assert "Traceback" not in running.log.read_text(), running.log.read_text()


@pytest.fixture(scope="session")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model may call tools and think, and whose clients need a key."""
    with server(model, tmp_path_factory.mktemp("tools"), *FLAGS, "--api-key", API_KEY) as started:
        started.client.headers["Authorization"] = f"Bearer {API_KEY}"
        yield started
        assert started.process.poll() is None and "Traceback" not in started.log.read_text(), started.log.read_text()
