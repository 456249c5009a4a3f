"""Flags of ``vllm serve`` that Tandem does not have, and what to use instead."""

import dataclasses
import re
from collections.abc import Container, Sequence

from tandem.cli.vllm_flag_families import of_family
from tandem.config.engine import EngineArgs
from tandem.config.vllm_names import ENGINE
from tandem.types import UserError

_LEAVE = "leave it out"
_GRAPHS = "CUDA graphs are on, and --enforce-eager turns them off"
_LOGS = "prompts are never logged, and --disable-uvicorn-access-log turns the line of each request off"
INSTEAD = {
    "--model": "give the model as the first argument, without a flag",
    "-pp": "use --tensor-parallel-size",
    "--data-parallel-size": "use --instances",
    "-dp": "use --instances",
    "--data-parallel-size-local": "use --instances",
    "--api-server-count": "one process serves HTTP for all --instances",
    "--nnodes": f"an engine runs on one machine; {_LEAVE}",
    "--headless": f"an engine runs on one machine; {_LEAVE}",
    "--tokenizer-revision": "write --tokenizer OWNER/NAME@REVISION",
    "--code-revision": f"no code of a model is run; {_LEAVE}",
    "--load-format": f"weights are read from safetensors; {_LEAVE}",
    "--prefix-caching-hash-algo": f"blocks are found by BLAKE2b; {_LEAVE}",
    "--kv-events-config": "use --kv-events",
    "--kv-transfer-config": "use --role prefill (kv_producer), decode (kv_consumer) or both (kv_both) with --kv-transfer-key",
    "--max-num-partial-prefills": f"prompts share the token budget of a step; {_LEAVE}",
    "--max-long-partial-prefills": f"prompts share the token budget of a step; {_LEAVE}",
    "--long-prefill-token-threshold": "lower --max-num-batched-tokens",
    "--num-scheduler-steps": f"steps are launched ahead with --async-scheduling; {_LEAVE}",
    "-O": _GRAPHS,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--cuda-graph-sizes": _GRAPHS,
    "--attention-backend": "use --attention",
    "--num-speculative-tokens": """use --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""",
    "--speculative-model": """use --speculative-config '{"method": "draft", "model": "MODEL"}'""",
    "--enable-reasoning": "use --reasoning-parser",
    "--tool-parser-plugin": "use one of the formats of --tool-call-parser",
    "--chat-template-content-format": f"the parts of a message are joined to a text; {_LEAVE}",
    "--trust-request-chat-template": "use --chat-template",
    "--logprobs-mode": f"'logprobs' are of temperature 1, before any filter, and /generate returns those of the draw too; {_LEAVE}",
    "--max-cpu-loras": "use --max-loras",
    "--fully-sharded-loras": _LEAVE,
    "--lora-dtype": f"an adapter has the model's dtype; {_LEAVE}",
    "--enable-sleep-mode": f"POST /sleep works with --control-key; {_LEAVE}",
    "--enable-log-requests": _LOGS,
    "--disable-log-requests": _LOGS,
    "--max-log-len": _LOGS,
    "--disable-sliding-window": f"layers have the windows of the model's config.json; {_LEAVE}",
    "--enable-flash-late-interaction": f"POST /pooling with task token_embed returns the vectors to compare; {_LEAVE}",
    "--enable-force-include-usage": "send 'stream_options' with include_usage",
    "--enable-server-load-tracking": "/metrics has vllm:num_requests_running, and /kv_cache the load of the engines",
    "--exclude-tools-when-tool-choice-none": f"with tool_choice 'none' a prompt has no tools; {_LEAVE}",
    "--stream-interval": f"a stream has an event after each step; {_LEAVE}",
    "--tool-server": f"the client runs the tools; {_LEAVE}",
    "--middleware": "put a proxy before the server",
    "--uds": "use --host and --port",
    "--enable-request-id-headers": "the field 'request_id' of a request is part of the answer's 'id'",
    "--enable-prompt-tokens-details": f"'usage' always has 'prompt_tokens_details'; {_LEAVE}",
}
"""For each flag of vLLM's server that Tandem does not have, what to use. Those of its engine are in ``vllm_names.ENGINE``."""


def check_flags(words: Sequence[str], known: Container[str]) -> None:
    """Raises ``UserError`` for a flag of vLLM that is not among the ``known`` ones of the command, with what to use instead."""
    for word in words:
        name = word.partition("=")[0]
        if name in known or not name.startswith("-"):
            continue
        instead = _instead(name)
        if name.startswith("--no-"):
            switch = f"--{name[5:]}"
            if switch in known:
                instead = f"{switch} is off unless it is given; {_LEAVE}"
            elif _instead(switch):
                instead = f"there is no {switch} to turn off; {_LEAVE}"
        if instead:
            raise UserError(f"'{name}' is a flag of vLLM that Tandem does not have: {instead}")


def _instead(name: str) -> str:
    option = name.removeprefix("--").replace("-", "_")
    if name in INSTEAD:
        return INSTEAD[name]
    return as_flags(ENGINE[option]) if name.startswith("--") and option in ENGINE else of_family(name)


def as_flags(text: str) -> str:
    """Returns ``text`` with options of ``EngineArgs``, such as ``enforce_eager=True`` or ``max_num_seqs``, as flags."""
    fields = {field.name for field in dataclasses.fields(EngineArgs)}

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in fields or ("_" not in name and value is None):
            return match[0]
        return f"--{name.replace('_', '-')}" + ("" if value in (None, "True") else f" {value[1:-1]}")

    return re.sub(r"\b(?P<name>[a-z]\w*)(?:=(?P<value>True|'[^']*'))?", flag, text)
