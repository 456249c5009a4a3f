"""Direct Preference Optimization: the loss on pairs of a chosen and a rejected answer to the same prompt.

With h = log (pi(y_w) / pi_ref(y_w)) - log (pi(y_l) / pi_ref(y_l)) for the chosen y_w and the rejected y_l, whole answers:

    sigmoid   -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)                        Rafailov et al., 2023, equation 7; e: Mitchell, 2023
    robust    (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)          Chowdhury et al., 2024, equation 11
    hinge     max(0, 1 - beta h)                                                           Zhao et al., 2023 (SLiC-HF)
    ipo       (h' - 1 / (2 beta))^2, h' as h with means over the tokens of each answer     Azar et al., 2023, equation 17

e is ``label_smoothing``, the share of the pairs that are labelled the wrong way. The means of ipo are those of TRL, whose authors had them
confirmed by the authors of the paper."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from tandem.config.preference import PreferenceLoss
from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.losses.aggregate import sequence_sums
from tandem.trainer.losses.mismatch import mismatch_shares
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


class AnswerRatios(NamedTuple):
    """Per pair: ``chosen[P]`` and ``rejected[P]``, the sum of log (pi / pi_ref) over the learned tokens of each answer (nats), and the numbers
    of these tokens."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


def dpo_loss(ratios: AnswerRatios, loss_type: PreferenceLoss, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Returns the loss of each pair [P]."""
    if loss_type == "ipo":
        difference = ratios.chosen / ratios.chosen_tokens - ratios.rejected / ratios.rejected_tokens
        return (difference - 1.0 / (2.0 * beta)).square()
    margin = beta * (ratios.chosen - ratios.rejected)
    if loss_type == "hinge":
        return F.relu(1.0 - margin)
    right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    if loss_type == "robust":
        return ((1.0 - label_smoothing) * right - label_smoothing * wrong) / (1.0 - 2.0 * label_smoothing)
    return (1.0 - label_smoothing) * right + label_smoothing * wrong


def make_dpo_loss(
    loss_type: PreferenceLoss, beta: float, label_smoothing: float, pairs: int, name: str, mismatch_tokens: int = 0
) -> Loss:
    """Returns a loss: the mean of ``dpo_loss`` over the ``pairs`` of the global batch, as shares of micro-batches, with the metric ``name``.

    In a micro-batch the sequences 2i and 2i + 1 are the chosen and the rejected answer of pair i; one of a rank without data has a single
    sequence without rows. The other metrics have TRL's names: ``rewards/chosen`` and ``rewards/rejected`` are means of beta log (pi / pi_ref),
    ``rewards/accuracies`` the share of the pairs whose chosen answer has the larger one. ``mismatch_tokens``: as in ``make_policy_loss``."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        assert rows.reference_logprobs is not None or not len(rows.rows), "DPO needs reference log-probabilities"
        mask, sequences = rows.mask.double(), rows.sequence_count
        raw = outputs.logprobs.raw.double()
        reference = rows.reference_logprobs.double() if rows.reference_logprobs is not None else raw.detach()
        answers = sequence_sums((raw - reference) * mask, rows.sequence_of_row, sequences)
        policy = sequence_sums(raw.detach() * mask, rows.sequence_of_row, sequences)
        tokens = sequence_sums(mask, rows.sequence_of_row, sequences)
        both = slice(0, sequences // 2 * 2)
        ratios = AnswerRatios(answers[both][::2], answers[both][1::2], tokens[both][::2], tokens[both][1::2])
        total = dpo_loss(ratios, loss_type, beta, label_smoothing).sum() / pairs
        chosen, rejected = beta * ratios.chosen.detach(), beta * ratios.rejected.detach()
        means = {
            "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/accuracies": (chosen > rejected).double(),
            "rewards/margins": chosen - rejected, "logps/chosen": policy[both][::2], "logps/rejected": policy[both][1::2],
        }  # fmt: skip
        sums, maxima = mismatch_shares(outputs.logprobs.raw, rows, mismatch_tokens) if mismatch_tokens else ({}, {})
        return LossShare(total, {name: total.detach(), **{key: values.sum() / pairs for key, values in means.items()}, **sums}, maxima)

    return loss
