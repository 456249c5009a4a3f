"""The phases of a run, predicted beside measured: worked by hand, in the summary of a run and in its report."""

from pathlib import Path

from tandem.jobs.result import RunResult
from tandem.report.phases import PhaseFigures, mean_length, phase_figures, phase_lines, seconds_at

MIB = 1 << 20
ROWS = [
    {
        "step": step, "timing_s/train": 2.0 + step, "timing_s/rollout": 1.0, "timing_s/offload": 0.1, "timing_s/onload": 0.2, "timing_s/convert": 0.3,
        "timing_s/update_weight": 0.4, "response_length/mean": 10.0 * step, "memory/train/measured": (90.0 + step) * MIB,
    }
    for step in range(4)
]  # fmt: skip
PREDICTION = {"at": [[1, {"train": 1.0, "rollout": 0.5}], [21, {"train": 3.0, "rollout": 0.5}]]}


def test_seconds_are_those_at_the_length_that_the_completions_had() -> None:
    assert mean_length(ROWS) == 20.0, "of all steps but the first"
    assert seconds_at(PREDICTION, 11.0) == {"train": 2.0, "rollout": 0.5}
    assert seconds_at({"at": [[0, {"train": 4.0}]]}, 0.0) == {"train": 4.0} and seconds_at({}, 3.0) == {}


def test_a_phase_has_the_median_of_its_seconds_and_the_most_of_its_memory() -> None:
    figures = {each.phase: each for each in phase_figures(ROWS, {"train": 100.0 * MIB}, PREDICTION)}
    assert figures["train"] == PhaseFigures("train", 2.9, 4.0, 100.0 * MIB, 93.0 * MIB)
    assert (figures["switch"].measured_s, figures["weight update"].measured_s) == (0.1 + 0.2, 0.3 + 0.4)
    assert figures["rollout"] == PhaseFigures("rollout", 0.5, 1.0, None, None) and "inference" not in figures


def test_a_table_says_how_far_off_a_prediction_was_and_there_is_none_without_one() -> None:
    head, train, *_ = phase_lines(phase_figures(ROWS, {"train": 100.0 * MIB}, PREDICTION))
    assert " ".join(head.split()) == "phase of a step predicted s measured s ratio predicted MiB measured MiB ratio"
    assert train.split() == ["train", "2.9", "4", "1.38", "100", "93", "0.93"]
    assert phase_lines(phase_figures(ROWS, {}, {})) == []


def test_a_result_keeps_its_phases_and_shows_them_before_the_report() -> None:
    phases = tuple(phase_figures(ROWS, {"train": 100.0 * MIB}, PREDICTION))
    result = RunResult(Path("run"), 4, {}, Path("run/model"), Path("run/report.html"), (), phases=phases)
    assert RunResult.from_json(result.to_json()) == result
    assert result.summary().splitlines()[1:5] == phase_lines(phases)[:4]
