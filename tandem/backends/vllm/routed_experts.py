"""vLLM's recording of routed experts (``--enable-return-routed-experts``) on a CPU. Runs inside vLLM.

vLLM 0.32 records the experts of each token, keeps them beside its prefix cache and returns them with a request, but only its second model runner, which needs
Triton, drives the connector that does so. Here the first one, which runs on CPUs, drives it.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector


def allow_on_cpu() -> None:
    """Lets vLLM's configuration take the option with the first model runner."""
    original = VllmConfig._verify_aux_output_compatibility

    def verify(self: Any) -> None:
        if self.use_v2_model_runner:
            original(self)

    VllmConfig._verify_aux_output_compatibility = verify


def return_routed_experts(runner: Any) -> None:
    """Lets ``runner``, a ``GPUModelRunner`` of the first kind whose cache is allocated, return what its routers choose."""
    connector = get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    pending: list[PendingAuxOutput] = []

    def execute(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute_model(scheduler_output, *arguments, **options)
        if scheduler_output.total_num_scheduled_tokens:
            pending[:] = [prepared for prepared in [connector.prepare_output(_batch_of(runner, scheduler_output))] if prepared is not None]
        return result

    def sample(*arguments: Any, **options: Any) -> Any:
        output = sample_tokens(*arguments, **options)
        while pending:
            step = pending.pop()
            counts = dict(zip(output.req_ids, map(len, output.sampled_token_ids), strict=True))
            # A request whose prompt is not at its end has sampled nothing; drafts, which are rejected, there are none.
            sampled = np.array([counts[request] for request in step.request_ids])
            step.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = step.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute, sample


def _batch_of(runner: Any, scheduler_output: Any) -> SimpleNamespace:
    """Returns what the connector reads of the second runner's batch: its requests, where each begins in it, and how many of its tokens were computed before."""
    requests = list(runner.input_batch.req_ids)
    scheduled = [scheduler_output.num_scheduled_tokens[request] for request in requests]
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=np.cumsum([0, *scheduled]),
        num_computed_tokens_np=np.array([runner.requests[request].num_computed_tokens for request in requests]),
    )
