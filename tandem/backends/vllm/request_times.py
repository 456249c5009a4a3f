"""The times of a request in vLLM's answers to ``/inference/v1/generate``, as in those of its OpenAI API. Runs inside vLLM.

vLLM 0.32 has a place for them in the answer, and fills it for chat completions alone (``--enable-per-request-metrics``).
"""

from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

from vllm.entrypoints.generate.base.serving import build_per_request_timing_metrics
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponseBase
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens


@cache
def report_times() -> None:
    """Lets the answers of this server have ``metrics`` with times, where vLLM keeps statistics."""
    original = ServingTokens.serve_tokens_full_generator

    async def timed(self: Any, request: Any, results: AsyncGenerator[Any, None], *others: Any) -> Any:
        last = None

        async def seen() -> AsyncGenerator[Any, None]:
            nonlocal last
            async for last in results:
                yield last

        answer = await original(self, request, seen(), *others)
        if isinstance(answer, GenerateResponseBase) and answer.metrics is None and last is not None and last.metrics is not None:
            answer.metrics = build_per_request_timing_metrics(last.metrics, sum(len(output.token_ids) for output in last.outputs))
        return answer

    ServingTokens.serve_tokens_full_generator = timed
