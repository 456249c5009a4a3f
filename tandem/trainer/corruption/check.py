"""Finds silent data corruption: a drawn micro-batch is computed by two replicas and compared bit for bit.

In a drawn pass every replica also computes a micro-batch of another one, before the training pass of the step and with the same weights; gradients of the
repetition are summed as always, so that every mesh and ZeRO stage takes part, and dropped. The digests of the training pass are taken while its gradients
arrive. They are compared before the optimizer's step. After a disagreement the micro-batch is computed by more replicas, and by the same ones again, and
``verdict.judge`` says who is wrong.
"""

import socket
from collections.abc import Callable, Sequence

import torch

from tandem.layout.mesh import MeshShape
from tandem.runtime.collectives.agreement import gather_values
from tandem.trainer.corruption.draws import Draw, computer_of, data_ranks_of_a_replica, drawn, replicas_of
from tandem.trainer.corruption.exchange import shifted
from tandem.trainer.corruption.finding import CorruptionFinding, SilentCorruption
from tandem.trainer.corruption.gradient_digests import LOSS, GradientDigests, combined
from tandem.trainer.corruption.verdict import Computation, judge
from tandem.trainer.micro_batch import MicroBatch, blank
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.step import Loss

MOST_REPETITIONS = 4
"""Repeated computations of a micro-batch after a disagreement, each by another replica, the first by its own."""
Again = Callable[[MicroBatch, Loss, Callable[[], None] | None], None]
"""Computes the loss and gradients of a micro-batch, reduces and drops them; calls the third argument after each backward pass."""


class CorruptionCheck:
    """Checks the updates of ``replica`` at ``rate``. Every rank has one and makes the same calls. ``seed``: of the draws."""

    def __init__(self, replica: Replica, rate: float, seed: int) -> None:
        self._replica, self._ranks, self._rate, self._seed = replica, replica.ranks, rate, seed
        self._step = self._update = self._compared = 0
        self._draws: list[Draw] = []
        self._checked: dict[int, dict[str, str]] = {}
        self._watch: GradientDigests | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        self._again: Callable[[MicroBatch], dict[str, str]] | None = None

    @property
    def _shape(self) -> MeshShape:
        return self._ranks.mesh.shape

    def begin_step(self, step: int) -> None:
        """Says that the next updates are those of ``step``."""
        self._step, self._update = step, 0

    def take_compared(self) -> int:
        """Returns how many micro-batches were compared since this was asked, over all ranks that train on different ones."""
        compared, self._compared = self._compared, 0
        return compared

    def begin(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, after_backward: Callable[[], None] | None, again: Again
    ) -> tuple[Loss, Callable[[], None] | None]:
        """Draws from the ``micro_batches`` of an update and computes those of another replica. Returns the loss and what follows each backward pass of the
        training pass."""
        counts = self._ranks.data.all_gather(torch.tensor([len(micro_batches)]), "the number of micro-batches").view(-1).tolist()
        self._draws = drawn(self._seed, self._step, self._update, int(max(counts)), self._rate, replicas_of(self._shape))
        self._update += 1
        if not self._draws:
            return loss, after_backward
        self._micro_batches = micro_batches

        def digests_of(micro_batch: MicroBatch) -> dict[str, str]:
            digests = GradientDigests(self._replica.model, [micro_batch], [0], self._replica.backward_order(1))
            again(micro_batch, digests.loss(loss), digests.after(None))
            return digests.take()[0]

        self._again = digests_of
        self._checked = {draw.number: self._computed(draw.number, draw.shift) for draw in self._draws}
        self._watch = GradientDigests(
            self._replica.model, micro_batches, [draw.number for draw in self._draws], self._replica.backward_order(len(micro_batches))
        )
        return self._watch.loss(loss), self._watch.after(after_backward)

    def end(self) -> None:
        """Compares what was computed twice. Raises ``SilentCorruption`` on every rank if some rank's bits differ."""
        if self._watch is None:
            return
        trained, self._watch = self._watch.take(), None
        own = [[combined(trained[draw.number]) if draw.number in trained else None, combined(self._checked[draw.number])] for draw in self._draws]
        every: list[list[tuple[str | None, str]]] = gather_values(self._ranks.world, own, "digests of micro-batches that were computed twice")
        for place, draw in enumerate(self._draws):
            of_training, of_check = [row[place][0] for row in every], [row[place][1] for row in every]
            owners = [rank for rank, digest in enumerate(of_training) if digest is not None]
            differing = [rank for rank in owners if of_training[rank] != of_check[computer_of(self._shape, rank, draw.shift)]]
            if differing:
                raise SilentCorruption(self._find(draw, differing, trained.get(draw.number, {})))
            self._compared += len(owners) * self._shape.data // self._shape.world
        self._checked, self._micro_batches, self._again = {}, (), None

    def _computed(self, number: int, shift: int) -> dict[str, str]:
        """Returns the digests of micro-batch ``number`` of the replica ``shift`` places before this one; of a blank one if that has no such micro-batch."""
        model, places = self._replica.model, shift * data_ranks_of_a_replica(self._shape)
        own = self._micro_batches[number] if number < len(self._micro_batches) else blank(model.dtype, model.device)
        assert self._again is not None
        return self._again(shifted(own, self._ranks.data, places, model.device))

    def _find(self, draw: Draw, differing: Sequence[int], trained: dict[str, str]) -> CorruptionFinding:
        """Repeats a micro-batch on which ranks disagree and returns what that says. ``differing``: the ranks whose training pass was contradicted."""
        replicas = replicas_of(self._shape)
        others = [shift for shift in range(1, replicas) if shift != draw.shift]
        repeats = [0, draw.shift, *others][:MOST_REPETITIONS]
        again = {shift: self._computed(draw.number, shift) for shift in repeats}
        told = [trained, self._checked[draw.number], {str(shift): digests for shift, digests in again.items()}, socket.gethostname()]
        every = gather_values(self._ranks.world, told, "digests of all tensors of a micro-batch on which ranks disagree")
        wrong, persistent, tensors, is_undecided = set[int](), set[int](), set[str](), False
        for owner in differing:
            computations = [(owner, every[owner][0], False)]
            computer = computer_of(self._shape, owner, draw.shift)
            computations.append((computer, every[computer][1], False))
            for shift in repeats:
                computer = computer_of(self._shape, owner, shift)
                computations.append((computer, every[computer][2][str(shift)], True))
            verdict = judge([Computation(rank, combined(digests), is_repeat) for rank, digests, is_repeat in computations])
            wrong |= set(verdict.wrong)
            persistent |= set(verdict.persistent)
            is_undecided |= verdict.digest is None
            right = next((digests for _, digests, _ in computations if combined(digests) == verdict.digest), every[owner][0])
            tensors |= {name for _, digests, _ in computations for name in right if digests.get(name) != right[name]}
        ranks = tuple(sorted(wrong))
        # The forward pass begins at the embedding, and an error spreads from where it arises: to the loss, or in the backward pass to earlier layers.
        named = [LOSS, *reversed([name for name, _ in self._replica.model.named_parameters()])]
        tensor = next((name for name in named if name in tensors), min(tensors))
        return CorruptionFinding(
            self._step, draw.number, differing[0], ranks, tuple(str(every[rank][3]) for rank in ranks), tensor, bool(persistent), is_undecided
        )


def corruption_check(replica: Replica, rate: float, seed: int) -> CorruptionCheck | None:
    """Returns the check of ``replica``, ``None`` where there is nothing to compare: one replica, or ``rate`` 0."""
    return CorruptionCheck(replica, rate, seed) if rate > 0 and replicas_of(replica.ranks.mesh.shape) > 1 else None
