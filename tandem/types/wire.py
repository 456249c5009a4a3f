"""Values between processes and in the journal: exact, bounds-checked, no pickle.

A *frame* is ``magic, header bytes (u32), payload bytes (u64), header, payload``, all little-endian. The header is JSON:
``{"kind": str, "meta": {...}, "blobs": [[name, bytes], ...]}``; the payload is the blobs, one after the other. Prompts,
samples, scores and batches are frames whose meta holds the strings and whose blobs are flat arrays with their lengths
beside them. Floats travel as float64, so that every value comes back with the bits it had. What does not decode raises
``ValueError`` with what is wrong; nothing beyond the given bytes is ever read or allocated.
"""

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.types.batch import Batch, TrainSequence
from tandem.types.prompt import Prompt
from tandem.types.sample import FinishReason, Sample, WeightVersion
from tandem.types.score import Score, ScoreState

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"TDM1"
MAX_HEADER_BYTES = 64 * 2**20

_INT32, _INT64, _FLOAT64, _INT8 = "i", "q", "d", "b"
_ITEM_BYTES = {_INT32: 4, _INT64: 8, _FLOAT64: 8, _INT8: 1}
_STATES = tuple(ScoreState)
_CORRECT: tuple[bool | None, ...] = (None, False, True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``kind`` says what it is to a protocol (``""``: plain data), ``meta`` is JSON, ``blobs`` are bytes
    by name."""

    meta: dict[str, Any]
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    kind: str = ""


def encode(meta: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None, kind: str = "") -> bytes:
    """A frame as bytes. Raises ``ValueError`` where ``meta`` is not JSON."""
    blobs = blobs or {}
    try:
        header = json.dumps(
            {"kind": kind, "meta": dict(meta), "blobs": [[name, len(blob)] for name, blob in blobs.items()]},
            separators=(",", ":"),
        ).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"a frame's meta is not JSON: {error}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a frame's header has {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    payload_bytes = sum(len(blob) for blob in blobs.values())
    return b"".join((PREFIX.pack(MAGIC, len(header), payload_bytes), header, *blobs.values()))


def frame_sizes(prefix: bytes, limit_bytes: int) -> tuple[int, int]:
    """Header and payload bytes that follow ``prefix`` (``PREFIX.size`` bytes). Raises ``ValueError`` past
    ``limit_bytes``."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ValueError(f"not a frame: it starts with {magic!r}")
    if header_bytes > MAX_HEADER_BYTES or header_bytes + payload_bytes > limit_bytes:
        raise ValueError(f"a frame of {header_bytes} + {payload_bytes} bytes; at most {limit_bytes} are allowed")
    return header_bytes, payload_bytes


def decode(data: bytes | memoryview) -> Frame:
    """The frame that ``data`` is, whole and nothing more. Raises ``ValueError``."""
    if len(data) < PREFIX.size:
        raise ValueError(f"a frame of {len(data)} bytes is shorter than its prefix")
    header_bytes, payload_bytes = frame_sizes(bytes(data[: PREFIX.size]), len(data))
    body = PREFIX.size + header_bytes
    if body + payload_bytes != len(data):
        raise ValueError(f"a frame of {len(data)} bytes says it has {body + payload_bytes}")
    return decode_body(data[PREFIX.size : body], data[body:])


def decode_body(header: bytes | memoryview, payload: bytes | memoryview) -> Frame:
    """The frame of a header and a payload that were read after a prefix. Raises ``ValueError``."""
    try:
        parsed = json.loads(bytes(header))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a frame's header is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("a frame's header is not an object")
    kind, meta, sizes = parsed.get("kind"), parsed.get("meta"), parsed.get("blobs")
    if not isinstance(kind, str) or not isinstance(meta, dict) or not isinstance(sizes, list):
        raise ValueError("a frame's header lacks kind, meta or blobs")
    blobs: dict[str, bytes] = {}
    at = 0
    for item in sizes:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is int):
            raise ValueError(f"a frame's blob is described as {item!r}")
        name, size = item
        if size < 0 or size > len(payload) - at or name in blobs:
            raise ValueError(f"a frame's blob '{name}' of {size} bytes does not fit its payload")
        blobs[name] = bytes(payload[at : at + size])
        at += size
    if at != len(payload):
        raise ValueError(f"a frame's payload has {len(payload) - at} bytes too many")
    return Frame(meta, blobs, kind)


# -- arrays ------------------------------------------------------------------------------------------------------------


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


def _pack_rows(blobs: dict[str, bytes], name: str, code: str, rows: Sequence[Sequence[Any] | None]) -> None:
    """Rows of different lengths as two blobs, ``name`` and ``name.lengths``; the length -1 stands for ``None``."""
    blobs[name + ".lengths"] = _pack(_INT64, (-1 if row is None else len(row) for row in rows))
    blobs[name] = _pack(code, (value for row in rows if row is not None for value in row))


def _unpack_rows(frame: Frame, name: str, code: str, count: int, optional: bool = False) -> list[Any]:
    lengths = _unpack(frame, name + ".lengths", _INT64, count)
    if any(length < (-1 if optional else 0) for length in lengths):
        raise ValueError(f"the array '{name}' has a negative length")
    values = _unpack(frame, name, code, sum(max(length, 0) for length in lengths))
    rows: list[Any] = []
    at = 0
    for length in lengths:
        rows.append(None if length < 0 else tuple(values[at : at + length]))
        at += max(length, 0)
    return rows


def _open(data: bytes | memoryview, what: str) -> tuple[Frame, int]:
    frame = decode(data)
    if frame.kind != what:
        raise ValueError(f"expected {what}, found a frame of '{frame.kind}'")
    count = frame.meta.get("count")
    if type(count) is not int or count < 0:
        raise ValueError(f"{what} say they are {count!r} many")
    return frame, count


def _column(frame: Frame, name: str, kind: type[T], count: int) -> list[T]:
    values = frame.meta.get(name)
    if not isinstance(values, list) or len(values) != count or any(type(value) is not kind for value in values):
        raise ValueError(f"the column '{name}' is not {count} values of type {kind.__name__}")
    return values


def _check_lengths(owner: str, expected: int, lengths: Mapping[str, int]) -> None:
    for name, length in lengths.items():
        if length != expected:
            raise ValueError(f"{owner}: {name} has {length} entries for {expected} tokens")


# -- prompts, samples, scores, batches ---------------------------------------------------------------------------------


def encode_prompts(prompts: Sequence[Prompt]) -> bytes:
    meta = {
        "count": len(prompts),
        "id": [p.id for p in prompts],
        "text": [p.text for p in prompts],
        "task": [p.task for p in prompts],
        "ground_truth": [p.ground_truth for p in prompts],
        "columns": [dict(p.columns) for p in prompts],
    }
    blobs: dict[str, bytes] = {}
    _pack_rows(blobs, "token_ids", _INT32, [p.token_ids for p in prompts])
    return encode(meta, blobs, "prompts")


def decode_prompts(data: bytes | memoryview) -> list[Prompt]:
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
        strict=True,
    )
    return [Prompt(*fields) for fields in columns]


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Raises ``ValueError`` where a per-token field has not one entry a token."""
    for s in samples:
        fields = {
            "logprobs": s.logprobs,
            "sampling_logprobs": s.sampling_logprobs,
            "weight_versions": s.weight_versions,
        }
        _check_lengths(f"sample {s.id}", len(s.token_ids), {name: len(value) for name, value in fields.items()})
    meta = {
        "count": len(samples),
        "id": [s.id for s in samples],
        "prompt_id": [s.prompt_id for s in samples],
        "text": [s.text for s in samples],
        "finish_reason": [s.finish_reason.value for s in samples],
    }
    blobs = {"index": _pack(_INT64, (s.index for s in samples))}
    _pack_rows(blobs, "prompt_token_ids", _INT32, [s.prompt_token_ids for s in samples])
    _pack_rows(blobs, "token_ids", _INT32, [s.token_ids for s in samples])
    blobs["logprobs"] = _pack(_FLOAT64, (value for s in samples for value in s.logprobs))
    blobs["sampling_logprobs"] = _pack(_FLOAT64, (value for s in samples for value in s.sampling_logprobs))
    blobs["incarnations"] = _pack(_INT64, (v.incarnation for s in samples for v in s.weight_versions))
    blobs["steps"] = _pack(_INT64, (v.step for s in samples for v in s.weight_versions))
    return encode(meta, blobs, "samples")


def decode_samples(data: bytes | memoryview) -> list[Sample]:
    frame, count = _open(data, "samples")
    ids, prompt_ids = _column(frame, "id", str, count), _column(frame, "prompt_id", str, count)
    texts, reasons = _column(frame, "text", str, count), _column(frame, "finish_reason", str, count)
    indices = _unpack(frame, "index", _INT64, count)
    prompt_tokens = _unpack_rows(frame, "prompt_token_ids", _INT32, count)
    tokens = _unpack_rows(frame, "token_ids", _INT32, count)
    total = sum(len(row) for row in tokens)
    logprobs = _unpack(frame, "logprobs", _FLOAT64, total)
    sampling = _unpack(frame, "sampling_logprobs", _FLOAT64, total)
    pairs = zip(_unpack(frame, "incarnations", _INT64, total), _unpack(frame, "steps", _INT64, total), strict=True)
    versions = [WeightVersion(*pair) for pair in pairs]
    samples = []
    end = 0
    for i in range(count):
        at, end = end, end + len(tokens[i])
        samples.append(
            Sample(
                id=ids[i],
                prompt_id=prompt_ids[i],
                index=indices[i],
                prompt_token_ids=prompt_tokens[i],
                token_ids=tokens[i],
                logprobs=tuple(logprobs[at:end]),
                sampling_logprobs=tuple(sampling[at:end]),
                weight_versions=tuple(versions[at:end]),
                finish_reason=FinishReason(reasons[i]),
                text=texts[i],
            )
        )
    return samples


def encode_scores(scores: Sequence[Score]) -> bytes:
    meta = {
        "count": len(scores),
        "sample_id": [s.sample_id for s in scores],
        "reason": [s.reason for s in scores],
        "components": [list(s.components) for s in scores],
    }
    blobs = {
        "state": _pack(_INT8, (_STATES.index(s.state) for s in scores)),
        "value": _pack(_FLOAT64, (0.0 if s.value is None else s.value for s in scores)),
        "correct": _pack(_INT8, (_CORRECT.index(s.correct) for s in scores)),
    }
    _pack_rows(blobs, "component_values", _FLOAT64, [list(s.components.values()) for s in scores])
    return encode(meta, blobs, "scores")


def decode_scores(data: bytes | memoryview) -> list[Score]:
    frame, count = _open(data, "scores")
    ids, reasons = _column(frame, "sample_id", str, count), _column(frame, "reason", str, count)
    names = _column(frame, "components", list, count)
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
        value = None if state is ScoreState.INFRASTRUCTURE_FAULT else values[i]
        scores.append(
            Score(
                ids[i], state, value, dict(zip(names[i], components[i], strict=True)), _CORRECT[correct[i]], reasons[i]
            )
        )
    return scores


_BATCH_ROWS = ("loss_mask", "advantages", "rollout_logprobs", "sampling_logprobs", "reference_logprobs")


def encode_batch(batch: Batch) -> bytes:
    """Raises ``ValueError`` where a per-token field is neither empty nor one entry a token."""
    for s in batch.sequences:
        lengths = {name: len(getattr(s, name)) for name in _BATCH_ROWS if getattr(s, name)}
        _check_lengths(f"sequence {s.id}", len(s.token_ids), lengths)
    meta = {
        "count": len(batch.sequences),
        "step": batch.step,
        "length_constant": batch.length_constant,
        "id": [s.id for s in batch.sequences],
    }
    blobs = {
        "prompt_length": _pack(_INT64, (s.prompt_length for s in batch.sequences)),
        "weight_step": _pack(_INT64, (s.weight_step for s in batch.sequences)),
    }
    _pack_rows(blobs, "token_ids", _INT32, [s.token_ids for s in batch.sequences])
    for name in _BATCH_ROWS:
        _pack_rows(blobs, name, _FLOAT64, [getattr(s, name) for s in batch.sequences])
    return encode(meta, blobs, "batch")


def decode_batch(data: bytes | memoryview) -> Batch:
    frame, count = _open(data, "batch")
    step, constant = frame.meta.get("step"), frame.meta.get("length_constant")
    if type(step) is not int or type(constant) is not int:
        raise ValueError(f"a batch has the step {step!r} and the length constant {constant!r}")
    ids, tokens = _column(frame, "id", str, count), _unpack_rows(frame, "token_ids", _INT32, count)
    prompt_lengths, weight_steps = (
        _unpack(frame, "prompt_length", _INT64, count),
        _unpack(frame, "weight_step", _INT64, count),
    )
    rows = {
        name: _unpack_rows(frame, name, _FLOAT64, count, optional=name == "reference_logprobs") for name in _BATCH_ROWS
    }
    sequences = []
    for i in range(count):
        fields = {name: rows[name][i] for name in _BATCH_ROWS}
        _check_lengths(f"sequence {ids[i]}", len(tokens[i]), {name: len(row) for name, row in fields.items() if row})
        sequences.append(
            TrainSequence(
                id=ids[i], token_ids=tokens[i], prompt_length=prompt_lengths[i], weight_step=weight_steps[i], **fields
            )
        )
    return Batch(step, tuple(sequences), constant)
