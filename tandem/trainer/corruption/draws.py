"""Draws the micro-batches of a step that a second replica computes, and which replica does. Imports no torch."""

import math
from hashlib import blake2b
from typing import NamedTuple

from tandem.layout.mesh import Mesh, MeshShape


class Draw(NamedTuple):
    """Micro-batch ``number`` of every replica is computed again by the replica ``shift`` places after it."""

    number: int
    shift: int


def drawn(seed: int, step: int, update: int, micro_batches: int, rate: float, replicas: int) -> list[Draw]:
    """Returns the draws among ``micro_batches`` of optimizer update ``update`` of ``step``, each with probability ``rate``.

    A pure function of its arguments, so a repeated step checks the same. The shifts are uniform over 1 to ``replicas - 1``: in time every replica is
    compared with every other one."""
    if replicas < 2 or rate <= 0:
        return []
    draws = []
    for number in range(micro_batches):
        bits = int.from_bytes(blake2b(f"{seed}/{step}/{update}/{number}".encode(), digest_size=16).digest(), "little")
        chance, place = divmod(bits, 1 << 64)
        if chance < rate * 2**64:
            draws.append(Draw(number, 1 + place % (replicas - 1)))
    return draws


def data_ranks_of_a_replica(shape: MeshShape) -> int:
    """Returns how many neighbours along ``data`` compute their micro-batches together: those whose tokens go to the same shards of experts."""
    return math.lcm(shape.expert, shape.context) // shape.context


def replicas_of(shape: MeshShape) -> int:
    """Returns the number of groups of ranks that each compute micro-batches without the others."""
    return shape.data // data_ranks_of_a_replica(shape)


def computer_of(shape: MeshShape, rank: int, shift: int) -> int:
    """Returns the world rank that computes with ``shift`` what ``rank`` computes of its own micro-batch."""
    group = Mesh(shape, rank).group("data")
    return group[(group.index(rank) + shift * data_ranks_of_a_replica(shape)) % len(group)]
