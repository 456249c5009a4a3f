"""Prompts, samples and scores as frames (``tandem.types.wire``): the meta holds the strings, the blobs are flat arrays with their lengths
beside them. Floats travel as float64, so that every value comes back with the bits it had. What does not decode raises ``ValueError``.
"""

import itertools
import operator
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tandem.types.prompt import Prompt
from tandem.types.routed_experts import RoutedExperts
from tandem.types.sample import FinishReason, Sample, WeightVersion
from tandem.types.score import Score, ScoreState
from tandem.types.wire import Buffer, Frame, decode, encode

_INT32, _INT64, _FLOAT64, _INT8 = "i", "q", "d", "b"
_ITEM_BYTES = {_INT32: 4, _INT64: 8, _FLOAT64: 8, _INT8: 1}
_STATES = tuple(ScoreState)
_CORRECT: tuple[bool | None, ...] = (None, False, True)
_NO_VERSION = WeightVersion(-1, -1)
"""Of an observation token."""
T = TypeVar("T")


def _pack(code: str, values: Iterable[Any]) -> bytes:
    try:
        packed = array(code, values)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a value does not fit its array: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(frame: Frame, name: str, code: str, count: int | None = None) -> list[Any]:
    blob = frame.blobs.get(name)
    if blob is None:
        raise ValueError(f"the array '{name}' is missing")
    size = _ITEM_BYTES[code]
    if len(blob) % size or (count is not None and len(blob) != count * size):
        expected = f"a multiple of {size}" if count is None else f"{count * size}"
        raise ValueError(f"the array '{name}' has {len(blob)} bytes, not {expected}")
    values = array(code)
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _pack_rows(blobs: dict[str, Buffer], name: str, code: str, rows: Sequence[Sequence[Any]]) -> None:
    """Rows of different lengths as two blobs, ``name`` and ``name.lengths``."""
    blobs[name + ".lengths"] = _pack(_INT64, map(len, rows))
    blobs[name] = _pack(code, _flat(rows))


def _flat(rows: Iterable[Iterable[Any]]) -> list[Any]:
    # A list, of which an array is made without a call for each value.
    return list(itertools.chain.from_iterable(rows))


def _unpack_rows(frame: Frame, name: str, code: str, count: int) -> list[Any]:
    lengths = _unpack(frame, name + ".lengths", _INT64, count)
    if min(lengths, default=0) < 0:
        raise ValueError(f"the array '{name}' has a negative length")
    return _rows(_unpack(frame, name, code, sum(lengths)), lengths)


def _rows(values: list[Any], lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    """Returns the rows of ``lengths`` that follow each other in ``values``."""
    ends = itertools.accumulate(lengths)
    return [tuple(values[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def _open(data: Buffer, what: str) -> tuple[Frame, int]:
    frame = decode(data)
    if frame.kind != what:
        raise ValueError(f"expected {what}, found a frame of '{frame.kind}'")
    count = frame.meta.get("count")
    if type(count) is not int or count < 0:
        raise ValueError(f"{what} say they are {count!r} many")
    return frame, count


def _column(frame: Frame, name: str, kind: type[T], count: int) -> list[T]:
    values = frame.meta.get(name)
    if not isinstance(values, list) or len(values) != count or not {*map(type, values)} <= {kind}:
        raise ValueError(f"the column '{name}' is not {count} values of type {kind.__name__}")
    return values


def _check_tokens(s: Sample) -> None:
    """Raises ``ValueError`` where a per-token field of ``s`` has not one entry a token, or two disagree on which were sampled."""
    tokens, versions, mask = len(s.token_ids), s.weight_versions, s.response_mask
    if len(s.logprobs) == len(s.sampling_logprobs) == len(versions) == tokens and not mask and None not in versions:
        return
    fields = {"logprobs": s.logprobs, "sampling_logprobs": s.sampling_logprobs, "weight_versions": versions, "response_mask": s.is_sampled}
    for name, values in fields.items():
        if len(values) != tokens:
            raise ValueError(f"sample {s.id}: {name} has {len(values)} entries for {tokens} tokens")
    if s.is_sampled != tuple(version is not None for version in versions):
        raise ValueError(f"sample {s.id}: weight_versions and response_mask disagree on which tokens were sampled")


def encode_prompts(prompts: Sequence[Prompt]) -> bytes:
    meta = {
        "count": len(prompts),
        "id": [p.id for p in prompts],
        "text": [p.text for p in prompts],
        "task": [p.task for p in prompts],
        "ground_truth": [p.ground_truth for p in prompts],
        "columns": [dict(p.columns) for p in prompts],
        "messages": [list(p.messages) for p in prompts],
        "question": [p.question for p in prompts],
    }
    blobs: dict[str, Buffer] = {}
    _pack_rows(blobs, "token_ids", _INT32, [p.token_ids for p in prompts])
    return encode(meta, blobs, "prompts")


def decode_prompts(data: Buffer) -> list[Prompt]:
    frame, count = _open(data, "prompts")
    truths = frame.meta.get("ground_truth")
    if not isinstance(truths, list) or len(truths) != count:
        raise ValueError(f"the column 'ground_truth' is not {count} values")
    columns = zip(
        _column(frame, "id", str, count),
        _column(frame, "text", str, count),
        _unpack_rows(frame, "token_ids", _INT32, count),
        truths,
        _column(frame, "task", str, count),
        _column(frame, "columns", dict, count),
        map(tuple, _column(frame, "messages", list, count)),
        _column(frame, "question", str, count),
        strict=True,
    )
    return [Prompt(*fields) for fields in columns]


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Raises ``ValueError`` where a per-token field has not one entry a token, or the response mask and the weight versions disagree on which
    tokens were sampled. The branches of a sample follow it."""
    branches = [len(s.branches) for s in samples]
    samples = [each for s in samples for each in s.sequences]
    for s in samples:
        _check_tokens(s)
    meta = {
        "count": len(samples),
        "id": [s.id for s in samples],
        "prompt_id": [s.prompt_id for s in samples],
        "text": [s.text for s in samples],
        "finish_reason": [s.finish_reason.value for s in samples],
    }
    # Only episodes have them, so that the records of other runs stay as they are.
    if any(s.messages for s in samples):
        meta["messages"] = [list(s.messages) for s in samples]
    if any(s.fault for s in samples):
        meta["fault"] = [s.fault for s in samples]
    if any(s.outcome for s in samples):
        meta["outcome"] = [dict(s.outcome) for s in samples]
    if any(branches):
        meta["branches"] = branches
    blobs: dict[str, Buffer] = {"index": _pack(_INT64, (s.index for s in samples))}
    _pack_rows(blobs, "prompt_token_ids", _INT32, [s.prompt_token_ids for s in samples])
    _pack_rows(blobs, "token_ids", _INT32, [s.token_ids for s in samples])
    blobs["logprobs"] = _pack(_FLOAT64, _flat(s.logprobs for s in samples))
    blobs["sampling_logprobs"] = _pack(_FLOAT64, _flat(s.sampling_logprobs for s in samples))
    versions = _flat(s.weight_versions for s in samples)
    # Two columns from pairs, an observation's among them.
    incarnations, steps = zip(*(v or _NO_VERSION for v in versions), strict=True) if versions else ((), ())
    blobs["incarnations"] = _pack(_INT64, incarnations)
    blobs["steps"] = _pack(_INT64, steps)
    if any(s.routed_experts for s in samples):
        meta["routed_experts"] = _encode_routing(samples, blobs)
    if any(s.response_mask for s in samples):
        _pack_rows(blobs, "response_mask", _INT8, [s.response_mask for s in samples])
    return encode(meta, blobs, "samples")


class SamplesEncoder:
    """``encode_samples`` that keeps its newest result: journal, inference and update of a step are given the same samples, which do not change."""

    def __init__(self) -> None:
        self._newest: tuple[Sequence[Sample], bytes] | None = None

    def __call__(self, samples: Sequence[Sample]) -> bytes:
        newest = self._newest
        if newest is None or len(newest[0]) != len(samples) or not all(map(operator.is_, newest[0], samples)):
            newest = self._newest = [*samples], encode_samples(samples)
        return newest[1]

    def forget(self) -> None:
        """Frees what is kept."""
        self._newest = None


def decode_samples(data: Buffer) -> list[Sample]:
    frame, count = _open(data, "samples")
    ids, prompt_ids = _column(frame, "id", str, count), _column(frame, "prompt_id", str, count)
    texts, reasons = _column(frame, "text", str, count), _column(frame, "finish_reason", str, count)
    indices = _unpack(frame, "index", _INT64, count)
    prompt_tokens = _unpack_rows(frame, "prompt_token_ids", _INT32, count)
    tokens = _unpack_rows(frame, "token_ids", _INT32, count)
    lengths = [len(row) for row in tokens]
    total = sum(lengths)
    logprobs = _rows(_unpack(frame, "logprobs", _FLOAT64, total), lengths)
    sampling = _rows(_unpack(frame, "sampling_logprobs", _FLOAT64, total), lengths)
    pairs = list(zip(_unpack(frame, "incarnations", _INT64, total), _unpack(frame, "steps", _INT64, total), strict=True))
    # Nearly all tokens of a batch have the same version, which they share.
    known = {pair: None if pair == _NO_VERSION else WeightVersion(*pair) for pair in set(pairs)}
    versions = _rows([known[pair] for pair in pairs], lengths)
    masks = _unpack_rows(frame, "response_mask", _INT8, count) if "response_mask" in frame.blobs else None
    messages = _column(frame, "messages", list, count) if "messages" in frame.meta else None
    faults = _column(frame, "fault", str, count) if "fault" in frame.meta else None
    outcomes = _column(frame, "outcome", dict, count) if "outcome" in frame.meta else None
    routings = _decode_routing(frame, count) if "routed_experts" in frame.meta else None
    of_name = {reason: FinishReason(reason) for reason in set(reasons)}
    samples = [
        Sample(
            id=ids[i],
            prompt_id=prompt_ids[i],
            index=indices[i],
            prompt_token_ids=prompt_tokens[i],
            token_ids=tokens[i],
            logprobs=logprobs[i],
            sampling_logprobs=sampling[i],
            weight_versions=versions[i],
            finish_reason=of_name[reasons[i]],
            text=texts[i],
            response_mask=tuple(map(bool, masks[i])) if masks else (),
            messages=tuple(messages[i]) if messages else (),
            fault=faults[i] if faults else "",
            outcome=outcomes[i] if outcomes else {},
            routed_experts=routings[i] if routings else None,
        )
        for i in range(count)
    ]
    return _with_branches(samples, frame.meta["branches"]) if "branches" in frame.meta else samples


def _encode_routing(samples: Sequence[Sample], blobs: dict[str, Buffer]) -> list[int]:
    """Adds the routing of ``samples`` to ``blobs`` and returns what one has besides its ``data``, which is the same for all samples of a model."""
    kinds = {(r.layers, r.experts_per_token, r.item_bytes) for r in (s.routed_experts for s in samples) if r is not None}
    if len(kinds) != 1:
        raise ValueError(f"samples have the routings of {len(kinds)} models")
    for s in samples:
        expected = len(s.prompt_token_ids) + len(s.token_ids) - 1
        if s.routed_experts is not None and len(s.routed_experts.data) != expected * s.routed_experts.token_bytes:
            raise ValueError(f"sample {s.id}: routed_experts has {s.routed_experts.tokens} entries for {expected} tokens")
    data = [b"" if s.routed_experts is None else s.routed_experts.data for s in samples]
    blobs["routed_experts.lengths"], blobs["routed_experts"] = _pack(_INT64, map(len, data)), b"".join(data)
    return list(kinds.pop())


def _decode_routing(frame: Frame, count: int) -> list[RoutedExperts | None]:
    kind, lengths = frame.meta["routed_experts"], _unpack(frame, "routed_experts.lengths", _INT64, count)
    if not isinstance(kind, list) or len(kind) != 3 or any(type(value) is not int or value < 1 for value in kind):
        raise ValueError(f"the column 'routed_experts' is {kind!r}, not three positive numbers")
    (layers, each, item_bytes), data = kind, bytes(frame.blobs.get("routed_experts", b""))
    if any(length < 0 for length in lengths) or len(data) != sum(lengths):
        raise ValueError(f"the array 'routed_experts' has {len(data)} bytes, not {sum(lengths)}")
    ends = list(itertools.accumulate(lengths))
    return [RoutedExperts(layers, each, item_bytes, data[end - length : end]) if length else None for length, end in zip(lengths, ends, strict=True)]


def _with_branches(samples: list[Sample], counts: Any) -> list[Sample]:
    """Returns the samples that have ``counts`` branches, each of which is followed by its branches in ``samples``."""
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts) or len(counts) + sum(counts) != len(samples):
        raise ValueError(f"the column 'branches' does not divide {len(samples)} samples")
    flat = iter(samples)
    return [replace(next(flat), branches=tuple(next(flat) for _ in range(count))) for count in counts]


def samples_to_text(samples: Sequence[Sample]) -> str:
    """Returns ``encode_samples`` as text, for a progress, which has no blobs."""
    return b64encode(encode_samples(samples)).decode("ascii")


def samples_from_text(text: str) -> list[Sample]:
    return decode_samples(b64decode(text))


def encode_scores(scores: Sequence[Score]) -> bytes:
    meta = {
        "count": len(scores),
        "sample_id": [s.sample_id for s in scores],
        "reason": [s.reason for s in scores],
        "components": [list(s.components) for s in scores],
        "extra": [dict(s.extra) for s in scores],
    }
    blobs: dict[str, Buffer] = {
        "state": _pack(_INT8, (_STATES.index(s.state) for s in scores)),
        "value": _pack(_FLOAT64, (0.0 if s.value is None else s.value for s in scores)),
        "correct": _pack(_INT8, (_CORRECT.index(s.correct) for s in scores)),
    }
    _pack_rows(blobs, "component_values", _FLOAT64, [list(s.components.values()) for s in scores])
    return encode(meta, blobs, "scores")


def decode_scores(data: Buffer) -> list[Score]:
    frame, count = _open(data, "scores")
    ids, reasons = _column(frame, "sample_id", str, count), _column(frame, "reason", str, count)
    names, extra = _column(frame, "components", list, count), _column(frame, "extra", dict, count)
    states, values = _unpack(frame, "state", _INT8, count), _unpack(frame, "value", _FLOAT64, count)
    correct = _unpack(frame, "correct", _INT8, count)
    components = _unpack_rows(frame, "component_values", _FLOAT64, count)
    scores = []
    for i in range(count):
        if not 0 <= states[i] < len(_STATES) or not 0 <= correct[i] < len(_CORRECT):
            raise ValueError(f"score {ids[i]} has the state {states[i]} and correct {correct[i]}")
        if len(names[i]) != len(components[i]) or any(type(name) is not str for name in names[i]):
            raise ValueError(f"score {ids[i]} has {len(components[i])} component values for the names {names[i]!r}")
        state = _STATES[states[i]]
        value = values[i] if state.has_value else None
        scores.append(
            Score(
                ids[i], state, value, dict(zip(names[i], components[i], strict=True)), _CORRECT[correct[i]], reasons[i], extra[i]
            )
        )
    return scores
