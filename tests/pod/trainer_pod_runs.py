"""Runs whose trainer is in two pods."""

from pathlib import Path

from pod_runs import PodRun, difference

FEW_STEPS = ("--run.max_steps=3", "--sft.steps=6")
BOTH_TRAIN = ("--pods", "2", "--trainer-pods", "2")


def train(run: PodRun, *settings: str) -> None:
    done = run.train(*BOTH_TRAIN, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.left_behind() == []


def assert_same_bits(settings: str, folder: Path) -> None:
    """Trains a mesh of ``settings`` in one pod, and over two, in ``folder``."""
    one, two = PodRun(folder / "one"), PodRun(folder / "two")
    done = one.train(*FEW_STEPS, *settings.split())
    assert done.returncode == 0, done.stdout + done.stderr
    train(two, *FEW_STEPS, *settings.split())
    assert difference(two, one) == []
