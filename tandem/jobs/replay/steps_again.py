"""Repeats steps of a run on data, on any ranks: up to a recorded step, and on a saved batch."""

from collections.abc import Sequence

from tandem.jobs.data_run.data_run import DataRun
from tandem.jobs.data_run.finite_report import describe, describe_weights
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.nan_detector import NanDetector
from tandem.trainer.step import StepResult
from tandem.types import RunError, TrainSequence


def run_again(run: DataRun, last: int) -> None:
    """Repeats the steps from the loaded checkpoint to ``last`` and writes their rows. Every rank calls it. Raises ``RunError`` where no
    checkpoint could be loaded."""
    if run.checkpoints.last is None:
        raise RunError(f"no checkpoint at or before step {last} is whole; see the warnings above, and replay a later step")
    run.records.callback.message(f"loaded the checkpoint of step {run.first_step}")
    if run.first_step > last:
        return
    with run.batches() as loader:
        for step, batch in loader:
            run.records.callback.message(f"replaying step {step}")
            run.take(step, batch)
            run.write_row(step, run.trained, loader.idle_s)
            if step == last:
                return


def take_kept(run: DataRun, step: int, shares: Sequence[Sequence[TrainSequence]]) -> tuple[StepResult, list[str]]:
    """Takes optimizer step ``step`` on the saved batch ``shares``, one for each data-parallel rank, in one process. Returns the result, and
    lines that report where it is not finite."""
    micro_batches = [one for share in shares for one in run.micro_batches(share)[2]]
    weights = describe_weights(run.model)
    watch = NanDetector(run.model)
    sequences = [sequence for share in shares for sequence in share]
    result = run.update(step, counts_of(sequences), micro_batches, watch.forward_backward)
    tokens = sum(len(m.tokens) for m in micro_batches)
    lines = [
        f"step {step}: {len(sequences)} sequences, {tokens} tokens in {len(micro_batches)} micro-batches; {weights}",
        f"loss {result.metrics['train/loss']}, gradient norm {result.metrics['actor/grad_norm']}",
        *describe(watch.findings, len(run.model.layers), sum(1 for _ in run.model.parameters())),
    ]
    return result, lines
