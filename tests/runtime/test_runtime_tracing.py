"""Traces of steps: what is written, when, and in which format, and the pipeline bubble computed from them."""

import json
import threading
from pathlib import Path

import pytest

from tandem.config.recipe import load_config
from tandem.dashboard.open_run import OpenRun
from tandem.jobs.run_files import write_recipe
from tandem.layout.schedules import PipelineShape
from tandem.report.timeline import bubble
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.tracing import NO_TRACE, Span, Tracer, read_trace, traced_steps
from tandem.types import UserError


def test_only_the_named_steps_are_written_and_a_step_ends_where_the_next_begins(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, 3, (1,), {"pipeline": 2})
    for step in range(3):
        tracer.begin(step)
        with tracer.span("forward", micro_batch=step):
            pass
        with tracer.span("checkpoint write"):
            pass
    assert traced_steps(tmp_path) == [1]
    first, second = read_trace(tmp_path, 1)
    assert (first.name, first.rank, first.thread, first.arguments) == ("forward", 3, 0, {"micro_batch": 1, "pipeline": 2})
    assert second.name == "checkpoint write" and first.end_s <= second.start_s


def test_a_step_that_has_begun_is_not_begun_again_by_entering_it(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, steps=(2, 3))
    for step, name in ((2, "offload"), (2, "train"), (3, "offload")):
        tracer.enter(step)
        with tracer.span(name, "call"):
            pass
    assert [(span.name, span.category) for span in read_trace(tmp_path, 2)] == [("offload", "call"), ("train", "call")]
    assert [span.name for span in read_trace(tmp_path, 3)] == ["offload"]
    tracer.begin(2)
    with tracer.span("train"):
        pass
    assert [(span.name, span.category) for span in read_trace(tmp_path, 2)] == [("train", "")]


def test_a_span_of_another_thread_that_ends_after_its_step_stands_in_the_step_it_began_in(tmp_path: Path) -> None:
    tracer, began, ended = Tracer(tmp_path, 0, (0, 1)), threading.Event(), threading.Event()

    def write() -> None:
        with tracer.span("checkpoint write"):
            began.set()
            ended.wait(30)

    tracer.begin(0)
    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(30)
    tracer.begin(1)
    with tracer.span("forward"):
        pass
    ended.set()
    thread.join()
    assert [(span.name, span.thread != 0) for span in read_trace(tmp_path, 0)] == [("checkpoint write", True)]
    assert [span.name for span in read_trace(tmp_path, 1)] == ["forward"]


def test_a_trace_is_an_array_of_complete_events_as_chrome_reads_them(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, 1, (7,))
    tracer.begin(7)
    with tracer.span("backward", stage=1, micro_batch=0):
        pass
    text = (tmp_path / "step-7-rank-1.json").read_text()
    assert all(json.loads(line.rstrip(",")) for line in text.splitlines()[1:])
    (event,) = json.loads(text.rstrip().rstrip(",") + "]")
    assert event["ph"] == "X" and event["pid"] == 1 and event["ts"] > 1e15 and event["dur"] >= 0
    assert event["args"] == {"stage": 1, "micro_batch": 0} and event["cat"] == ""


def test_no_trace_and_a_broken_one_are_said_in_one_line(tmp_path: Path) -> None:
    with NO_TRACE.span("forward"):
        NO_TRACE.begin(0)
    with pytest.raises(UserError, match=r"no trace of step 4; name the step in run\.trace_steps"):
        read_trace(tmp_path, 4)
    (tmp_path / "step-4-rank-0.json").write_text("[\n{nothing\n")
    with pytest.raises(UserError, match="is not a trace"):
        read_trace(tmp_path, 4)


def span(name: str, rank: int, number: int, start: float, seconds: float, pipeline: int = 0) -> Span:
    return Span(name, rank, start, seconds, 0, {"stage": rank % 2, "micro_batch": number, "pipeline": pipeline})


def test_the_bubble_is_that_of_a_case_worked_by_hand() -> None:
    # Two stages, two micro-batches, forward 1 s and backward 2 s: 9 s of which each rank computes 6.
    spans = [
        span("forward", 0, 0, 0, 1), span("forward", 0, 1, 1, 1), span("backward", 0, 0, 4, 2), span("backward", 0, 1, 7, 2),
        span("forward", 1, 0, 1, 1), span("backward", 1, 0, 2, 2), span("forward", 1, 1, 4, 1), span("backward", 1, 1, 5, 2),
        Span("optimizer", 0, 9, 5, 0, {}), *(span("forward", 2 + rank, 0, 50, 1, pipeline=2) for rank in range(2)),
    ]  # fmt: skip
    found = bubble(spans, "1f1b")
    assert found is not None and found.shape == PipelineShape(2, 2)
    assert found.measured == pytest.approx(1 / 3) == found.published == pytest.approx(found.simulated)
    assert bubble([s for s in spans if s.rank == 0], "1f1b") is None


def test_the_bubble_of_a_pod_is_simulated_with_the_schedule_of_its_recipe(tmp_path: Path) -> None:
    recipe = load_config(
        Path(__file__).resolve().parents[2] / "recipes/sort.yaml",
        ["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    )
    write_recipe(recipe, tmp_path)
    Journal(tmp_path / "journal.sqlite").close()
    tracer = Tracer(tmp_path / "traces", steps=(0,))
    tracer.begin(0)
    with tracer.span("forward"):
        pass
    facts, _ = OpenRun("run", tmp_path).facts()
    assert facts is not None and facts.order == "interleaved"
