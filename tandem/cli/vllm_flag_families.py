"""Groups of flags of ``vllm serve`` that have one answer: what of them Tandem does otherwise, or does not have."""

import re

_LEAVE = "leave it out"
_TEXT = f"the models take text alone; {_LEAVE}"
_INSTANCES = "use --instances, the number of engines"
_KERNELS = "use --kernels and --attention"
_GRAPHS = "CUDA graphs are on, and --enforce-eager turns them off"
_FAMILIES = {
    r"-dp\w+|data-parallel-.*|dp-.*|disable-nccl-for-dp-.*|enable-elastic-ep|elastic-ep-.*|enable-scale-out": _INSTANCES,
    r"-n|-r|node-rank|master-(addr|port)": f"an engine runs on one machine; {_LEAVE}",
    r"-[dp]cp|(decode|prefill)-context-parallel-size|c?p-kv-cache-.*|dcp-.*|cp-kv-.*|enable-hc-sp": "use --tensor-parallel-size",
    r"-ep|.*eplb.*|all2all-backend|enable-ep-.*|expert-placement-.*|(enable-)?(dbo|ubatch)(-.*)?|moe-backend|enable-batch-sharded-.*": f"the experts of a "
    f"mixture are on every rank; {_LEAVE}",
    r"(mm|video|media|default-mm)-.*|allowed-(local-)?media-.*|(enable|skip|trust-request|interleave|disable-chunked)-mm-.*": _TEXT,
    r"language-model-only|.*tower-.*|-dc|diffusion-.*": _TEXT,
    r".*(mamba|replayssm|gdn|kda|engram|swa-bounded|sparse-indexer).*|disable-sliding-window|disable-hybrid-.*": f"the models have attention alone; {_LEAVE}",
    r"offload-.*|cpu-offload-.*|kv-offloading-.*": "use --swap-space for keys and values; weights stay on the device, smaller with --quantization",
    r"(enable-)?log(ging)?-.*|aggregate-.*|disable-access-log-.*|enable-logging-.*": "the log has no prompts; use --disable-uvicorn-access-log and "
    "--disable-log-stats",
    r".*(metrics|nvtx|traces|profiler|jit-monitor|fingerprint|histogram).*|enable-force-include-usage": f"Prometheus reads /metrics; {_LEAVE}",
    r"grpc.*": "use --port, for HTTP",
    r"h11-.*|sse-.*": "use --request-timeout, --stall-timeout and --max-body-mib",
    r"-a?sc|spec-.*": "use --speculative-config and --async-scheduling",
    r"-ac|attention-config|(linear|kernel)-.*|ir-op-.*|enable-flash.*|.*-backend": _KERNELS,
    r"-cc|.*cudagraph.*|optimization-level|performance-mode": _GRAPHS,
    r"(numa|ray|worker|distributed|cpu-distributed|fault-tolerance)-.*|device-ids|enable-(fault|shm|nccl|cumem)-.*|max-parallel-loading-.*": f"ranks are "
    f"processes of this machine, pinned by --threads; {_LEAVE}",
    r"(safetensors|pt-load|model-loader|use-tqdm|ignore)-.*|model-(impl|class-.*)|allow-deprecated-.*|io-processor-.*|renderer-.*": f"a folder is read "
    f"as it is; {_LEAVE}",
    r"max-num-(active|queued|scheduled)-.*|(scheduler|prefill|long-prefill|watermark|stream)-.*|kv-sharing-.*": "use --max-num-seqs, "
    "--max-num-batched-tokens, --max-prefill-slowdown, --max-waiting and --watermark",
    r"device-memory-utilization": "use --gpu-memory-utilization",
    r"kv-cache-dtype-.*|prefix-.*": "use --kv-cache-dtype and --enable-prefix-caching",
    r".*lora.*": "use --lora-modules, --max-loras and --max-lora-rank",
    r"sleep-.*|weight-transfer-config": f"POST /sleep and the calls of weight updates work with --control-key; {_LEAVE}",
    r"shutdown-timeout": "use --drain-timeout",
    r"(ec|kv|aux|reasoning|additional)-.*config|reasoning-parser-plugin": f"there is no plugin for it; {_LEAVE}",
    r"tool-s.*|exclude-tools-.*|tokens-only|cohere-.*|anthropic-.*": "use --enable-auto-tool-choice, --tool-call-parser and --reasoning-parser",
    r"enable-(server-load-.*|offline-docs|prompt-embeds|return-.*|trace-.*)|disable-fastapi-docs|return-sampling-mask": f"there is no such "
    f"call or field; {_LEAVE}",
    r"use-fp64-gumbel|fail-on-environ-.*": f"draws depend on the request alone, and no variable of the environment is read; {_LEAVE}",
    r"skip-tokenizer-init": f"a server needs a tokenizer; {_LEAVE}",
}


def of_family(flag: str) -> str:
    """Returns what to use instead of ``flag``, or of the switch that its ``--no-`` turns off; empty for a flag that vLLM does not have either."""
    name = flag.removeprefix("--")
    return next((text for pattern, text in _FAMILIES.items() if re.fullmatch(pattern, name)), "")
