"""Reward functions that break: the sample is masked and named, the run goes on, and past a share of them it stops."""

from pathlib import Path

import pytest
from pod_runs import PodRun, recipe_with

BREAKS = {
    "raises": ("raise ValueError('no such answer')", "no such answer"),
    "hangs": ("time.sleep(600)", "more than 1 s"),
    "returns NaN": ("return [float('nan')] * len(completions)", "nan"),
    "has the wrong length": ("return [1.0] * (len(completions) + 1)", "length"),
}
FUNCTION = """
import time
from pathlib import Path

def judge(completions, **_):
    # The marker makes it break in one call of the whole run, whichever process makes it.
    marker = Path(__file__).with_name("broke")
    if {always} or not marker.exists():
        marker.touch()
        {body}
    return [float(len(text)) for text in completions]
"""


def run_with(folder: Path, body: str, share: float, always: bool = False) -> PodRun:
    (folder / "judge.py").write_text(FUNCTION.format(body=body, always=always))
    rewards = {
        "functions": [{"function": "task"}, {"function": f"{folder / 'judge.py'}:judge"}],
        "sample_deadline_s": 1.0, "max_fault_share": share,
    }  # fmt: skip
    return PodRun(folder, recipe_with(folder, rewards=rewards))


@pytest.mark.parametrize("how", BREAKS)
def test_run_goes_on_past_a_reward_function_that(how: str, tmp_path: Path) -> None:
    body, reason = BREAKS[how]
    run = run_with(tmp_path, body, share=1.0)
    done = run.train("--run.max_steps=1")
    assert done.returncode == 0, done.stderr
    assert run.left_behind() == []
    print(done.stdout, run.events("reward_fault"), reason)


@pytest.mark.parametrize("how", ["raises"])
def test_run_stops_with_one_line_where_a_reward_function_always(how: str, tmp_path: Path) -> None:
    run = run_with(tmp_path, BREAKS[how][0], share=0.1, always=True)
    done = run.train("--run.max_steps=1")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1 and "rewards.max_fault_share" in done.stderr, done.stderr
    assert run.left_behind() == []
