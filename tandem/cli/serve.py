"""Serve OpenAI's API over HTTP.

MODEL is a Hugging Face folder, local or in object storage (s3://...), or a model of the Hugging Face Hub. Completions, chat
completions and models are under /v1; /generate returns token ids, log-probabilities and weight versions; /metrics is for
Prometheus. After SIGTERM the server finishes its in-flight requests and exits.

examples:
  tandem serve runs/sort/model
  tandem serve Qwen/Qwen3-0.6B --max-model-len 4096
  tandem serve runs/sort/model --port 8001 --served-model-name sort --instances 2
  tandem serve runs/sort --follow                 the weights of a run that is training, each version as it is published
  tandem serve MODEL --follow s3://bucket/sort    the same of a run elsewhere, which writes them there (pods.weights_url)
  tandem serve models/qwen --lora-modules sql=adapters/sql --speculative-config '{"method": "ngram"}'
  tandem serve runs/sort/model --host 0.0.0.0 --api-key @key.txt --control-key @control.txt
"""

import argparse
import importlib.util
import json
import math
import re
import ssl
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.engine_options import add_engine_options, engine_args, json_object, template_text
from tandem.config.traces import REQUEST_RATIO, TracesConfig
from tandem.runtime.exposition.targets import DEFAULT_FOLDER
from tandem.runtime.records.logs import DEFAULT_LOGS
from tandem.text.answer_reader import REASONING_FORMATS
from tandem.text.tool_formats import TOOL_FORMATS
from tandem.types import UserError, WeightVersion
from tandem.types.input_file import read_input

if TYPE_CHECKING:
    from tandem.config.engine import EngineArgs
    from tandem.runtime.tls import TlsFiles
    from tandem.serving.kv_transfer.settings import KVTransferSettings
    from tandem.serving.settings import FollowedRun

MOST_KEY_BYTES = 2**16
"""Of a file with a key in its first line. An HTTP header is no longer."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
ROLES = ("both", "prefill", "decode")
LEFT_OUT = ("skip_tokenizer_init", "load_format")
"""Options that a server does not have: it needs a tokenizer and the weights of the model."""
MAX_PREFILL_SLOWDOWN = 1.7
"""What a server allows by default, since clients wait for each token."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder, a model of the Hub (OWNER/NAME), or a folder in object storage (s3://...)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 selects a free port (default: 8000)")
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="name of the model for clients (default: MODEL)")
    parser.add_argument(
        "--follow", nargs="?", const=True, default=False, metavar="URL",
        help="MODEL is the folder of a run in a pod: serve each version of the weights that it publishes; with URL, MODEL is a model, and the run is one that "
        "writes its weights there (pods.weights_url)",
    )  # fmt: skip
    parser.add_argument(
        "--follow-mode", choices=("wait", "abort"), default="wait",
        help="requests in flight when new weights come: finished on those before (wait), or answered with what they have (abort), as by /pause",
    )  # fmt: skip
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template in Jinja, or its text, instead of the tokenizer's own")
    parser.add_argument(
        "--default-chat-template-kwargs", type=partial(json_object, "--default-chat-template-kwargs"), default={}, metavar="JSON",
        help="variables of the chat template that requests may replace, for example '{\"enable_thinking\": false}'",
    )  # fmt: skip
    parser.add_argument("--enable-auto-tool-choice", action="store_true", help="the model decides whether it calls the tools of a request")
    parser.add_argument("--tool-call-parser", metavar="NAME", help=f"how the model writes tool calls: {', '.join(TOOL_FORMATS)}")
    parser.add_argument("--reasoning-parser", metavar="NAME", help=f"how the model writes reasoning: {', '.join(REASONING_FORMATS)} (default: it is text)")
    parser.add_argument("--response-role", default="assistant", metavar="ROLE", help="role of the messages of chat completions (default: assistant)")
    parser.add_argument(
        "--max-logprobs", type=int, default=20, metavar="N", help="most likely tokens that a request may ask for at each position; -1: all (default: 20)"
    )
    parser.add_argument("--return-tokens-as-token-ids", action="store_true", help="log-probabilities name tokens as 'token_id:N', which no two tokens share")
    parser.add_argument("--enable-tokenizer-info-endpoint", action="store_true", help="answer /tokenizer_info with the tokenizer's settings and chat template")
    parser.add_argument("--root-path", default="", metavar="PREFIX", help="prefix of all paths at the proxy before the server, for example /models/qwen")
    parser.add_argument("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="the private key of the certificate (PEM, not encrypted)")
    parser.add_argument("--ssl-ca-certs", metavar="FILE", help="certificates of the authorities of clients (PEM)")
    parser.add_argument("--ssl-cert-reqs", type=int, choices=(0, 1, 2), default=0, help="clients show no certificate (0), may (1) or must (2)")
    parser.add_argument("--ssl-ciphers", default="", metavar="CIPHERS", help="ciphers of TLS 1.2, as OpenSSL writes them")
    parser.add_argument("--enable-ssl-refresh", action="store_true", help="read the files of the certificate again when they change")
    parser.add_argument("--allowed-origins", type=_texts, default=(), metavar="JSON", help='origins of web pages that may call (CORS), for example \'["*"]\'')
    parser.add_argument("--allowed-methods", type=_texts, default=("*",), metavar="JSON", help="methods that they may use (default: all)")
    parser.add_argument("--allowed-headers", type=_texts, default=("*",), metavar="JSON", help="headers that they may send (default: all)")
    parser.add_argument("--allow-credentials", action="store_true", help="they may send cookies")
    parser.add_argument("--disable-uvicorn-access-log", action="store_true", help="do not log a line for each request")
    parser.add_argument(
        "--uvicorn-log-level", choices=LOG_LEVELS, metavar="LEVEL", help=f"what is logged of HTTP: {', '.join(LOG_LEVELS)}; no lines of requests above info"
    )
    parser.add_argument("--disable-log-stats", action="store_true", help="do not log throughput every ten seconds")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="a key that clients must send, or @FILE; may be repeated")
    parser.add_argument("--control-key", metavar="KEY", help="the key of control calls, or @FILE (default: control calls are refused)")
    parser.add_argument("--instances", type=int, default=1, help="number of engines, each in a process of its own")
    parser.add_argument("--threads", type=int, help="threads of each engine with all its processes (default: the cores, divided by the instances)")
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=FOLDER", help="LoRA adapters, each served as a model")
    parser.add_argument(
        "--weight-version", type=_weight_version, default=WeightVersion(0, 0), metavar="INCARNATION.STEP",
        help="what answers call the weights of MODEL (default: 0.0)",
    )  # fmt: skip
    parser.add_argument("--kv-events", action="store_true", help="publish at /kv_cache what enters and leaves the prefix cache, for routers")
    parser.add_argument(
        "--role", choices=ROLES, default="both", help="what a router sends here: prompts alone, requests whose prompts others have computed, or both"
    )
    parser.add_argument("--kv-transfer-key", default="", metavar="KEY", help="the key of all servers that exchange KV blocks, or @FILE (default: none are)")
    parser.add_argument("--kv-transfer-host", metavar="HOST", help="address at which other servers fetch KV blocks (default: that of --host)")
    parser.add_argument("--kv-transfer-port", type=int, default=0, metavar="PORT", help="its port (default: a free one)")
    parser.add_argument("--kv-transfer-memory", type=float, default=1.0, metavar="GIB", help="shared memory for KV blocks that wait or arrive (default: 1)")
    parser.add_argument("--kv-transfer-timeout", type=float, default=30.0, metavar="SECONDS", help="time for KV blocks to be fetched (default: 30)")
    parser.add_argument(
        "--targets-folder", nargs="?", const=DEFAULT_FOLDER, default="", metavar="DIR",
        help=f"name the server to Prometheus in this folder (without DIR: {DEFAULT_FOLDER}); see 'tandem up observability'",
    )  # fmt: skip
    parser.add_argument(
        "--log-folder", nargs="?", const=DEFAULT_LOGS, default="", metavar="DIR",
        help=f"write the log as JSON lines to DIR/server-PORT.log too, for Loki (without DIR: {DEFAULT_LOGS})",
    )  # fmt: skip
    parser.add_argument(
        "--otlp-traces-sample-ratio", type=float, metavar="SHARE",
        help=f"share of requests without a traceparent that are sent to --otlp-traces-endpoint (default: {REQUEST_RATIO:g})",
    )  # fmt: skip
    parser.add_argument("--max-waiting", type=int, default=1024, help="maximum number of waiting requests; more get status 429")
    parser.add_argument("--drain-timeout", type=float, default=600.0, metavar="SECONDS", help="time for in-flight requests after SIGTERM")
    parser.add_argument("--request-timeout", type=float, default=30.0, metavar="SECONDS", help="time for a client to send its request")
    parser.add_argument("--stall-timeout", type=float, default=300.0, metavar="SECONDS", help="time after which a client that reads nothing is disconnected")
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=30.0, metavar="SECONDS", help="time after which an engine that does not answer is hung (/readiness: 503)"
    )
    parser.add_argument(
        "--step-timeout", type=float, default=600.0, metavar="SECONDS", help="time after which an engine that works on one step is hung, compilation included"
    )
    parser.add_argument(
        "--max-connections-per-client", type=int, metavar="N",
        help="open connections of one IPv4 address or IPv6 /64 network; 0: no limit (default: twice the requests that the queue holds, at least 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--max-body-mib", type=float, metavar="MIB", help="largest body of a request (default: what the longest prompt of the context needs)"
    )
    add_engine_options(parser, LEFT_OUT)


def run(options: argparse.Namespace) -> int:
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"'tandem serve' needs {module}, which is not installed; pip install 'tandem-rl[serve]'")
    from tandem.model.model_source import hold_model

    if isinstance(options.follow, str):
        return _follow_storage(options)
    if options.follow:
        from tandem.jobs.followed_run import followed_run

        folder, follows, dtype = followed_run(Path(options.model), options.follow_mode, lambda line: print(f"tandem: {line}", file=sys.stderr, flush=True))
        options.dtype = getattr(options, "dtype", None) or dtype
        return _serve(options, folder, follows)
    given = engine_args(options)
    with hold_model(
        options.model, revision=given.revision, download_dir=given.download_dir, weight_cache_gib=given.weight_cache_gib, verify=given.verify
    ) as held:
        return _serve(options, held.path)


def _follow_storage(options: argparse.Namespace) -> int:
    """Serves the weights that a run writes to a storage, in the dtype that they have there."""
    from tandem.model.model_source import hold_model
    from tandem.runtime.process.processes import available_cores
    from tandem.serving.follow_storage import StoredRun
    from tandem.serving.settings import FollowedRun

    given = engine_args(options)
    threads = min(2, available_cores())
    with StoredRun(options.follow, threads, lambda line: print(f"tandem: {line}", file=sys.stderr, flush=True)) as run:
        newest = run.newest()
        if newest is not None and newest.manifest.tensors and getattr(options, "dtype", None) is None:
            options.dtype = newest.manifest.tensors[0].dtype
        with hold_model(
            options.model, revision=given.revision, download_dir=given.download_dir, weight_cache_gib=given.weight_cache_gib, verify=given.verify
        ) as held:
            return _serve(options, held.path, FollowedRun(run.store, options.follow_mode))


def _serve(options: argparse.Namespace, folder: Path, follows: "FollowedRun | None" = None) -> int:
    from tandem.model.model_source import find_model
    from tandem.runtime.process.processes import available_cores
    from tandem.serving.server import run_server
    from tandem.serving.settings import ServerSettings

    adapters = tuple((name, str(find_model(given, "adapter"))) for name, given in map(_module, options.lora_modules))
    loras = {"enable_lora": True} if adapters else {}
    count = {} if hasattr(options, "max_loras") else {"max_loras": max(1, len(adapters))}
    # The engines start from folders, which need no network.
    tokenizer = {} if getattr(options, "tokenizer", None) is None else {"tokenizer": str(find_model(options.tokenizer, "tokenizer"))}
    engine = engine_args(options, **{"model": str(folder), "revision": None, **tokenizer, **_draft(options), **loras, **count})
    if engine.admission == "chunked" and not hasattr(options, "max_prefill_slowdown"):
        engine = replace(engine, max_prefill_slowdown=MAX_PREFILL_SLOWDOWN)
    settings = ServerSettings(
        engine=engine, adapters=adapters, host=options.host, port=options.port, served_model_names=tuple(options.served_model_name) or (options.model,),
        chat_template=None if options.chat_template is None else template_text(options.chat_template),
        chat_template_kwargs=options.default_chat_template_kwargs,
        tool_call_parser=options.tool_call_parser, enable_auto_tool_choice=options.enable_auto_tool_choice, reasoning_parser=options.reasoning_parser,
        allowed_origins=tuple(options.allowed_origins), allowed_methods=tuple(options.allowed_methods), allowed_headers=tuple(options.allowed_headers),
        allow_credentials=options.allow_credentials, response_role=options.response_role, max_logprobs=options.max_logprobs,
        return_tokens_as_token_ids=options.return_tokens_as_token_ids, tokenizer_info=options.enable_tokenizer_info_endpoint,
        root_path="" if options.root_path == "/" else options.root_path, tls=_tls(options), follows_tls=options.enable_ssl_refresh,
        http_log_level=options.uvicorn_log_level or "critical",
        log_requests=not options.disable_uvicorn_access_log and options.uvicorn_log_level not in LOG_LEVELS[:3], log_stats=not options.disable_log_stats,
        api_keys=tuple(_key(key) for key in options.api_key), control_key=None if options.control_key is None else _key(options.control_key),
        instances=options.instances, threads=options.threads or max(1, available_cores() // max(1, options.instances)),
        max_waiting=options.max_waiting, drain_s=options.drain_timeout, request_s=options.request_timeout, stall_s=options.stall_timeout,
        heartbeat_s=options.heartbeat_timeout, step_s=options.step_timeout, max_connections_per_client=options.max_connections_per_client,
        max_body_bytes=None if options.max_body_mib is None else _bytes(options.max_body_mib), follows=follows,
        weight_version=options.weight_version, kv_events=options.kv_events, kv_transfer=_kv_transfer(options),
        targets_folder=options.targets_folder, traces=_traces(engine, options.otlp_traces_sample_ratio), log_folder=options.log_folder,
    )  # fmt: skip
    return run_server(settings)


def _traces(engine: "EngineArgs", sample_ratio: float | None) -> TracesConfig | None:
    if engine.traces is None:
        if sample_ratio is not None:
            raise UserError("--otlp-traces-sample-ratio is given without --otlp-traces-endpoint; give the address of a collector, or leave it out")
        return None
    config = replace(engine.traces, sample_ratio=sample_ratio)
    config.check()
    return config


def _tls(options: argparse.Namespace) -> "TlsFiles | None":
    from tandem.runtime.tls import TlsFiles, TlsNames

    cert, key, authorities, wanted = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs, ssl.VerifyMode(options.ssl_cert_reqs)
    if not cert and not key:
        given = {
            "--ssl-ca-certs": authorities, "--ssl-cert-reqs": wanted.value, "--ssl-ciphers": options.ssl_ciphers,
            "--enable-ssl-refresh": options.enable_ssl_refresh,
        }  # fmt: skip
        if name := next((name for name, value in given.items() if value), None):
            raise UserError(f"{name} is given without a certificate; give --ssl-certfile and --ssl-keyfile")
        return None
    if not (cert and key):
        raise UserError(f"only one of --ssl-certfile and --ssl-keyfile is given ('{cert or key}'); give both")
    if wanted and not authorities:
        raise UserError(f"--ssl-cert-reqs is {wanted.value}, and no certificate of a client could be verified; name the authorities with --ssl-ca-certs")
    return TlsFiles(
        cert, key, authorities or "", wanted, options.ssl_ciphers,
        TlsNames("--ssl-certfile and --ssl-keyfile", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"),
    )  # fmt: skip


def _kv_transfer(options: argparse.Namespace) -> "KVTransferSettings":
    from tandem.serving.kv_transfer.settings import KVTransferSettings

    return KVTransferSettings(
        role=options.role, key=_key(options.kv_transfer_key), host=options.kv_transfer_host or options.host, port=options.kv_transfer_port,
        memory_bytes=int(options.kv_transfer_memory * 2**30) if math.isfinite(options.kv_transfer_memory) else -1, timeout_s=options.kv_transfer_timeout,
    )  # fmt: skip


def _draft(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the option of speculative decoding with the folder of its draft model; nothing without one."""
    from tandem.model.model_source import find_model

    given = getattr(options, "speculative_config", None)
    if given is None or not isinstance(given.get("model"), str):
        return {}
    return {"speculative_config": {**given, "model": str(find_model(given["model"]))}}


def _texts(given: str) -> list[str]:
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        value = given
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return value
    raise argparse.ArgumentTypeError(f"{given!r} is not a JSON list of texts, for example '[\"*\"]'")


def _weight_version(given: str) -> WeightVersion:
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,15})", given)
    if match is None:
        raise argparse.ArgumentTypeError(f"{given!r} is no version of weights; write INCARNATION.STEP, for example 3.200")
    return WeightVersion(int(match[1]), int(match[2]))


def _bytes(mib: float) -> int:
    if not 0 < mib <= 2**20:
        raise UserError(f"--max-body-mib is {mib:g}; give more than 0 and at most {2**20}")
    return int(mib * 2**20)


def _module(given: str) -> tuple[str, str]:
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise UserError(f"--lora-modules has '{given}'; give each adapter as NAME=FOLDER")
    return name, folder


def _key(given: str) -> str:
    """Returns a key as given, or the first line of ``@FILE``: every user of the machine can see a command's arguments."""
    if not given.startswith("@"):
        return given
    try:
        return read_input(given[1:], MOST_KEY_BYTES, "a key is one line").decode("utf-8").split("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        raise UserError(f"the key file '{given[1:]}' cannot be read: {error}") from None
