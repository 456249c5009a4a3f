"""Twenty mistakes of a first hour: each ends the command in one line that says what to do."""

import json
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.load import build
from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
RECIPE = """
model: {path: mine}
task: {name: dataset, path: sums.csv, held_out_share: 0.25}
rewards: {functions: [{function: "rewards.py:right"}]}
rollout: {prompts_per_step: 2, max_tokens: 8}
algorithm: {name: grpo, group_size: 2}
evaluation: {prompts: 1, final_prompts: 1}
run: {max_steps: 1}
machine: {threads: 1}
"""


def files(folder: Path) -> list[Path]:
    """Returns everything in ``folder`` but the bytecode that Python keeps of an imported reward function."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a data set, a reward function and a recipe, and what a mistake may name."""
    folder = tmp_path_factory.mktemp("first-hour")
    create_model(build(NewModelConfig, SHAPE), 0, folder / "mine")
    rows = [f"What is {number} plus 3?,{number + 3}" for number in range(8)]
    (folder / "sums.csv").write_text("\n".join(["question,answer", *rows]))
    (folder / "sums.txt").write_text("\n".join(["question,answer", *rows]))
    (folder / "semicolons.csv").write_text("\n".join(["question;answer", *(row.replace(",", ";") for row in rows)]))
    (folder / "numbers.jsonl").write_text(json.dumps({"question": 3, "answer": "4"}) + "\n")
    (folder / "empty.jsonl").touch()
    (folder / "rewards.py").write_text("def right(completions, answer, **columns):\n    return [0.0 for _ in completions]\n")
    (folder / "broken.py").write_text("def right(completions:\n")
    (folder / "pickles").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "mine" / name, folder / "pickles")
    (folder / "pickles" / "pytorch_model.bin").touch()
    (folder / "mine.yaml").write_text(RECIPE)
    return folder


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train", "recipe"),
        ("train mien.yaml", "'mien.yaml' does not exist; name a YAML file, or one that comes with Tandem"),
        ("trian mine.yaml", "did you mean 'train'?"),
        ("train mine.yaml --dryrun", "did you mean '--dry-run'?"),
        ("train mine.yaml --run.max_step=3", "did you mean 'run.max_steps'?"),
        ("train mine.yaml --run.max_steps 3", "--run.max_steps=VALUE"),
        ("train mine.yaml --trainer.learning_rate=fast", "must be a number"),
        ("train mine.yaml --model.path=mein", "give a local Hugging Face folder, or OWNER/NAME"),
        ("train mine.yaml --model.path=me/mine", "hf download me/mine"),
        ("train mine.yaml --model.path=pickles", "safetensors"),
        ("train mine.yaml --task.path=sum.csv", "the folder has"),
        ("train mine.yaml --task.path=semicolons.csv", "separate columns by ','"),
        ("train mine.yaml --task.path=sums.txt", "name it FILE.csv"),
        ("train mine.yaml --task.path=empty.jsonl", "empty"),
        ("train mine.yaml --task.path=numbers.jsonl", "numbers.jsonl:1"),
        ("train mine.yaml --task.prompt_key=prompt", "the line has 'question', 'answer'"),
        ("train mine.yaml --task.chat=true", "no chat template"),
        ("train mine.yaml '--rewards.functions=[{function: rewards.py:wrong}]'", "it has right"),
        ("train mine.yaml '--rewards.functions=[{function: broken.py:right}]'", "SyntaxError"),
        ("train mine.yaml --rollout.max_tokens=100000", "lower it or raise model.max_length"),
        ("train mine.yaml --machine.device=cuda", "set machine.device to cpu"),
        ("resume runs/none", "is not a run"),
        ("serve mine --port 99999", "from 0 to 65535"),
        ("generate mine --promt x", "did you mean '--prompt'?"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    monkeypatch.chdir(filled)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = files(filled)
    handler = signal.getsignal(signal.SIGTERM)
    assert main(shlex.split(command)) in (1, 2)
    signal.signal(signal.SIGTERM, handler)
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("tandem: ") and says in captured.err, captured.err
    assert files(filled) == before
