"""The settings of a server."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tandem.config.engine import EngineArgs
from tandem.config.traces import TracesConfig
from tandem.runtime.tls import TlsFiles
from tandem.serving.kv_transfer.settings import KVTransferSettings
from tandem.serving.limits import MAX_LOGPROBS
from tandem.text.answer_reader import REASONING_FORMATS
from tandem.text.tool_formats import TOOL_FORMATS
from tandem.types import UserError, WeightVersion

FollowMode = Literal["wait", "abort"]


_FIRST = WeightVersion(0, 0)


@dataclass(frozen=True, slots=True)
class FollowedRun:
    """A run whose published weights are served. ``store``: the address of its coordination store. ``mode``: what becomes of requests in flight at an update, a
    mode of ``/pause``."""

    store: str
    mode: FollowMode = "wait"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server.

    Args:
        engine: the options of each engine.
        port: 0 takes a free one.
        served_model_names: the names that clients may ask for; the first is answered.
        adapters: the name and the folder of each LoRA adapter that is served from the start.
        chat_template: the text of a template that replaces the tokenizer's own.
        allowed_origins: the origins of web pages that may call the server (CORS; empty: none); ``allowed_methods``, ``allowed_headers`` and
            ``allow_credentials`` are what they may send.
        chat_template_kwargs: variables of chat templates that a request may replace.
        tool_call_parser: how the model writes tool calls, a name of ``TOOL_FORMATS``. ``enable_auto_tool_choice``: the model decides whether it calls
            tools, where a request offers them.
        reasoning_parser: how the model writes reasoning, a name of ``REASONING_FORMATS``.
        response_role: the role of the messages of chat completions.
        max_logprobs: the most likely tokens that a request may ask for at each position; -1: all of the vocabulary.
        return_tokens_as_token_ids: log-probabilities name tokens by their ids where a request does not say otherwise.
        tokenizer_info: answer ``GET /tokenizer_info`` with the settings of the tokenizer and the chat template.
        root_path: the prefix of all paths that a proxy before the server leaves or removes.
        tls: its certificate; ``None``: plain HTTP. ``follows_tls``: files that change are read again.
        http_log_level: what the HTTP library logs, a level of uvicorn.
        log_requests: log a line for each request. ``log_stats``: log throughput every ten seconds.
        api_keys: a request needs one of them (empty: no key is needed).
        control_key: needed by control calls, which are refused without one.
        instances: engines, each in a process of its own with ``threads`` threads.
        max_waiting: in-flight requests besides those that the engines' rows hold; more are answered with 429.
        max_body_bytes: the largest body of a request. ``None``: what the longest prompt of the context needs.
        max_connections_per_client: open connections of one address; 0 is no limit. ``None``: twice ``max_requests``, at least 2048, so that one
            load generator or proxy can fill the queue.
        heartbeat_s: how long an engine's process may not answer before its requests end with an error.
        step_s: how long an engine may work on one step or control call before it counts as hung.
        request_s: how long a client may take to send a request.
        stall_s: how long a reader may take no byte of its answer.
        drain_s: how long in-flight requests may continue after SIGTERM.
        weight_version: what the weights of the model are called.
        kv_events: publish what enters and leaves the prefix cache (``GET /kv_cache``).
        kv_transfer: the exchange of KV blocks with other servers, and the server's role among them.
        follows: the run whose published weights are served.
        traces: the collector that spans are sent to; ``None``: there are none.
        log_folder: the folder of its log file; empty: it has none beside standard error.
        targets_folder: the folder in which the server is named to Prometheus; empty: none.
    """

    engine: EngineArgs
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None
    response_role: str = "assistant"
    max_logprobs: int = MAX_LOGPROBS
    return_tokens_as_token_ids: bool = False
    tokenizer_info: bool = False
    root_path: str = ""
    tls: TlsFiles | None = None
    follows_tls: bool = False
    http_log_level: str = "critical"
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    log_requests: bool = True
    log_stats: bool = True
    api_keys: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    control_key: str | None = None
    instances: int = 1
    threads: int = 1
    max_waiting: int = 1024
    max_body_bytes: int | None = None
    max_connections_per_client: int | None = None
    heartbeat_s: float = 30.0
    step_s: float = 600.0
    request_s: float = 30.0
    stall_s: float = 300.0
    drain_s: float = 600.0
    weight_version: WeightVersion = _FIRST
    kv_events: bool = False
    kv_transfer: KVTransferSettings = field(default_factory=KVTransferSettings)
    follows: FollowedRun | None = None
    targets_folder: str = ""
    traces: TracesConfig | None = None
    log_folder: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (self.engine.model,)

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.engine.tokenizer or self.engine.model)

    @property
    def max_requests(self) -> int:
        return self.max_waiting + self.instances * self.engine.max_num_seqs

    @property
    def connections_per_client(self) -> int:
        given = self.max_connections_per_client
        return max(2048, 2 * self.max_requests) if given is None else given

    def check(self) -> None:
        """Raise ``UserError`` for a value that cannot work."""
        folder = Path(self.engine.model)
        if not (folder / "config.json").is_file():
            raise UserError(f"model '{folder}' has no config.json; give a Hugging Face folder")
        if not (self.tokenizer_folder / "tokenizer.json").is_file():
            raise UserError(f"'{self.tokenizer_folder}' has no tokenizer.json; a server needs a tokenizer: name one with --tokenizer")
        for name, low in (("instances", 1), ("threads", 1), ("max_waiting", 1), ("max_body_bytes", 1024), ("max_connections_per_client", 0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"server {name} is {getattr(self, name)}; it must be at least {low}")
        for name in ("request_s", "stall_s", "drain_s", "heartbeat_s", "step_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"server {name} is {getattr(self, name)}; it must be above 0 seconds")
        for name, known in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
            if getattr(self, name) not in (None, *known):
                raise UserError(f"server {name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise UserError(f"--enable-auto-tool-choice needs --tool-call-parser; give one of {', '.join(TOOL_FORMATS)}")
        if self.max_logprobs < -1:
            raise UserError(f"--max-logprobs is {self.max_logprobs}; it must be at least 0, or -1 for all of the vocabulary")
        if not self.response_role.strip() or not self.response_role.isprintable():
            raise UserError(f"--response-role is {self.response_role!a}; give a role such as assistant")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise UserError(f"--root-path is {self.root_path!a}; give the prefix of the paths, for example /models/qwen")
        self.kv_transfer.check()
        if self.kv_transfer.key and self.engine.tensor_parallel_size > 1:
            raise UserError(
                f"--kv-transfer-key is given with --tensor-parallel-size {self.engine.tensor_parallel_size}: the heads of its KV blocks are in several "
                "processes, which are not exchanged; use --instances"
            )
        if not 0 <= self.port <= 65535:
            raise UserError(f"server port is {self.port}; it must be from 0 to 65535")
        if any(not name for name in (*self.names, *self.api_keys)) or self.control_key == "":
            raise UserError("a model name or key of the server is empty; give it at least one character")
        for name in (*self.names, *(name for name, _ in self.adapters)):
            if not name.isprintable():
                raise UserError(f"the model name {name!a} has a character that cannot be printed; leave it out")
        if not all(key.isprintable() for key in (*self.api_keys, self.control_key or "")):
            raise UserError("a key of the server has a character that cannot be printed; leave it out")
        names = [*self.names, *(name for name, _ in self.adapters)]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"'{name}' names two things that are served; give each adapter a name of its own")
        if self.control_key in self.api_keys:
            raise UserError("the control key is also an API key; clients could then stop the server, so give it another value")
