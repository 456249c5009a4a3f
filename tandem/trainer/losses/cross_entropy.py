"""The loss of supervised fine-tuning."""

from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.losses.aggregate import GlobalCounts, row_weights, weighted_sum
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


def make_cross_entropy_loss(counts: GlobalCounts, room: str = "sft") -> Loss:
    """Returns a loss: the mean of -log pi over the counted tokens of the global batch, as shares of micro-batches. ``room``: the prefix of
    its metrics."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        logprobs = outputs.logprobs
        weights = row_weights("token-mean", rows.mask, rows.sequence_of_row, rows.sequence_mask_sums, counts)
        total = weighted_sum(-logprobs.raw, weights)
        entropy = weighted_sum(logprobs.entropy.detach(), weights)
        return LossShare(total, {f"{room}/loss": total.detach(), f"{room}/entropy": entropy}, {})

    return loss
