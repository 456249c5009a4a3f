"""The tables of a page. Every text that a model, a user or a file gave is escaped."""

import html
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.config.addresses import has_secret
from tandem.report.cards import MEASURED, MEMORY, memory_of_phases
from tandem.report.charts import phase_seconds
from tandem.report.phases import PhaseFigures, phase_cells
from tandem.report.run_facts import RunFacts
from tandem.report.samples import ShownSample, StepSamples
from tandem.report.series import Row, column

ALERTS = ("damage", "mismatch", "weights_damaged", "checkpoint_damaged", "journal_lost")
"""Events after which results may not be what they should be."""
MARKED = ("recovery", "resume", "fewer_ranks", "skipped_step", "mismatch", "weights_damaged", "silent_corruption", "reward_fault")
"""Events that the curves show at their step."""
MOST_MARKS = 60
_SECRET_NAMES = re.compile(
    r"(?i)^token$|(^|[_-])(password|passwd|secret|credentials?|signature|authorization|bearer|(api|access|private|secret)[_-]?key|(access|auth|api|hf)[_-]token)$"
)
_SECRET_VALUES = re.compile(r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|AKIA[A-Z0-9]{12,}|Bearer \S{8,})")
HIDDEN = "(hidden)"


def escaped(value: Any) -> str:
    return html.escape(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """Returns a table of HTML cells in a panel; with ``numbers`` all columns but the first are aligned to the right."""
    side = lambda place: " class='number'" if numbers and place else ""
    top = "".join(f"<th{side(place)}>{escaped(name)}</th>" for place, name in enumerate(head))
    body = "".join("<tr>" + "".join(f"<td{side(place)}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<div class='panel'><table><tr>{top}</tr>{body}</table></div>"


def quiet(text: str) -> str:
    return f"<p class='quiet'>{escaped(text)}</p>"


# -- time, memory, agreement -------------------------------------------------------------------------------------------


def time_table(rows: Sequence[Row]) -> str:
    body = []
    for name, values in phase_seconds(rows).items():
        ordered = sorted(value or 0.0 for value in values)
        cells = (sum(ordered), ordered[len(ordered) // 2], ordered[-1])
        body.append([escaped(name.replace("_", " ")), *(f"{value:.3f}" for value in cells)])
    return table(("phase", "total s", "median s", "max s"), body) if body else quiet("No step was completed.")


def phases_table(run: RunFacts) -> str:
    """Returns what was predicted of each phase of a step beside what was measured; empty until the run has finished."""
    header, *lines = phase_cells([PhaseFigures(**each) for each in run.phases]) or [()]
    return table(header, [[escaped(line[0]), *line[1:]] for line in lines]) if lines else ""


def memory_table(run: RunFacts) -> str:
    largest: dict[str, float] = {}
    for row in run.rows:
        for key, value in row.items():
            if key.startswith(MEMORY) and key.endswith(MEASURED):
                largest[key] = max(largest.get(key, 0.0), float(value))
    body = []
    for each in memory_of_phases(largest.items(), run.predicted_memory):
        ratio = f"{each.measured / each.predicted:.2f}" if each.predicted and each.measured else "-"
        body.append([escaped(each.phase.replace("_", " ")), _mebibytes(each.predicted), _mebibytes(each.measured), ratio])
    return table(("phase", "predicted MiB", "measured MiB (max)", "measured / predicted"), body)


def moves_table(rows: Sequence[Row]) -> str:
    """Returns the moves of a pod's residents over all steps; empty where nothing moved."""
    moved: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("memory/moved/") and key.endswith("/bytes"):
                _, _, name, move, _ = key.split("/")
                moved.setdefault((name, move), []).append((float(value), float(row[f"memory/moved/{name}/{move}/seconds"])))
    body = []
    for (name, move), steps in sorted(moved.items()):
        size, seconds = (sum(column) for column in zip(*steps, strict=True))
        body.append([escaped(name), escaped(move), str(len(steps)), _mebibytes(size), f"{seconds:.3f}"])
    return table(("resident", "move", "steps", "MiB in all", "seconds in all"), body) if body else ""


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def agreement(rows: Sequence[Row]) -> str:
    values = [abs(value) for value in column(rows, "mismatch_kl") if value is not None]
    if not values:
        return quiet("No step was completed.")
    if max(values) == 0.0:
        return f"<p class='good'>mismatch_kl is exactly 0 in all {len(values)} steps.</p>"
    return f"<p class='bad'>mismatch_kl is not 0: at most {max(values):.3g}.</p>"


# -- completions -------------------------------------------------------------------------------------------------------


def examples(run: RunFacts) -> str:
    """Returns the completions of the same held-out prompts in the first and in the newest evaluation."""
    after = {example["prompt"]: example for example in run.examples_after}
    body = [[f"<code>{escaped(e['prompt'])}</code>", _completion(e), _completion(after.get(e["prompt"]))] for e in run.examples_before]
    return table(("prompt", "before", "after"), body, numbers=False) if body else quiet("No completions were saved.")


def _completion(example: Mapping[str, Any] | None) -> str:
    if example is None:
        return "<span class='quiet'>-</span>"
    return f"<code class='{'good' if example.get('correct') else 'bad'}'>{escaped(example['completion'])}</code>"


def samples(steps: Sequence[StepSamples]) -> str:
    """Returns samples of training by step, each with its reward."""
    if not steps:
        return quiet("No samples were drawn.")
    return f"<div class='panel samples'>{''.join(map(_step, steps))}</div>"


def _step(step: StepSamples) -> str:
    mean = "no reward" if step.mean is None else f"mean reward {step.mean:.3f}"
    label = f"step {step.step}: {mean} of {step.count} samples"
    prompts = "".join(f"<div class='prompt'><pre>{escaped(prompt)}</pre>{''.join(map(_sample, shown))}</div>" for prompt, shown in step.prompts)
    return f"<article data-label='{escaped(label)}'><h3>{escaped(label)}</h3><div class='prompts'>{prompts}</div></article>"


def _sample(sample: ShownSample) -> str:
    colour = "" if sample.correct is None else " good" if sample.correct else " bad"
    said = ["not scored" if sample.reward is None else f"reward {sample.reward:.4g}"]
    if len(sample.parts) > 1:
        said += [f"{name} {value:.4g}" for name, value in sample.parts.items()]
    said.append(f"{sample.tokens} tokens" + {"length": ", truncated", "repetition": ", ended because it repeats itself"}.get(sample.finish_reason, ""))
    said += [sample.reason] if sample.reason else []
    return f"<div class='sample{colour}'><pre>{escaped(sample.text)}</pre><small>{escaped(' · '.join(said))}</small></div>"


# -- events and configuration ------------------------------------------------------------------------------------------


def alerts(run: RunFacts) -> str:
    return "".join(f"<p class='alert'>{escaped(line)}</p>" for line in alert_lines(run))


def alert_lines(run: RunFacts) -> list[str]:
    """Returns the events after which results may not be what they should be, at most one line for each kind."""
    lines = [run.note] if run.note else []
    for kind in ALERTS:
        alarms = [event["detail"] for event in run.events if event["kind"] == kind]
        if alarms:
            more = f" (and {len(alarms) - 1} more, below)" if len(alarms) > 1 else ""
            lines.append(f"{alarms[0].get('reason') or alarms[0].get('what') or kind}{more}")
    return lines


def marks(run: RunFacts) -> list[tuple[int, str]]:
    """Returns (step, event) of the newest events that belong to a step."""
    marks = [(int(event["detail"].get("step", 0)), event["kind"].replace("_", " ")) for event in run.events if event["kind"] in MARKED]
    return list(dict.fromkeys(marks))[-MOST_MARKS:]


def events_table(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "<p>None.</p>"
    body = []
    for event in events:
        kind = f"<span class='{'bad' if event['kind'] in ALERTS else ''}'>{escaped(event['kind'])}</span>"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time_s"])) if event.get("time_s") else "-"
        body.append([when, kind, f"<code>{escaped(json.dumps(event['detail'], default=str, ensure_ascii=False))}</code>"])
    return table(("time", "event", "detail"), body, numbers=False)


def shown_values(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of a recipe by dotted key, as YAML would write them, without secrets."""
    return {key: _shown(key, value) for key, value in recipe.items()}


def _shown(key: str, value: Any) -> str:
    return json.dumps(without_secrets(key.rpartition(".")[2], value), default=str, ensure_ascii=False).removeprefix('"').removesuffix('"')


def without_secrets(name: str, value: Any) -> Any:
    """Returns ``value`` of the key ``name`` with passwords, tokens and keys hidden, however deep they are."""
    if isinstance(value, Mapping):
        return {key: without_secrets(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(name, inner) for inner in value]
    if isinstance(value, str) and value and (_SECRET_NAMES.search(name) or has_secret(value)):
        return HIDDEN
    return _SECRET_VALUES.sub(HIDDEN, value) if isinstance(value, str) else value


def configuration(run: RunFacts) -> str:
    """Returns the resolved recipe; values other than the default are bold and first."""
    if run.recipe is None:
        return quiet("config.yaml was written by another version of Tandem.")
    values, defaults = shown_values(run.recipe), shown_values(run.defaults)
    changed = [key for key in values if values[key] != defaults.get(key)]
    row = lambda key: f"<tr class='{'changed' if key in changed else ''}'><td><code>{escaped(key)}</code></td><td><code>{escaped(values[key])}</code></td>"
    head = "<tr><th>key</th><th>value</th><th>default</th></tr>"
    first = "".join(f"{row(key)}<td class='quiet'><code>{escaped(defaults.get(key, '-'))}</code></td></tr>" for key in changed)
    rest = "".join(f"{row(key)}</tr>" for key in values if key not in changed)
    return (
        f"<div class='panel'><table>{head}{first}</table></div><div class='panel' style='margin-top:.7rem'><details><summary>{len(values) - len(changed)} "
        f"keys have their default</summary><table>{rest}</table></details></div>"
    )

