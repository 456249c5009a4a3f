"""Moves the weights of a model without an optimizer towards those of one that is trained on the same ranks."""

import torch

from tandem.trainer.parallel.replica import FrozenReplica, Replica


@torch.no_grad()
def follow(follower: FrozenReplica, actor: Replica, alpha: float) -> None:
    """Sets every weight of ``follower`` to alpha x actor + (1 - alpha) x follower; with ``alpha`` 1 to the actor's bits. Every rank calls it.

    Product and sum are rounded one by one, so that the bits do not depend on how weights are sharded. Parameters that only the actor has, such as a
    critic's head, are left out; the models are those of one folder otherwise."""
    held: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, first, own in follower.runs():
        held.setdefault(name, []).append((first, own))
    for name, weight in actor.each_parameter():
        for first, own in held.get(name, ()):
            theirs = weight.reshape(-1)[first : first + own.numel()]
            if alpha == 1:
                own.copy_(theirs)
            else:
                own.mul_(1 - alpha).add_(theirs * alpha)
