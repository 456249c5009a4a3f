"""The answers of the dashboard to what its page can ask of some runs now, of bounded size, for a page that is written to a file."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.dashboard.curves import curves
from tandem.dashboard.hardware import hardware, hardware_curves
from tandem.dashboard.logs import log_files, log_part
from tandem.dashboard.nodes import nodes
from tandem.dashboard.open_run import OpenRun
from tandem.dashboard.overview import overview
from tandem.dashboard.phase_answers import phase_detail, phase_window, trace_window
from tandem.dashboard.samples import Filter, one_sample, step_samples
from tandem.report.samples import chosen_steps, shortened
from tandem.types import RunError, UserError

POINTS, VALUES = 1000, 60_000
"""Points of one curve at most, and of all curves of the page. The smallest and the largest values beside means are not counted."""
PHASES, DETAILS = 3000, 300
"""The newest phases that have a bar each, and those of which the journal's details are there too."""
STEPS, SAMPLES, CHARACTERS, TOKENS = 20, 240, 240_000, 6000
"""Of samples: steps, samples, characters of their texts, and tokens of those whose tokens are there."""
ALL_BARS = 10**9
"""So many that no phase is too short for one of its own."""
LOGS, LOG_CHARACTERS = 20, 12_000
MOMENTS = 120
"""Of the hardware."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """The answers about one run by the name of the question, and in words what is left out of them."""

    answers: Mapping[str, Any]
    left_out: str


def frozen(run: OpenRun, share: int = 1) -> Frozen:
    """Returns the answers about ``run``. ``share``: the number of runs on the page, which divide what it may have."""
    shown = overview(run)
    drawn, each = _curves(run, share)
    samples, tokens, steps = _samples(run, shown["samples"], share)
    answers = {
        "run": {**shown, "live": None, "samples": samples[-1]["step"] if samples else None}, "curves": drawn, "samples": samples, "sample": tokens,
        "trace": {step: trace_window(run, step) for step in shown["traced"]}, "nodes": nodes(run), **_phases(run, share), **_hardware(run), **_logs(run, share),
    }  # fmt: skip
    said = [f"a point of a curve is the mean of {each} steps, with their range" if each > 1 else "each step is a point of the curves"]
    if samples:
        there = sum(len(prompt["samples"]) for step in samples for prompt in step["prompts"])
        said.append(f"{there:,} samples of {len(samples):,} of {steps:,} steps, {len(tokens):,} of them with their tokens")
    return Frozen(answers, "; ".join(said))


def _curves(run: OpenRun, share: int) -> tuple[dict[str, Any], int]:
    """Returns all curves over the whole run, with both horizontal axes, and how many steps are in a point."""
    with run.columns() as columns:
        keys = columns.keys
    points = max(100, min(POINTS, VALUES // max(1, len(keys)) // share))
    whole: dict[str, Any] = {"series": {}}
    for start in range(0, max(1, len(keys)), 64):
        part = curves(run, keys[start : start + 64], None, None, points, "step")
        whole = {**part, "series": whole["series"] | part["series"]}
    time_axis = curves(run, (), None, None, points, "time")
    return {**whole, "x": {"step": whole["x"], "time": time_axis["x"]}, "whole": {"step": whole["whole"], "time": time_axis["whole"]}}, whole["rows_each"]


def _phases(run: OpenRun, share: int) -> dict[str, Any]:
    """Returns the phases of the whole run, those too short to be seen in one bar, the newest with a bar each, and the last details."""
    try:
        with run.phases(0.0) as phases:
            end_s, count = phases.end_s, len(phases)
            parts = [phases.window(0.0, max(end_s, 1e-6), None)]
            if count > PHASES // share:
                parts.append(phases.window(phases.newest_from(PHASES // share), max(end_s, 1e-6), None, most_bars=ALL_BARS))
    except RunError:
        return {"phases": None, "phase": {}}
    recent = phase_window(run, None, None, None)
    ids = sorted({bar[4] for lane in parts[-1]["lanes"] for bar in lane["bars"] if bar[2] != "several"})[-(DETAILS // share) :]
    details = {}
    for each in ids:
        try:
            details[each] = phase_detail(run, each)
        except UserError:
            continue
    return {"phases": {"parts": parts, "from": recent["from"], "to": recent["to"]}, "phase": details}


def _samples(run: OpenRun, newest: int | None, share: int) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Returns the samples of some steps, the tokens of some of them by step and id, and how many steps have samples."""
    if newest is None:
        return [], {}, 0
    with run.journal() as journal:
        recorded = journal.journalled_steps()
    chosen = chosen_steps(recorded, max(2, STEPS // share))
    each, left, kept, tokens = max(2, SAMPLES // share // len(chosen)), TOKENS // share, list[dict[str, Any]](), dict[str, Any]()
    for step in chosen:
        try:
            answer = step_samples(run, step, Filter(), 0, each)
        except RunError:  # The part of faults and recoveries names the damaged step.
            continue
        if answer["step"] != step:
            continue
        room, prompts = each, []
        for prompt in answer["prompts"]:
            if room > 0:
                prompts.append({**prompt, "samples": prompt["samples"][:room]})
                room -= len(prompt["samples"])
        kept.append({**answer, "last": chosen[-1], "prompts": prompts, "total": len(prompts)})
    texts = sum(len(prompt["samples"]) + 1 for step in kept for prompt in step["prompts"])
    longest = CHARACTERS // share // max(1, texts)
    # The newest samples are those whose tokens are looked at.
    for step in reversed(kept):
        for prompt in step["prompts"]:
            prompt["prompt"] = shortened(prompt["prompt"], longest)
            for sample in prompt["samples"]:
                sample["text"] = shortened(sample["text"], longest)
                if sample["tokens"] <= left:
                    whole = one_sample(run, step["step"], sample["id"])
                    tokens[f"{step['step']} {sample['id']}"] = {**whole, "prompt": shortened(whole["prompt"], longest), "text": sample["text"]}
                    left -= len(whole["token_list"])
    return kept, tokens, len(recorded)


def _hardware(run: OpenRun) -> dict[str, Any]:
    try:
        told = hardware(run)
        keys = [line["key"] for chart in told["charts"] for line in chart["series"]]
        return {"hardware": told, "hardware_curves": hardware_curves(run, keys, None, None, MOMENTS) if keys else None}
    except RunError:  # No result depends on a damaged database.
        return {"hardware": {"charts": [], "began_s": None}, "hardware_curves": None}


def _logs(run: OpenRun, share: int) -> dict[str, Any]:
    """Returns the ends of the logs that are not empty."""
    files = [file for file in log_files(run.directory) if file["bytes"]][: max(1, LOGS // share)]
    ends = {file["name"]: _end(log_part(run.directory, file["name"], None), LOG_CHARACTERS // share) for file in files}
    return {"logs": {"files": files}, "log": ends}


def _end(part: Mapping[str, Any], characters: int) -> dict[str, Any]:
    lines: list[str] = []
    for line in reversed(part["lines"]):
        characters -= len(line)
        if characters < 0:
            break
        lines.insert(0, line)
    is_cut = len(lines) < len(part["lines"]) or part["from"] > 0
    return {**part, "from": 0, "lines": ["(earlier lines are not in this page)", *lines] if is_cut else lines}


def frozen_page(runs: Sequence[OpenRun], compared: Mapping[str, Any] | None, listed: Sequence[Mapping[str, Any]], shares: int) -> dict[str, Any]:
    """Returns all that a page of ``runs`` answers from. ``compared``: their comparison, which the page then begins with; ``listed``: their list."""
    written_s, known = time.time(), {}
    for run in runs:
        one = frozen(run, shares)
        known[run.name] = {**one.answers, "run": {**one.answers["run"], "frozen": f"Written at {_when(written_s)}, and as the run was then: {one.left_out}."}}
    return {"runs": known, "compare": compared, "listed": {"folder": "this page", "runs": listed}}


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_s))
