"""The loss of a reward model on preference pairs (Bradley and Terry, 1952; Ouyang et al., 2022, "InstructGPT", equation 1).

With the scores r_w of the chosen and r_l of the rejected answer, and a margin m by which the chosen one is better (Touvron et al., 2023, "Llama 2",
equation 2):

    -log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2

c is ``center_coef``, which draws scores to a mean of 0 (Eisenstein et al., 2023, section 2), as in TRL's ``RewardTrainer``."""

import torch.nn.functional as F
from torch import Tensor

from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


def preference_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, center_coef: float) -> Tensor:
    """Returns the loss of each pair [P], given ``chosen[P]`` and ``rejected[P]`` scores and ``margins[P]``."""
    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected).square()


def make_reward_model_loss(center_coef: float, pairs: int, name: str) -> Loss:
    """Returns a loss: the mean of ``preference_loss`` over the ``pairs`` of the global batch, as shares of micro-batches, with the metric ``name``.

    In a micro-batch the sequences 2i and 2i + 1 are the chosen and the rejected answer of pair i (``sequence_scores.scored_sequence``). The other metrics
    are means: ``rewards/chosen``, ``rewards/rejected``, their difference ``rewards/margins``, the mean score ``rewards/mean``, and
    ``rewards/accuracies``, the share of the pairs whose chosen answer has the larger score."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        chosen, rejected = outputs.values.double().view(-1, 2).unbind(1)
        total = preference_loss(chosen, rejected, rows.margins[: 2 * len(chosen) : 2].double(), center_coef).sum() / pairs
        chosen, rejected = chosen.detach(), rejected.detach()
        means = {
            "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/accuracies": (chosen > rejected).double(),
            "rewards/margins": chosen - rejected, "rewards/mean": (chosen + rejected) / 2,
        }  # fmt: skip
        return LossShare(total, {name: total.detach(), **{key: values.sum() / pairs for key, values in means.items()}}, {})

    return loss
