"""The models that a rank of the trainer sidecar holds between calls, and the moves that bring what a phase needs."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from tandem.config.recipe import Recipe
from tandem.layout.residents import Phase, Residency, State
from tandem.pod.actor import Actor
from tandem.pod.release import release
from tandem.pod.residents.residue import ResidueCheck
from tandem.pod.residents.trainer import TrainerResidents
from tandem.runtime.coordination.store import Guard
from tandem.runtime.process.processes import memory_of
from tandem.trainer.checkpoint.format.shard import DRAFT
from tandem.trainer.offload.offloader import Offloader
from tandem.trainer.offload.places import make_place
from tandem.trainer.optimizers.make import offload_folder
from tandem.trainer.rank_process import Rank
from tandem.types import RunError, WeightManifest, WeightVersion
from tandem.types.weights import Layout
from tandem.weight_transfer.convert import ConvertedWeights, convert
from tandem.weight_transfer.register import WeightWriter

logger = logging.getLogger(__name__)


@dataclass
class RankModels:
    """``actor``, with the models beside it, after ``steps`` optimizer steps since the start model.

    ``offloader``: where ``residents`` are saved (``None``: nothing moves). ``prefetch_after``: the phases at whose end the next one's residents are read.
    ``converted``: this rank's parts of the actor's weights under Hugging Face's names, whose values are read when they are published (``None``: not named
    yet). ``residue``: what phases leave behind; ``has_released``: memory that was freed has gone back to the machine, so that what the process holds is part
    of it; ``has_staged_moments``: a checkpoint with the optimizer's moments was staged."""

    recipe: Recipe
    rank: Rank
    actor: Actor
    residents: TrainerResidents
    offloader: Offloader | None
    prefetch_after: frozenset[Phase]
    steps: int
    converted: ConvertedWeights | None = None
    residue: ResidueCheck = field(default_factory=ResidueCheck)
    has_released: bool = False
    has_staged_moments: bool = False

    def expect(self, step: int) -> None:
        """Raises ``RunError`` unless the actor has taken ``step`` optimizer steps."""
        if step != self.steps:
            raise RunError(f"the trainer is at step {self.steps} and was asked for step {step}")

    def close(self) -> None:
        """Ends what works beside this thread: the writing of a checkpoint, and moves."""
        self.actor.checkpoints.close()
        if self.offloader is not None:
            self.offloader.close()

    # -- moves -------------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> Actor:
        """Brings what ``phase`` needs to the device and the rest where the plan says. Returns the actor."""
        before, device = dict(self.residents.states), self.rank.ranks.device
        self.residents.enter(phase, self.steps)
        has_left = any(before[name] is State.DEVICE and now is not State.DEVICE for name, now in self.residents.states.items())
        if has_left and self.offloader is not None and device.type == "cpu":
            # The C library would keep the memory of the reference through the update, whose tensors have other sizes.
            release(device)
        return self.actor

    def prefetch(self, phase: Phase) -> None:
        """Begins to bring back what ``phase`` needs."""
        self.residents.prefetch(phase, self.steps)

    def begin_offload(self, *, returns_memory: bool) -> None:
        """Begins to move away what a rollout does not need, but the actor, which is to be published first.

        With ``returns_memory``, where something moves, and on a GPU, freed memory goes back to the machine. On a CPU this costs the next step its page
        faults, which is not worth it where the engine has room anyway."""
        device = self.rank.ranks.device
        self.residents.leave(Phase.ROLLOUT, self.steps, but=("actor",))
        self.has_released = returns_memory or self.offloader is not None or device.type == "cuda"
        if self.has_released:
            release(device)

    def convert(self, engine_layout: Layout | None = None) -> ConvertedWeights:
        """Names and places this rank's parts of the actor's weights, once; ``engine_layout``: as in ``weight_transfer.convert``."""
        if self.converted is None:
            checkpoints = self.actor.checkpoints
            self.converted = convert(checkpoints.state, self.rank.publishing, engine_layout, checkpoints.state_of(DRAFT))
        return self.converted

    def publish(self, writer: WeightWriter, version: WeightVersion, guard: Guard | None, *, announces: bool = False) -> WeightManifest:
        """Writes this rank's converted parts and publishes the manifest of all ranks as ``version`` if ``guard`` holds; ``announces``: as of ``WeightWriter``.
        Then the actor moves away too. Raises ``RunError`` if they were not converted."""
        if self.converted is None:
            raise RunError("register was asked for before convert")
        # Where they are registered again, they have left already.
        if self.offloader is not None and self.offloader.is_away("actor"):
            self.enter(Phase.TRAIN)
        manifest = writer.publish(self.converted, version, guard, announces=announces)
        self.residents.leave(Phase.ROLLOUT, self.steps)
        self.residents.settle()
        if self.offloader is not None:
            release(self.rank.ranks.device)
        return manifest

    def take_moves(self) -> list[list[object]]:
        """Returns the moves that ended since this was asked: resident, move, bytes of all ranks and seconds of the slowest. Every rank makes the same."""
        moves = self.residents.take_moves()
        every = self.rank.ranks.all_values([value for each in moves for value in (float(each.size_bytes), each.seconds)], "moved bytes")
        columns = list(zip(*every, strict=True))
        pairs = zip(moves, columns[::2], columns[1::2], strict=True)
        return [[each.resident, str(each.move), int(sum(size)), max(seconds)] for each, size, seconds in pairs if sum(size)]

    def find_residue(self, phase: Phase) -> list[str]:
        """Returns what is left at the end of ``phase`` that should not be, on this rank."""
        moves = self.offloader is not None or self.residents.residency.rule.rebuilds
        if not (moves or self.has_released):
            return []
        held, lines = self.residents.held_bytes(), list[str]()
        if moves:
            lines += self.residue.of_residents(self.residents.states, held)
        if self.has_released:
            lines += self.residue.of_process(phase, _process_bytes(self.rank.ranks.device), held)
        for line in lines:
            logger.warning("left behind after %s: %s", phase, line)
        return lines

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Begins the checkpoint of the state after ``steps`` steps."""
        if not self.has_staged_moments:
            # The memory that a checkpoint is staged in is kept, and grows with the first one that has moments.
            self.residue, self.has_staged_moments = ResidueCheck(), self.steps > 0
        span = self.actor.tracer.span("checkpoint write", step=self.steps)
        self.actor.checkpoints.save(self.steps, {"steps": self.steps}, span, self.rank.beat)

    def copy_checkpoint(self, tiers: Collection[str]) -> bool:
        """Begins the checkpoint of the state after ``steps`` steps in ``tiers``, before the run's folder. Returns whether it does: not while another one is
        being written by some rank, because training does not wait for it."""
        checkpoints = self.actor.checkpoints
        if any(busy for (busy,) in self.rank.ranks.all_values([float(checkpoints.is_busy)], "whether a checkpoint is being written")):
            return False
        if not self.has_staged_moments:
            self.residue, self.has_staged_moments = ResidueCheck(), self.steps > 0
        checkpoints.copy(self.steps, {"steps": self.steps}, tiers, self.rank.beat)
        return True

    def take_written(self) -> list[list[object]]:
        """Returns what was written to tiers of checkpoints since this was asked, as of ``Written``."""
        return [list(each) for each in self.actor.checkpoints.take_written()]

    def take_committed(self) -> list[list[int | str]]:
        """Returns (step, digest) of the checkpoint that was committed since this was asked, in a list of at most one."""
        done = self.actor.checkpoints.take_committed()
        return [] if done is None else [[done.step, done.digest]]


def hold(recipe: Recipe, rank: Rank, actor: Actor, steps: int, residency: Residency, prefetch_after: Sequence[Phase]) -> RankModels:
    """Returns ``actor``, which has taken ``steps`` steps and is on the device, with the moves that ``residency`` asks for."""
    place = make_place(residency.to, rank.ranks.device, offload_folder(recipe.trainer, rank.directory)) if residency.rule.offloads else None
    offloader = Offloader(place, rank.ranks.device) if place is not None else None
    residents = TrainerResidents(residency, actor.residents(), offloader, rank.fault_point)
    return RankModels(recipe, rank, actor, residents, offloader, frozenset(prefetch_after), steps)


def _process_bytes(device: torch.device) -> int:
    """Returns the bytes that this process has allocated of its GPU, or without one its resident memory that it shares with no other."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    memory = memory_of(os.getpid())
    return memory.rss_bytes - memory.shm_bytes
