"""What a serving pool is sized for: requests, their lengths, and the latency that they may have. Imports no torch."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tandem.estimate.lengths import Lengths
from tandem.estimate.serving.latency import Traffic
from tandem.planner.serving.arrivals import Arrival
from tandem.types.errors import UserError
from tandem.types.input_file import read_input

MOST_TRACE_BYTES = 2**28
MOST_REQUESTS_PER_S = 1e7
MOST_TOKENS = 2**31
WINDOW_S = 60.0
"""A pool is sized for the busiest window of a trace of this length."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "at": ("at_s", "TIMESTAMP", "timestamp"),
    "prompt": ("prompt_tokens", "ContextTokens", "input_length"),
    "output": ("output_tokens", "GeneratedTokens", "output_length"),
}
"""The names of a trace's columns: Tandem's, those of the Azure LLM inference traces, and of Mooncake's, whose times are milliseconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """``figure`` (``ttft`` or ``tpot``) may be ``most_s`` at most at percentile ``percentile`` of the requests."""

    figure: str
    most_s: float
    percentile: float = 95.0

    def __str__(self) -> str:
        return f"{self.figure.upper()} p{self.percentile:g} {1e3 * self.most_s:,.4g} ms"


@dataclass(frozen=True, slots=True)
class Demand:
    """``traffic``: of the whole pool. ``trace``: where it was recorded."""

    traffic: Traffic
    targets: tuple[Target, ...] = ()
    trace: tuple[Arrival, ...] = field(default=(), repr=False)

    def check(self) -> None:
        """Raises ``UserError`` for what no pool is asked for, with the flag of the command."""
        rate = self.traffic.requests_per_s
        if not 0 < rate <= MOST_REQUESTS_PER_S:
            raise UserError(f"--requests-per-s is {rate:g}; it must be above 0, at most {MOST_REQUESTS_PER_S:,.0f}")
        for target in self.targets:
            if not 0 < target.most_s < math.inf:
                raise UserError(f"--{target.figure} is {1e3 * target.most_s:g} ms; it must be above 0")
        shared, mean = self.traffic.shared_tokens, self.traffic.prompts.mean
        if not 0 <= shared < mean:
            raise UserError(f"--shared-prefix is {shared:,.0f} and prompts have {mean:,.0f} tokens on average; it must be from 0 to below that")


def read_trace(path: str) -> tuple[Arrival, ...]:
    """Returns the requests of a trace, by arrival: CSV with a header, or JSON lines. Raises ``UserError`` for a file that is none, with the line."""
    text = read_input(path, MOST_TRACE_BYTES, "give a part of the trace").decode("utf-8", errors="replace")
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    arrivals, first = [], None
    for line, row in rows:
        at, prompt, output = (_value(path, line, row, name) for name in COLUMNS)
        first = at if first is None else first
        if not math.isfinite(at) or not 1 <= prompt <= MOST_TOKENS or not 0 <= output <= MOST_TOKENS:
            raise UserError(f"trace '{path}' line {line}: {prompt:g} + {output:g} tokens at {at:g} s; lengths must be from 1 to {MOST_TOKENS:,}")
        if output:
            arrivals.append(Arrival(at, int(prompt), int(output)))
    if len(arrivals) < 2:
        raise UserError(f"trace '{path}' has {len(arrivals)} requests with an output; it needs at least 2")
    arrivals.sort()
    return tuple(each._replace(at_s=each.at_s - arrivals[0].at_s) for each in arrivals)


def busiest_rate(trace: tuple[Arrival, ...]) -> float:
    """Returns the requests per second in the busiest window of ``WINDOW_S`` seconds, or of the whole trace if it is shorter."""
    span = trace[-1].at_s
    if span <= 0:
        raise UserError("all requests of the trace arrive at once; give --requests-per-s")
    if span < WINDOW_S:
        return len(trace) / span
    most, first = 0, 0
    for index, arrival in enumerate(trace):
        while arrival.at_s - trace[first].at_s >= WINDOW_S:
            first += 1
        most = max(most, index - first + 1)
    return most / WINDOW_S


def trace_lengths(trace: tuple[Arrival, ...]) -> tuple[Lengths, Lengths]:
    """Returns the recorded lengths of prompts and outputs."""
    return Lengths.of(each.prompt_tokens for each in trace), Lengths.of(each.output_tokens for each in trace)


def _csv_rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"trace '{path}' line {reader.line_num}: {error}; it must be CSV with a header, or JSON lines") from None


def _json_rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"trace '{path}' line {number}: {error}; it must be CSV with a header, or JSON lines") from None
        if not isinstance(row, dict):
            raise UserError(f"trace '{path}' line {number} is no JSON object; give one of {', '.join(names[0] for names in COLUMNS.values())} a line")
        yield number, row


def _value(path: str, line: int, row: Mapping[str, Any], name: str) -> float:
    """Returns the number of column ``name``; a time in seconds."""
    column = next((column for column in COLUMNS[name] if row.get(column) is not None), None)
    if column is None:
        raise UserError(f"trace '{path}' line {line} has no column {' or '.join(COLUMNS[name])}; it has {', '.join(map(str, list(row)[:8]))}")
    given = row[column]
    try:
        if column == "TIMESTAMP":
            return datetime.fromisoformat(str(given)).timestamp()
        return float(given) / (1e3 if column == "timestamp" else 1.0)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"trace '{path}' line {line}: {column} is {str(given)[:40]!r}; it must be a number") from None
