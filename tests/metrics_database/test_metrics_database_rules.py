"""The series of rules are those of Prometheus: ``promtool`` evaluates the same rules over the same samples, and says where they differ."""

import json
import math
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from test_metrics_database_promql import BOUNDS, LABELS, filled, names_in

from tandem.metrics_database.answers import Answers
from tandem.metrics_database.promql.syntax import NAME
from tandem.metrics_database.rules import AlertRule, RecordingRule, Rules
from tandem.metrics_database.store import MetricsReader, MetricsWriter, Retention
from tandem.observability.alerts import ALERTS
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.observability.embedded import shipped_rules
from tandem.observability.recording import RECORDS
from tandem.observability.rules import rules_file
from tandem.types import UserError

EVERY_S, STEPS = 15, 64
RECORDED = [record.name for record in RECORDS]
OF_DASHBOARDS = {filled(query) for dashboard in DASHBOARDS for query in dashboard.queries() if "ALERTS" in query}
ASKED = (
    "ALERTS", "ALERTS_FOR_STATE", "count_over_time(ALERTS[5m])", "sum by (alertname, alertstate) (ALERTS)", "max_over_time(ALERTS_FOR_STATE[3m])",
    'ALERTS{alertstate="firing", severity="critical"}', *sorted(OF_DASHBOARDS),
)  # fmt: skip
ROUNDED = 2.0**16
"""Of its parts recorded values are compared: sums of floats may be in other orders."""
Labels = tuple[tuple[str, str], ...]
Values = list[float | str | None]
"""Of a series at each scrape: a number, ``stale``, or none."""


def made_series(seed: int) -> dict[Labels, Values]:
    """Returns every series that the rules read: gauges that stay for a while and change, counters that begin again, gaps and ends."""
    rng = random.Random(seed)
    names = sorted(set().union(*(names_in(rule.expr) for rule in (*RECORDS, *ALERTS))) - set(RECORDED))
    made: dict[Labels, Values] = {}
    for name in names:
        prefix = max((each for each in LABELS if name.startswith(each)), key=len)
        for labels in LABELS[prefix]:
            bounds = BOUNDS if name.endswith("_bucket") else [""]
            counts, series = [0.0] * len(bounds), [Values() for _ in bounds]
            while len(series[0]) < STEPS:
                kind, gauge = rng.choice(("value", "value", "value", "gap", "stale")), rng.choice((0.0, 0.0, 1.0, 0.97, 40.0, 200.0))
                for at in range(rng.randrange(1, 24) if kind == "value" else 3 if kind == "gap" else 1):
                    grown = rng.randrange(0, 6)
                    counts = [count + grown for count in counts]
                    for place in range(len(bounds)):
                        counts[place:] = [count + 1 for count in counts[place:]] if rng.random() < 0.3 else counts[place:]
                    for place, values in enumerate(series):
                        value = counts[place] if name.endswith(("_total", "_sum", "_count", "_bucket")) else gauge
                        values.append(value if kind == "value" else "stale" if kind == "stale" and not at else None)
            for bound, values in zip(bounds, series, strict=True):
                made[tuple(sorted({**labels, NAME: name, **({"le": bound} if bound else {})}.items()))] = values[:STEPS]
    return made


def kept(path: Path, made: dict[Labels, Values], rules: Rules) -> Answers:
    """Returns what answers from a database of ``made``, in which ``rules`` were evaluated after each scrape."""
    writer = MetricsWriter(path, Retention())
    for step in range(STEPS):
        when, now = step * EVERY_S * 1000, {labels: values[step] for labels, values in made.items() if values[step] is not None}
        writer.append((labels, when, None if value == "stale" else float(value)) for labels, value in now.items() if value is not None)
        writer.evaluate(rules, when)
    writer.close()
    return Answers(MetricsReader(path).read)


def shown(labels: Labels) -> str:
    """Returns labels as a selector."""
    name = dict(labels).get(NAME, "")
    return name + "{" + ", ".join(f"{label}={json.dumps(value)}" for label, value in labels if label != NAME) + "}"


def expected(answers: Answers, query: str, at_s: int, *, is_rounded: bool = False) -> list[dict[str, object]]:
    value = answers.instant(query, at_s * 1000)
    assert isinstance(value, list)
    if not is_rounded:
        return [{"labels": shown(labels), "value": each} for labels, each in value]
    # As Prometheus' round(), for two sums of floats in different orders.
    return [
        {"labels": shown(tuple(pair for pair in labels if pair[0] != NAME)), "value": math.floor(each * ROUNDED + 0.5) / ROUNDED}
        for labels, each in value
    ]


def told_by_promtool(folder: Path, made: dict[Labels, Values], questions: Sequence[tuple[str, int, list[dict[str, object]]]]) -> str:
    """Returns what ``promtool test rules`` finds wrong with the answers to ``questions`` (query, second, samples)."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    (folder / "recording.yml").write_text(rules_file("tandem-recording", RECORDS))
    (folder / "alerts.yml").write_text(rules_file("tandem-alerts", ALERTS))
    series = [{"series": shown(labels), "values": " ".join("_" if value is None else str(value) for value in values)} for labels, values in made.items()]
    asked = [{"expr": query, "eval_time": f"{at_s}s", "exp_samples": samples} for query, at_s, samples in questions]
    test = {
        "rule_files": ["recording.yml", "alerts.yml"], "evaluation_interval": f"{EVERY_S}s",
        "group_eval_order": ["tandem-recording", "tandem-alerts"],
        "tests": [{"interval": f"{EVERY_S}s", "input_series": series, "promql_expr_test": asked}],
    }  # fmt: skip
    (folder / "test.yml").write_text(yaml.safe_dump(test, sort_keys=False, width=10**6))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
def test_alerts_and_recorded_series_are_those_of_prometheus_at_each_time(seed: int, tmp_path: Path) -> None:
    made = made_series(seed)
    answers = kept(tmp_path / "metrics.sqlite", made, shipped_rules())
    times = [step * EVERY_S + rest for step in range(0, STEPS, 13) for rest in (0, 7)]
    questions = [(query, at_s, expected(answers, query, at_s)) for query in ASKED for at_s in times]
    for name in RECORDED:
        numbers = f"{name} == {name}"  # Without NaN, which promtool finds unequal to itself.
        questions += [(f"round({numbers}, {1 / ROUNDED})", at_s, expected(answers, numbers, at_s, is_rounded=True)) for at_s in times]
    assert (wrong := told_by_promtool(tmp_path, made, questions)) == "", wrong[:3000]
    states = {(dict(labels)["alertname"], dict(labels)["alertstate"]) for labels in answers.over("ALERTS", range(0, STEPS * EVERY_S * 1000, 15_000))}
    assert len({name for name, state in states if state == "firing"}) > 0.6 * len(ALERTS) and {"pending", "firing"} == {state for _, state in states}
    assert all(any(samples for query, _, samples in questions if name in query) for name in RECORDED)
    # The test can fail: a sample that is missing is one that promtool has.
    query, at_s, samples = next(question for question in questions if question[2])
    assert told_by_promtool(tmp_path, made, [(query, at_s, samples[1:])])


def test_a_rule_whose_expression_has_no_value_costs_the_others_nothing(tmp_path: Path) -> None:
    broken = RecordingRule.of("a:b", "up * on (run) up")
    rules = Rules([broken, RecordingRule.of("c:d", "sum(up)")], [AlertRule.of("Down", "up == 0", "30s", severity="critical")])
    up = lambda instance: ((NAME, "up"), ("instance", instance), ("run", "r"))
    made: dict[Labels, Values] = {up("a"): [1.0, 0.0, 0.0, 0.0, 1.0] + [1.0] * (STEPS - 5), up("b"): [1.0] * STEPS}
    answers = kept(tmp_path / "metrics.sqlite", made, rules)
    assert answers.instant("a:b", 60_000) == [] and answers.instant("c:d", 15_000) == [(((NAME, "c:d"),), 1.0)]
    state = [[dict(labels)["alertstate"] for labels, _ in answers.instant("ALERTS", at * 15_000)] for at in range(6)]  # type: ignore[union-attr]
    assert state == [[], ["pending"], ["pending"], ["firing"], [], []]
    with pytest.raises(UserError):
        RecordingRule.of("a:b", "up +")
