"""vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``)."""

import contextlib
import multiprocessing
import os

from tandem.runtime.process.child import die_with_parent


def register() -> None:
    """Ties the life of this process to its parent's, so that no part of an engine outlives its server, and makes the weight transfer of ``weight_engine``
    known to vLLM, its recording of routed experts possible on a CPU, its shared memory one without names, and the times of requests part of its answers."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from tandem.backends.vllm.rank_memory import remove_names_when_joined
    from tandem.backends.vllm.routed_experts import allow_on_cpu

    allow_on_cpu()
    remove_names_when_joined()
    die_with_parent(os.getppid())
    if multiprocessing.parent_process() is None:  # The process that answers over HTTP.
        from tandem.backends.vllm.request_times import report_times

        report_times()
    with contextlib.suppress(ValueError):  # It is called more than once in some processes.
        WeightTransferEngineFactory.register_engine("tandem", "tandem.backends.vllm.weight_engine", "PublishedWeights")
