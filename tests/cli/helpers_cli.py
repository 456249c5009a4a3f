"""Runs the command in a process of its own, and checks its refusals."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("tandem")


@dataclass(frozen=True)
class Done:
    """The exit status and the output of a command."""

    code: int
    out: str
    err: str

    def refusal(self, code: int = 2) -> str:
        """Returns the error line of a refused command without its prefix. It must be the only line on standard error."""
        assert self.code == code, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("tandem: "), self.err
        assert "Traceback" not in self.err + self.out
        return lines[0].removeprefix("tandem: ")


def real(*arguments: str | Path, cwd: Path = ROOT, stdin: str = "", before: Callable[[], None] | None = None, limit_s: float = 300) -> Done:
    """Runs the installed command."""
    done = subprocess.run(
        [str(COMMAND), *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=limit_s, preexec_fn=before,
        input=stdin, env={**os.environ, "COLUMNS": "100"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


TINY_MODEL = (
    "--model.create.hidden_size=16", "--model.create.num_hidden_layers=1", "--model.create.num_attention_heads=2",
    "--model.create.num_key_value_heads=1",
    "--model.create.head_dim=8", "--model.create.intermediate_size=32",
)
TINY_RUN = (
    "--rollout.prompts_per_step=2", "--algorithm.group_size=2", "--evaluation.prompts=4", "--evaluation.final_prompts=4",
    "--evaluation.every_steps=1", "--run.max_steps=1", "--machine.threads=1",
)
TINY_WARM_UP = ("--sft.steps=2", "--sft.warmup_steps=1", "--sft.batch_size=2", "--sft.max_accuracy=1.0")
