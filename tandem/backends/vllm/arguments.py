"""The command line of ``vllm serve`` for an engine of a pod. Imports no torch."""

import json
from collections.abc import Mapping

from tandem.config.engine import EngineArgs
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.layout.shapes import ModelShapes
from tandem.types.sample import WeightVersion

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of a KV block: vLLM's default on a GPU; on a CPU the smallest size that its attention handles well. Its default there is 128 tokens, of which a short
sample would leave most empty."""
MODEL_NAME = "policy"
BACKEND = "tandem"
"""The name of our weight transfer and of our plugin in vLLM."""

BOTH_LOGPROBS = 2
"""``logprobs`` of a request that asks for a raw log-probability too: vLLM answers with as many entries for a token, its own first."""


def version_label(version: WeightVersion) -> str:
    """Returns how vLLM names these weights in its responses: ``INCARNATION.STEP``."""
    return f"{version.incarnation}.{version.step}"


def kv_cache_bytes(shapes: ModelShapes, dtype: str, tokens: int, max_num_seqs: int, device: str) -> int:
    """Returns the bytes of a cache for ``tokens`` tokens, with a block more for each sequence, whose last one is seldom full, and vLLM's empty one."""
    return (tokens + (max_num_seqs + 1) * BLOCK_TOKENS[device]) * kv_bytes_per_token(shapes, dtype)


def serve_arguments(
    engine: EngineArgs, *, dtype: str, seed: int, max_model_len: int, cache_bytes: int, device: str, reads_weights: bool, returns_routing: bool = False,
    returns_times: bool = False,
) -> list[str]:
    """Returns the arguments after the model. ``cache_bytes``: of the KV cache over all ranks. ``reads_weights``: begin with those of the folder instead of
    dummy weights. ``returns_routing``: answers have the experts of each token; ``returns_times``: how long a request waited and was computed."""
    options = {
        "served-model-name": MODEL_NAME,
        "load-format": "auto" if reads_weights else "dummy",
        "generation-config": "vllm",
        "dtype": dtype,
        "seed": str(seed),
        "max-model-len": str(max_model_len),
        "max-num-seqs": str(engine.max_num_seqs),
        "max-num-batched-tokens": str(max(engine.max_num_batched_tokens, max_model_len)),
        "kv-cache-memory-bytes": str(-(-cache_bytes // engine.tensor_parallel_size)),
        "block-size": str(BLOCK_TOKENS[device]),
        "tensor-parallel-size": str(engine.tensor_parallel_size),
        # What a token was drawn from: after the temperature. Raw ones would be those of temperature 1 whatever it is.
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "worker-extension-cls": "tandem.backends.vllm.worker_extension.WorkerExtension",
    }
    switches = ["enable-scale-out", "disable-uvicorn-access-log", "no-enable-log-requests"]
    if not returns_times:
        switches.append("disable-log-stats")
    if device == "cpu" or engine.enforce_eager:
        # On a CPU compiling takes a minute at each start.
        switches.append("enforce-eager")
    if device == "cpu" and engine.tensor_parallel_size == 1:
        options["distributed-executor-backend"] = "uni"
    if returns_routing:
        switches.append("enable-return-routed-experts")
    switches += [f"{'' if value else 'no-'}enable-{name}" for name, value in _switched(engine).items()]
    return [*(part for name, value in options.items() for part in (f"--{name}", value)), *(f"--{name}" for name in switches)]


def _switched(engine: EngineArgs) -> Mapping[str, bool]:
    return {"prefix-caching": engine.enable_prefix_caching, "chunked-prefill": engine.enable_chunked_prefill}


def environment(device: str, tensor_parallel_size: int) -> dict[str, str]:
    """Returns the variables that such a server reads besides its arguments."""
    if device != "cpu":
        return {}
    # Nothing is compiled: a first request would wait 20 s for one small function.
    if tensor_parallel_size == 1:
        # The engine's only worker is in its own process.
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    # vLLM binds each rank to a NUMA node of its own, and ends where there are fewer. The pod divides the cores: each rank has as many threads as it is told.
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
