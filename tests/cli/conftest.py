"""Small models and runs for the tests of the command line."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from absurd_files import make_files
from helpers_cli import TINY_MODEL, TINY_RUN, TINY_WARM_UP, Done, real

from tandem.cli.main import main
from tandem.config.model import NewModelConfig

Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs the command in this process, which is faster than starting one."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse after --help
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a character tokenizer."""
    from tandem.model.create_model import create_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = NewModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    create_model(config, 0, folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a valid file of every kind that a command reads."""
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A valid recipe whose runs are in a folder of the test."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model:\n  create: {{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, intermediate_size: 32}}\n"
        f"task: {{name: sort}}\nsft: {{steps: 2, warmup_steps: 1, batch_size: 2, max_accuracy: 1.0}}\n"
        f"rollout: {{prompts_per_step: 2, max_tokens: 8}}\nalgorithm: {{group_size: 2}}\n"
        f"evaluation: {{prompts: 4, final_prompts: 4}}\nrun: {{max_steps: 1, directory: {json.dumps(str(tmp_path / 'runs'))}}}\n"
        f"machine: {{threads: 1}}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run of one step, and its output."""
    runs = tmp_path_factory.mktemp("finished")
    given = ("recipes/sort.yaml", "--inline", f"--run.directory={runs}", "--run.name=mine")
    done = real("train", *given, *TINY_MODEL, *TINY_WARM_UP, *TINY_RUN)
    assert done.code == 0, done.err
    assert done.err == ""
    return runs / "mine", done.out
