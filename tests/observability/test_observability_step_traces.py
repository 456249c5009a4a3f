"""A step of reinforcement learning is one trace over all processes of the run, as a real OTLP receiver gets it."""

import os
from pathlib import Path

import pytest
from otlp_receiver import HttpReceiver, Received

from tandem.jobs.start import train
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.traces.steps import trace_of_step

DATA = {
    "algorithm": {"name": "sft"}, "data": {"sequence_length": 16, "global_batch_size": 2}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
    "trainer": {"warmup_steps": 0}, "machine": {"threads": 1},
}  # fmt: skip
CREATE = {
    "architecture": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip


def recipe_of(folder: Path, endpoint: str, **sections: object) -> dict[str, object]:
    return {
        "model": {"create": CREATE}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3}, "algorithm": {"group_size": 2},
        "sft": {"steps": 1, "batch_size": 2, "warmup_steps": 0},
        "rollout": {"prompts_per_step": 2, "max_tokens": 4}, "run": {"max_steps": 2, "directory": str(folder), "name": "r", "trace_steps": [1]},
        "trainer": {"warmup_steps": 0}, "evaluation": {"every_steps": 100, "prompts": 2, "final_prompts": 2}, "machine": {"threads": 1},
        "rewards": {"workers": 1}, "traces": {"endpoint": endpoint}, **sections,
    }  # fmt: skip


@pytest.mark.full
def test_one_step_is_one_trace_of_controller_ranks_rollout_and_reward_workers(tmp_path: Path) -> None:
    with HttpReceiver() as receiver:
        train(recipe_of(tmp_path, receiver.endpoint, parallel={"data": 2}), progress=False)
    assert set(receiver.paths) == {"/v1/traces"}
    trace = receiver.traces()[trace_of_step(tmp_path / "r", 1).trace_id]
    spans = {span.span_id: span for span in trace}
    assert len(spans) == len(trace), "every span came once"

    def path(span: Received) -> list[str]:
        return [span.name] if not span.parent_id else [*path(spans[span.parent_id]), span.name]

    [step] = [span for span in trace if not span.parent_id]
    assert (step.name, step.attributes["tandem.step"], step.resource["process.pid"]) == ("step", 1, os.getpid())
    assert all(path(span)[0] == "step" for span in trace), "every span hangs from the step"
    for span in trace:
        parent = spans.get(span.parent_id, span)
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns + 10**9, "all clocks are that of this machine"
        assert (span.resource["service.namespace"] if "reward" not in str(span.resource["service.name"]) else "r") == "r"

    phases = {span.name for span in trace if span.parent_id == step.span_id}
    assert {"offload", "convert", "register", "update_weight", "rollout", "onload", "train", "rewards"} <= phases
    of_call = {(span.resource["service.name"], span.name): span for span in trace if span.kind == 2}
    for process, call in (("tandem-rollout-shim", "rollout"), ("tandem-rollout-worker", "rollout"), ("tandem-rollout-worker", "update_weight"),
                          ("tandem-trainer-shim", "train"), ("tandem-reward-worker", "judge")):  # fmt: skip
        assert (process, call) in of_call
    ranks = [span for span in trace if span.name == "train" and "tandem.rank" in span.resource]
    assert sorted(span.resource["tandem.rank"] for span in ranks) == [0, 1], "both ranks of the trainer"
    assert {path(span)[1] for span in ranks} == {"train"} and path(of_call["tandem-rollout-worker", "rollout"])[1] == "rollout"
    pids = {span.resource["process.pid"] for span in trace}
    assert len(pids) >= 7, "controller, two shims, two ranks, a rollout worker and a reward worker"

    # The parts of a step in run.trace_steps are those of the timeline.
    in_file = (tmp_path / "r" / "traces" / "step-1-rank-0.json").read_text()
    parts = [span for span in trace if span.resource.get("tandem.rank") == 0 and span.name in ("forward", "backward", "optimizer")]
    assert {span.name for span in parts} == {"forward", "backward", "optimizer"}
    assert all(f'"ts": {span.start_ns / 1000}' in in_file for span in parts)
    other = receiver.traces()[trace_of_step(tmp_path / "r", 0).trace_id]
    assert {"step", "train"} <= {span.name for span in other} and not [span for span in other if span.name == "forward"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_a_run_on_data_is_one_trace_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    with HttpReceiver() as receiver:
        run = {"max_steps": 3, "directory": str(tmp_path), "name": "r"}
        train({**DATA, "model": {"create": CREATE}, "run": run, "parallel": {"data": ranks}, "traces": {"endpoint": receiver.endpoint}}, progress=False)
    for step in range(3):
        trace = receiver.traces()[trace_of_step(tmp_path / "r", step).trace_id]
        [whole] = [span for span in trace if not span.parent_id]
        assert (whole.name, whole.attributes["tandem.step"]) == ("step", step)
        of_ranks = [span for span in trace if span.name == f"step on rank {ranks - 1}"]
        assert [span.parent_id for span in of_ranks] == [whole.span_id] * (ranks - 1)
        assert sorted(span.name for span in trace if span.name == "train") == ["train"] * ranks
        assert len({span.resource["process.pid"] for span in trace}) == ranks


@pytest.mark.full
def test_a_share_of_the_steps_is_recorded_and_no_collector_changes_no_result(tmp_path: Path) -> None:
    def run(name: str, **traces: object) -> tuple[float, ...]:
        settings = {"max_steps": 12, "directory": str(tmp_path), "name": name}
        section = {"traces": traces} if traces else {}
        result = train({**DATA, "model": {"create": CREATE}, "run": settings, **section}, progress=False)
        return tuple(float(row["train/loss"]) for row in result.metrics)

    with HttpReceiver() as receiver:
        traced = run("half", endpoint=receiver.endpoint, sample_ratio=0.5)
    sampled = {step for step in range(12) if trace_of_step(tmp_path / "half", step, 0.5).sampled}
    assert {span.attributes["tandem.step"] for span in receiver.named("step")} == sampled
    assert traced == run("down", endpoint="http://127.0.0.1:9") == run("off")


@pytest.mark.full
def test_a_step_whose_worker_is_killed_has_its_recovery_and_both_attempts_in_one_trace(tmp_path: Path) -> None:
    with HttpReceiver() as receiver:
        train(recipe_of(tmp_path, receiver.endpoint), progress=False, faults=FaultPlan.parse("rollout_worker:before:rollout:1"))
    trace = receiver.traces()[trace_of_step(tmp_path / "r", 1).trace_id]
    first, second = sorted((span for span in trace if not span.parent_id), key=lambda span: span.start_ns)
    assert (first.name, second.name) == ("step", "step") and first.span_id != second.span_id and first.end_ns <= second.start_ns
    [recovery] = [span for span in trace if span.name == "recovery"]
    assert recovery.parent_id == first.span_id and "rollout" in recovery.attributes["error.message"]
    broken = [span for span in trace if span.name == "rollout" and span.parent_id == first.span_id]
    assert [span.status for span in broken] == [2] and "SidecarDied" in broken[0].message
    pids = {span.resource["process.pid"] for span in trace if span.resource["service.name"] == "tandem-rollout-worker"}
    assert len(pids) == 2, "the killed worker's spans before it, and those of its successor"
