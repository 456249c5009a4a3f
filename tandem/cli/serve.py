"""Answer OpenAI's API over HTTP with a model.

MODEL is a Hugging Face folder, here or in object storage (s3://...). Completions, chat completions and models stand under /v1;
/generate gives token ids, log-probabilities and weight versions; /metrics is for Prometheus. SIGTERM drains: requests under way
are finished, then the server ends.

examples:
  tandem serve runs/sort/model
  tandem serve runs/sort/model --port 8001 --served-model-name sort --instances 2
  tandem serve models/qwen --lora-modules sql=adapters/sql --speculative-config '{"method": "ngram"}'
  tandem serve runs/sort/model --host 0.0.0.0 --api-key @key.txt --control-key @control.txt
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder, or the address of one (s3://...)")
    parser.add_argument("--download-dir", metavar="DIR", help="where models from object storage are kept")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="what clients call it (default MODEL)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="a key that clients must bring, or @FILE; may be repeated")
    parser.add_argument("--control-key", metavar="KEY", help="the key of control calls, or @FILE; without one they are refused")
    parser.add_argument("--instances", type=int, default=1, help="engines, each in a process of its own")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="M", help="processes that each engine is spread over")
    parser.add_argument("--threads", type=int, help="threads of each engine, all its processes together (default: the cores, shared among the instances)")
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and completion together (default: the model's context)")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sequences that an engine decodes at once")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096, help="tokens of one step")
    parser.add_argument("--kv-cache-tokens", type=int, default=0, help="size of each engine's KV cache (default: at most 1 GiB)")
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt anew")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", help="round plain weights: int8, fp8, int4, bf16 or fp16 (+head: the output head too)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of keys and values: auto (the model's), bfloat16, int8 or fp8_e4m3")
    parser.add_argument("--swap-tokens", type=int, default=0, help="keys and values that host memory holds of preempted sequences")
    parser.add_argument("--speculative-config", metavar="JSON", help='guess tokens: \'{"method": "ngram"}\' or \'{"method": "draft", "model": FOLDER}\'')
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=FOLDER", help="LoRA adapters, served as models of their own")
    parser.add_argument("--enable-lora", action="store_true", help="take adapters, those of /v1/load_lora_adapter too")
    parser.add_argument("--max-loras", type=int, help="adapters that an engine holds at once (default: those of --lora-modules)")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--overlap", default="auto", choices=["auto", "on", "off"], help="plan a step while the one before is computed (auto: on a GPU)")
    parser.add_argument("--cuda-graphs", default="auto", choices=["auto", "off"], help="replay decoding steps from graphs, on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of requests that bring none")
    parser.add_argument("--max-waiting", type=int, default=1024, help="requests beyond those that are computed; more get 429")
    parser.add_argument("--drain-timeout", type=float, default=600.0, metavar="SECONDS", help="for requests under way after SIGTERM")
    parser.add_argument("--request-timeout", type=float, default=30.0, metavar="SECONDS", help="for a client to send its request")
    parser.add_argument("--stall-timeout", type=float, default=300.0, metavar="SECONDS", help="for a reader that takes nothing")


def run(options: argparse.Namespace) -> int:
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"'tandem serve' needs {module}, which is not installed; pip install 'tandem-rl[serve]'")
    from tandem.model.weight_store import WeightStore, is_remote

    if not is_remote(options.model):
        return _serve(options, options.model)
    with WeightStore(options.download_dir).hold(options.model) as held:
        return _serve(options, str(held.path))


def _serve(options: argparse.Namespace, folder: str) -> int:
    from tandem.runtime.processes import available_cores
    from tandem.serving.server import run_server
    from tandem.serving.settings import EngineArguments, ServerSettings

    adapters = tuple(_module(given) for given in options.lora_modules)
    engine = EngineArguments(
        model=folder, dtype=options.dtype, device=options.device, seed=options.seed, max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens, kv_cache_tokens=options.kv_cache_tokens,
        enable_prefix_caching=not options.no_prefix_caching, tensor_parallel_size=options.tensor_parallel,
        overlap=options.overlap, cuda_graphs=options.cuda_graphs,
        quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype, swap_tokens=options.swap_tokens,
        speculative=None if options.speculative_config is None else _object(options.speculative_config),
        enable_lora=options.enable_lora or bool(adapters), max_loras=options.max_loras or max(1, len(adapters)), max_lora_rank=options.max_lora_rank,
    )  # fmt: skip
    settings = ServerSettings(
        engine=engine, adapters=adapters, host=options.host, port=options.port, served_model_names=tuple(options.served_model_name) or (options.model,),
        api_keys=tuple(_key(key) for key in options.api_key), control_key=None if options.control_key is None else _key(options.control_key),
        instances=options.instances, threads=options.threads or max(1, available_cores() // max(1, options.instances)),
        max_waiting=options.max_waiting, drain_s=options.drain_timeout, request_s=options.request_timeout, stall_s=options.stall_timeout,
    )  # fmt: skip
    return run_server(settings)


def _module(given: str) -> tuple[str, str]:
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise UserError(f"--lora-modules has '{given}'; give each adapter as NAME=FOLDER")
    return name, folder


def _object(given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError as error:
        raise UserError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"--speculative-config is {given}; it must be a JSON object")
    return found


def _key(given: str) -> str:
    """A key as it stands, or the first line of a file: arguments can be seen by everybody on the machine."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        raise UserError(f"the key file '{given[1:]}' cannot be read: {error}") from None
