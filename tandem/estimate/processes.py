"""Resident bytes of processes that have imported what they need and hold nothing yet, and which of them a run starts. Imports no torch.

Ranks are forked from a fork server, whose pages they have in common: each has them in its resident size, and the machine has them once. Predictions of a rank
are of its resident size, which the run measures; a check of the machine counts the server once, and of every forked rank what it does not share
(``SHARED_BYTES``).
"""

from dataclasses import dataclass

from tandem.config.trainer import TrainerConfig

CONTROLLER_BYTES = 65 * 2**20
"""Measured: the process of ``tandem train`` where others train (56 MiB in a run on data, 65 in one with a pod). It imports no torch."""
SHIM_BYTES = 40 * 2**20
"""Measured: the shim of a sidecar (37 and 39 MiB)."""
FORK_SERVER_BYTES = 240 * 2**20
"""Measured, torch 2.13 on a CPU: a fork server (``runtime.process.fork_server``) with the modules of a rank."""
FORKED_RANK_BYTES = 205 * 2**20
"""Measured: a forked rank that has joined its process groups, without its weights: 203 to 206 MiB are resident (a proportional set size of 88 to 91 with two
ranks and the server)."""
SHARED_BYTES = 175 * 2**20
"""Measured: the pages of a forked rank that are its server's; 27 to 32 MiB are its own."""
TRAINING_PROCESS_BYTES = 275 * 2**20
"""Measured: a process that has imported the same itself, as the only rank of a run on data does and those of other backends."""


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Resident bytes of the processes of an engine that hold nothing yet: ``first``, its worker, ``further``, each other tensor-parallel rank, which its worker
    starts, and ``shared``, the pages of the worker that are its fork server's (0: it is not forked)."""

    first: int
    further: int
    shared: int = 0

    def total(self, ranks: int) -> int:
        """Returns the bytes of the processes of ``ranks``."""
        return self.first + (ranks - 1) * self.further


FORKED_ENGINE = EngineProcesses(195 * 2**20, 255 * 2**20, SHARED_BYTES)
"""Tandem's engine. The worker: estimated from one with a small engine, which had 226 MiB, less its weights, cache and buffers. A further rank, which imports
torch itself: measured."""
VLLM_ENGINE = EngineProcesses(1950 * 2**20, 1950 * 2**20)
"""vLLM's: of a rollout worker with one rank its own process, the API server and the engine (measured: 2,050 MiB with a model of 5 MB and a cache of 90)."""
COMPILER_BYTES = 140 * 2**20
"""Measured: torch's compiler, which ``torch.utils.checkpoint`` imports and nothing else does."""
DEEPSPEED_BYTES = 150 * 2**20
"""Measured, DeepSpeed 0.19.8: what a rank has loaded with it, torch's compiler included."""


def rank_process_bytes(trainer: TrainerConfig, is_forked: bool = True) -> int:
    """Returns the resident bytes of a rank without its weights and activations. ``is_forked``: where its backend allows it."""
    if trainer.backend == "deepspeed":
        return TRAINING_PROCESS_BYTES + DEEPSPEED_BYTES
    process = FORKED_RANK_BYTES if is_forked and forks(trainer) else TRAINING_PROCESS_BYTES
    return process + (COMPILER_BYTES if trainer.recompute == "full" else 0)


def forks(trainer: TrainerConfig) -> bool:
    """Returns whether ranks are forked: those of other backends start in environments of their own."""
    return trainer.backend == "tandem"


def share_fork_server(trainer: TrainerConfig, ranks: int, engines: int, pods: int) -> bool:
    """Returns whether the trainer and the engine of a pod are forked from one server: where each is a single process, so that both have the same threads and
    the same settings of the allocator, which a process has from its start."""
    return forks(trainer) and ranks == engines == pods == 1


def data_run_bytes(trainer: TrainerConfig, ranks: int) -> int:
    """Returns the bytes of this machine that the processes of a run on data take beside the resident sizes of its ranks: its controller and its fork server,
    less what the ranks share with it. The only rank of a run is its controller."""
    return 0 if ranks == 1 else CONTROLLER_BYTES + FORK_SERVER_BYTES - ranks * SHARED_BYTES
