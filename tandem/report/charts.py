"""Which curves a page has: of one run, or of several with the same curve of each in one chart."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.report.run_facts import RunFacts
from tandem.report.series import Chart, Series, column, finite, has_values


@dataclass(frozen=True, slots=True)
class Curve:
    """The definition of a chart: ``keys`` of metrics with the name of each. ``rare``: shown only where a value is not 0."""

    title: str
    keys: tuple[tuple[str, str], ...]
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    rare: bool = False


def _curve(title: str, key: str, unit: str = "", floor: float | None = None, ceiling: float | None = None, rare: bool = False) -> Curve:
    return Curve(title, ((key, title),), unit, floor, ceiling, rare)


REWARD_STATISTICS = ("reward/mean", "reward/std", "reward/frac_zero_std", "reward/fault_share")
REINFORCEMENT: Mapping[str, tuple[Curve, ...]] = {
    "Accuracy and reward": (
        Curve("Reward", (("reward/mean", "mean"), ("reward/std", "standard deviation"))),
        _curve("Groups without spread", "reward/frac_zero_std", "share of prompts", 0, 1),
        _curve("Samples without a score", "reward/fault_share", "share", 0, rare=True),
        Curve(
            "Curriculum",
            (("curriculum/success_rate", "mean success rate"), ("curriculum/seen_share", "drawn so far"), ("curriculum/solved_share", "always solved")),
            "share of prompts", 0, 1,
        ),
        _curve("Difficulty of the prompts", "curriculum/difficulty"),
    ),
    "Policy": (
        Curve("KL divergence", (("kl", "from the reference model"), ("actor/ppo_kl", "from the policy before the update")), "nats", rare=True),
        _curve("Entropy", "actor/entropy", "nats"),
        _curve("Difference of rollout and trainer", "mismatch_kl", "nats", rare=True),
        _curve("Policy loss", "actor/pg_loss"),
        _curve("Clipped tokens", "actor/pg_clipfrac", "share", 0, rare=True),
        _curve("Importance weight", "actor/importance_weight"),
        _curve("Gradient norm", "actor/grad_norm", "", 0),
        _curve("Learning rate", "actor/lr", "", 0),
    ),
    "Responses": (
        Curve("Response length", (("response_length/mean", "mean"), ("response_length/max", "longest")), "tokens", 0),
        _curve("Truncated responses", "response_length/clip_ratio", "share", 0),
    ),
}
DATA: Mapping[str, tuple[Curve, ...]] = {
    "Optimization": (
        _curve("Gradient norm", "actor/grad_norm", "", 0),
        _curve("Learning rate", "actor/lr", "", 0),
        _curve("Entropy", "train/entropy", "nats"),
        _curve("Load balance of the router", "router/max_overload", rare=True),
        _curve("Acceptance length of drafts", "draft/acceptance_length", "tokens", 1),
    ),
}
EVERY_JOB: Mapping[str, tuple[Curve, ...]] = {
    "Speed": (
        Curve("Throughput", (("perf/tokens_per_s", "step"), ("perf/rollout_tokens_per_s", "rollout")), "tokens per second", 0),
        _curve("Step time", "timing_s/step", "seconds", 0),
        _curve("Model operations", "perf/model_tflops", "10¹² per second", 0),
        _curve("Model FLOPs utilization", "perf/mfu", "share", 0),
        _curve("Waiting for data", "timing_s/data_wait", "seconds", 0, rare=True),
        _curve("Waiting for other ranks", "comm/wait_s", "seconds", 0, rare=True),
        _curve("Skipped steps", "train/skipped_steps", "", 0, rare=True),
        _curve("Loss scale", "train/loss_scale", "", 0),
    ),
}
_ELSEWHERE = (
    "step", "weight_version", "accuracy", "evaluation/accuracy", "train/loss", "perf/time_per_step", "rollout/staleness",
    "mismatch_max_abs", "train/backed_off_steps", "train/tokens", "train/examples", "train/step_tokens", "train/learned_tokens",
)  # fmt: skip
"""Metrics that other parts of the page show, or that a curve says nothing of."""
_ELSEWHERE_PREFIXES = ("timing_s/", "reward_s/", "memory/", "comm/", "reward/")


TRAINED = {True: ("Loss", "train/loss", "training"), False: ("Accuracy and reward", "accuracy", "in training")}
"""Of runs on data and of others: the first section, the metric of its first chart, and what it is called beside evaluations."""


def defined_curves(keys: Collection[str], *, is_data: bool) -> dict[str, list[Curve]]:
    """Returns the curves of metrics with these ``keys``, by section. The first chart of the first section, which has evaluations too, is ``first_chart``."""
    fixed = {**(DATA if is_data else REINFORCEMENT), **EVERY_JOB}
    by_section = {section: list(curves) for section, curves in fixed.items()}
    known = {key for curves in fixed.values() for curve in curves for key, _ in curve.keys}
    if not is_data:
        by_section[TRAINED[False][0]][1:1] = _reward_functions(keys)
        by_section["Speed"] += _reward_times(keys)
    others = sorted(key for key in set(keys) - known - set(_ELSEWHERE) if not key.startswith(_ELSEWHERE_PREFIXES))
    by_section["Other metrics"] = [_curve(key, key) for key in others]
    return by_section


def first_chart(runs: Sequence[RunFacts], *, is_data: bool) -> Chart:
    """Returns the chart of accuracy, or of a run on data the one of the loss."""
    return _loss(runs) if is_data else _accuracy(runs)


def _training(run: RunFacts, number: int, name: str, key: str) -> Iterator[Series]:
    values = column(run.rows, key)
    if has_values(values):
        yield Series(name, values, run=number)


def _accuracy(runs: Sequence[RunFacts]) -> Chart:
    series: list[Series] = []
    for number, run in enumerate(runs):
        series += _training(run, number, "in training", "accuracy")
        for name, kinds in (("held out, sampled", ("sampled",)), ("held out, greedy", ("greedy", "final_greedy"))):
            series += _evaluated(run, number, name, kinds, "accuracy")
    targets = {run.target for run in runs if run.target is not None}
    return Chart("Accuracy", series, "share", floor=0, ceiling=1, lines=[(target, "target") for target in sorted(targets)])


def _loss(runs: Sequence[RunFacts]) -> Chart:
    series: list[Series] = []
    for number, run in enumerate(runs):
        series += _training(run, number, "training", "train/loss")
        series += _evaluated(run, number, "held out", ("held_out", "held_out_pairs", "held_out_drafts"), "loss")
    return Chart("Loss", series, "nats per token")


def _evaluated(run: RunFacts, number: int, name: str, kinds: Sequence[str], key: str) -> Iterator[Series]:
    chosen = [evaluation for evaluation in run.evaluations if evaluation["kind"] in kinds]
    if chosen:
        errors = [finite(e.get("standard_error")) for e in chosen]
        error = [value for value in errors if value is not None]
        steps, whole = [int(e["step"]) for e in chosen], len(error) == len(chosen)
        yield Series(name, [finite(e[key]) for e in chosen], steps, number, error if whole else None, points=True)


def _reward_functions(keys: Collection[str]) -> list[Curve]:
    names = sorted({key for key in keys if key.startswith("reward/")} - set(REWARD_STATISTICS))
    return [_curve(f"Reward function {key.removeprefix('reward/')}", key) for key in names]


def _reward_times(keys: Collection[str]) -> list[Curve]:
    """Returns for each reward function the seconds in its calls that were hidden behind rollout and inference, and those that were not."""
    names = sorted({key.split("/", 1)[1].rpartition("/")[0] for key in keys if key.startswith("reward_s/")})
    parts = lambda name: tuple((f"reward_s/{name}/{part}", part) for part in ("hidden", "tail"))
    return [Curve(f"Time of reward function {name}", parts(name), "seconds", 0) for name in names]
