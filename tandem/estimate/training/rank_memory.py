"""The bytes of one GPU in a training step. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the fullest GPU at the worst moment, by kind; they add up to ``total``. ``pipeline_stash``: activations of micro-batches that await their
    backward pass beside the current one. ``gathered``: parameters that ZeRO 3 has gathered. ``context``: of the driver and the libraries."""

    parameters: int
    gradients: int
    optimizer: int
    master_weights: int
    activations: int
    pipeline_stash: int
    logits: int
    gathered: int
    communication: int
    fragmentation: int
    context: int

    @property
    def total(self) -> int:
        return int(sum(getattr(self, name) for name in self.__slots__))
