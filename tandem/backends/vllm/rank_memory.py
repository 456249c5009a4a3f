"""The shared memory in which vLLM's tensor-parallel ranks on a CPU sum. Runs inside vLLM."""

from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator

SHARED_MEMORY = Path("/dev/shm")


def remove_names_when_joined() -> None:
    """Lets each rank remove the name of its segment as soon as all ranks have opened it, so that a server that is killed leaves no memory behind."""
    kind: Any = cpu_communicator._CPUSHMDistributed
    original = kind._init_cpu_shm

    def init(self: Any) -> Any:
        handle = original(self)  # It ends with a barrier of the ranks.
        (SHARED_MEMORY / f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    kind._init_cpu_shm = init
