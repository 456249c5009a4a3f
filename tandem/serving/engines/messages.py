"""What the server and an engine's process tell each other: frames over the socket pair of ``tandem.runtime.rpc.channel``.

To the engine: the events ``add`` (``EngineRequest``), ``abort`` (``Abort``) and ``ping``, and numbered ``call`` frames of the control calls, whose
meta are the arguments. From it: once the ``result`` (``EngineInfo``) or ``error`` of ``load``; the event ``step`` (``Step``) after every step
that has outputs; the event ``pong`` (``working_s``: seconds spent on the present step) for each ping, during steps too; and the ``result`` or
``error`` of each call under its number. Imports no torch.
"""

import base64
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.engine.metrics.stats import EngineStats
from tandem.engine.pooling.outputs import PooledData
from tandem.engine.processing.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from tandem.types import WeightVersion


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for an engine. ``params``: keyword arguments of ``SamplingParams``, checked by the engine, with ``structured_outputs`` as those of
    ``StructuredOutputsParams``. ``output_kind`` among them is a name, and counts with ``stream`` alone (by default ``DELTA``). ``adapter``: name, id
    and folder of its LoRA adapter. ``pooling``: keyword arguments of ``PoolingParams``, for a request that draws no tokens. The rest as in
    ``Engine.add_request``."""

    id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    stream: bool
    key: int
    first_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    num_draft_tokens: int | None = None
    adapter: list[Any] | None = None
    pooling: dict[str, Any] | None = None
    traceparent: str = ""
    """The span that it is made for, if its trace is sampled."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends the requests ``ids``."""

    ids: list[str]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. ``num_parameters`` counts numbers, not bytes. ``tokenizer_folder``: of its tokenizer, ``None`` if it has none.
    ``model_folder``: of the model, here."""

    pid: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_parameters: int
    dtype: str
    tokenizer_folder: str | None
    model_folder: str


@dataclass(frozen=True, slots=True)
class Step:
    """What a step made known. ``refused``: requests that cannot be served, each with why. ``failed``: requests that a
    defect of the engine ended. ``block_events``: changes of the prefix cache, if they are recorded."""

    outputs: list[RequestOutput]
    stats: EngineStats
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    block_events: list[list[Any]] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    """Those of traced requests that have ended, as JSON."""


def step_meta(step: Step) -> dict[str, Any]:
    meta = {"outputs": [_output_meta(output) for output in step.outputs], "stats": asdict(step.stats), "refused": step.refused, "failed": step.failed}
    return meta | {name: value for name in ("block_events", "spans") if (value := getattr(step, name))}


def step_of(meta: dict[str, Any]) -> Step:
    outputs = [_output_of(output) for output in meta["outputs"]]
    return Step(outputs, EngineStats(**meta["stats"]), meta["refused"], meta["failed"], meta.get("block_events", []), meta.get("spans", []))


# A prompt's text and tokens are known to the server and do not travel back.


def _output_meta(output: RequestOutput) -> dict[str, Any]:
    scores = output.prompt_logprobs
    return {
        "id": output.request_id,
        "finished": output.finished,
        "cached": output.num_cached_tokens,
        "times": None if output.times is None else [output.times.arrival_s, output.times.scheduled_s, output.times.first_token_s],
        "scores": None if scores is None else [None if entry is None else _logprobs_meta(entry) for entry in scores],
        "completions": [_completion_meta(completion) for completion in output.outputs],
        "pooled": None if output.pooled is None else _pooled_meta(output.pooled),
    }


def _pooled_meta(pooled: PooledData) -> list[Any]:
    return [list(pooled.shape), base64.b64encode(pooled.data).decode("ascii"), *pooled.weight_version]


def _pooled_of(meta: list[Any]) -> PooledData:
    shape, data, incarnation, step = meta
    return PooledData(tuple(shape), base64.b64decode(data), WeightVersion(incarnation, step))


def _completion_meta(c: CompletionOutput) -> list[Any]:
    logprobs = None if c.logprobs is None else [_logprobs_meta(entry) for entry in c.logprobs]
    versions: list[list[int]] = []
    for version in c.weight_versions:
        if versions and versions[-1][1:] == list(version):
            versions[-1][0] += 1
        else:
            versions.append([1, *version])
    return [c.index, c.text, c.token_ids, c.raw_logprobs, c.sampling_logprobs, versions, c.finish_reason, c.stop_reason, logprobs]


def _logprobs_meta(entry: dict[int, Logprob]) -> list[list[Any]]:
    return [[token, value.logprob, value.rank, value.decoded_token] for token, value in entry.items()]


def _output_of(meta: dict[str, Any]) -> RequestOutput:
    scores = meta["scores"]
    return RequestOutput(
        request_id=meta["id"],
        prompt=None,
        prompt_token_ids=[],
        outputs=[_completion_of(completion) for completion in meta["completions"]],
        finished=meta["finished"],
        num_cached_tokens=meta["cached"],
        times=None if meta["times"] is None else RequestTimes(*meta["times"]),
        prompt_logprobs=None if scores is None else [None if entry is None else _logprobs_of(entry) for entry in scores],
        pooled=None if meta["pooled"] is None else _pooled_of(meta["pooled"]),
    )


def _completion_of(meta: list[Any]) -> CompletionOutput:
    index, text, tokens, raw, sampling, versions, finish, stop, logprobs = meta
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=tokens,
        raw_logprobs=raw,
        sampling_logprobs=sampling,
        weight_versions=[WeightVersion(incarnation, step) for count, incarnation, step in versions for _ in range(count)],
        finish_reason=finish,
        stop_reason=stop,
        logprobs=None if logprobs is None else [_logprobs_of(entry) for entry in logprobs],
    )


def _logprobs_of(entries: list[list[Any]]) -> dict[int, Logprob]:
    return {token: Logprob(value, rank, text) for token, value, rank, text in entries}
