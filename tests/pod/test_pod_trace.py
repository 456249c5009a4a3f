"""One traced step of a pod's trainer in the published order: load, shard over data ranks, stages, tensor collectives, reverse pass, sum of
the gradients over data ranks, optimizer with ZeRO's all-gather, checkpoint, asynchronous write."""

from itertools import groupby
from pathlib import Path

import pytest
from pod_runs import PodRun

from tandem.runtime.records.tracing import Span, read_trace

CALLS = ["offload", "convert", "register", "onload", "inference", "train", "save"]
TRANSFERS = ("send_activation", "receive_activation", "send_gradient", "receive_gradient")


def inside(span: Span, outer: list[Span]) -> bool:
    return any(each.start_s <= span.start_s and span.end_s <= each.end_s for each in outer)


def parts(spans: list[Span]) -> list[str]:
    """Returns the spans of a rank's own thread by name, with the passes of micro-batches as one."""
    names = [span.name for span in spans if not span.category and span.name not in TRANSFERS]
    return [name for name, _ in groupby("passes" if name in ("forward", "backward") else name for name in names)]


def assert_published_order(spans: list[Span], reduces: bool) -> None:
    """Checks the spans of one rank in step 1, whose checkpoint is the first. ``reduces``: other ranks have gradients too."""
    assert [span.name for span in spans if span.category == "call"] == CALLS
    reduce = ["reduce"] if reduces else []
    assert parts(spans) == ["reference", "load the batch", "shard the batch", "passes", *reduce, "clip", "optimizer", "checkpoint write"]
    (train,), (save,), (write,) = ([s for s in spans if s.name == name] for name in ("train", "save", "checkpoint write"))
    assert write.thread != 0 and write.start_s >= save.start_s >= train.end_s
    # A micro-batch's backward follows its own forward.
    ends = {s.arguments["micro_batch"]: s.end_s for s in spans if s.name == "forward"}
    starts = {s.arguments["micro_batch"]: s.start_s for s in spans if s.name == "backward"}
    assert ends.keys() == starts.keys() and ends
    assert all(ends[number] <= starts[number] for number in ends)


def test_traced_step_of_one_process_has_the_published_order_and_no_collective(undisturbed: PodRun) -> None:
    spans = read_trace(undisturbed.directory / "traces", 1)
    assert_published_order(spans, reduces=False)
    assert {span.category for span in spans} == {"", "call"} and {span.rank for span in spans} == {0}
    page = (undisturbed.directory / "report.html").read_text()
    assert '"traced":[1]' in page and ',"load the batch",1,' in page


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 2])
def test_traced_step_of_a_mesh_has_the_published_order_with_its_transfers_and_collectives(tensor: int, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(
        "--parallel.data=2", "--parallel.pipeline=2", f"--parallel.tensor={tensor}", "--parallel.zero=1", "--model.create.num_key_value_heads=2",
        "--trainer.micro_batch_tokens=64", "--sft.steps=4", "--run.max_steps=2", "--run.trace_steps=[1]",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    spans = read_trace(run.directory / "traces", 1)
    ranks = sorted({span.rank for span in spans})
    assert ranks == list(range(4 * tensor))
    for rank in ranks:
        own = [span for span in spans if span.rank == rank]
        assert_published_order(own, reduces=True)
        assert_collectives(own, tensor > 1)
    pipelines = {span.arguments["pipeline"] for span in spans}
    assert len(pipelines) == 2 * tensor
    for pipeline in pipelines:
        assert_stages([span for span in spans if span.arguments["pipeline"] == pipeline])


def assert_collectives(own: list[Span], has_tensor: bool) -> None:
    """Tensor-parallel ranks communicate within passes; data-parallel ranks reduce gradients after the last backward pass has started, and
    gather the updated weights within the optimizer's step."""
    forwards, backwards, (optimizer,), (reference,) = (
        [s for s in own if s.name == name] for name in ("forward", "backward", "optimizer", "reference")
    )
    tensor = [s for s in own if s.category == "tensor"]
    assert bool(tensor) == has_tensor
    gradients = [s for s in tensor if "gradient" in s.name]
    activations = [s for s in tensor if s not in gradients]
    for found, where in ((gradients, backwards), (activations, [*forwards, reference])):
        assert all(inside(span, where) for span in found)
        assert not has_tensor or all(any(inside(span, [each]) for span in found) for each in where)
    sums = [s for s in own if s.category == "tokens" and s.name.startswith("gradients of")]
    gathers = [s for s in own if s.category == "tokens" and s.name.startswith("updated weights of")]
    assert len(sums) == len(gathers) > 0
    assert all(backwards[-1].start_s <= span.start_s and span.end_s <= optimizer.start_s for span in sums)
    assert all(inside(span, [optimizer]) for span in gathers)


def assert_stages(spans: list[Span]) -> None:
    """Checks one pipeline of two stages: activations are sent forward and gradients back, each before the operation that needs them."""
    at = {(s.name, s.arguments["stage"], s.arguments["micro_batch"]): s for s in spans if "stage" in s.arguments}
    numbers = {s.arguments["micro_batch"] for s in spans if s.name == "forward"}
    assert len(numbers) > 1
    for number in numbers:
        assert at["forward", 0, number].end_s <= at["send_activation", 0, number].start_s <= at["forward", 1, number].start_s
        assert at["forward", 1, number].end_s <= at["backward", 1, number].start_s
        assert at["backward", 1, number].end_s <= at["send_gradient", 1, number].start_s <= at["backward", 0, number].start_s
