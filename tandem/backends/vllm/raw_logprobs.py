"""The raw log-probability of a sampled token beside the one of the distribution that it was drawn from. Runs inside vLLM; imports nothing of it.

vLLM reports log-probabilities of one kind, after temperature and filters or before them. Where the two differ, a request asks for ``BOTH_LOGPROBS`` of a
token: after the sampled token the entries of the likeliest tokens follow, and those have no use here. The raw one takes their places, under an id that is not
the sampled token's, since vLLM keeps one entry for each id.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tandem.backends.vllm.arguments import BOTH_LOGPROBS


def report_raw_logprobs(sampler: Any) -> None:
    """Lets the class of ``sampler`` report both. It is called as ``sampler(logits[R, V], ...)`` and returns a ``SamplerOutput`` with
    ``sampled_token_ids[R, 1]`` and ``logprobs_tensors``, which may be ``None``."""
    kind, method = type(sampler), "forward" if isinstance(sampler, nn.Module) else "__call__"
    original: Callable[..., Any] = getattr(kind, method)

    def with_raw(self: Any, logits: Tensor, *arguments: Any, **options: Any) -> Any:
        raw = logits.float().log_softmax(-1)  # First: sampling divides the logits in place.
        output = original(self, logits, *arguments, **options)
        _write(output, raw)
        return output

    setattr(kind, method, with_raw)


def _write(output: Any, raw: Tensor) -> None:
    """Writes the values of ``raw[R, V]`` at the sampled tokens over the entries of the likeliest ones."""
    tensors, sampled = output.logprobs_tensors, output.sampled_token_ids.long()
    if tensors is None or tensors.logprobs.shape[1] != 1 + BOTH_LOGPROBS:
        return
    tensors.logprobs[:, 1:] = raw.gather(1, sampled)
    tensors.logprob_token_ids[:, 1:] = torch.remainder(sampled + 1, raw.shape[1])
