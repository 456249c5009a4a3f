"""The judgement of a step's samples, which begins as each sample is finished and hides behind the rollout and the inference of the others.

A reward function is called as soon as what one of its calls sees is complete (its scope): a sample, the group of a prompt, or all samples of the step. The
functions of a scope run after those of the scopes before it, and those that read the output of another model after ``add_inferred``.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judgement import Item, Judgement, Scope, TrainerState, infrastructure_fault, not_applicable
from tandem.rl.rewards.rule_based import compose, is_correct
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.traces.context import current
from tandem.runtime.traces.parts import Parts
from tandem.types import Prompt, Sample, Score, ScoreState


class Stage(NamedTuple):
    """Reward functions, by index, that are called at the same time. ``needs_inference``: after ``Judging.add_inferred``."""

    scope: Scope
    needs_inference: bool
    judges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples of one judgement, by id, that are ready for stage ``stage``."""

    judging: "Judging"
    stage: int
    sample_ids: tuple[str, ...]


class RewardTime(NamedTuple):
    """Seconds of workers in calls of one reward function. ``tail``: those while the run waited for nothing but rewards; ``hidden``: the others."""

    total: float
    hidden: float
    tail: float

    def plus(self, other: "RewardTime") -> "RewardTime":
        return RewardTime(self.total + other.total, self.hidden + other.hidden, self.tail + other.tail)


def stages_of(scopes: Sequence[Scope], needs_inference: Sequence[bool]) -> list[Stage]:
    """Returns the stages of reward functions with these scopes, in the order in which a sample passes them."""
    order = [(scope, needs) for needs in (False, True) for scope in ("sample", "group", "batch")]
    of = list(zip(scopes, needs_inference, strict=True))
    return [Stage(scope, needs, judges) for scope, needs in order if (judges := tuple(i for i, each in enumerate(of) if each == (scope, needs)))]  # type: ignore[arg-type]


@dataclass(eq=False)
class Judging:
    """The judgement of one step. Its methods may be called from any thread.

    Args:
        put: takes units that are ready.
        prompts: those of the samples, and maybe others.
        group_size: samples of each prompt, so that a group is known to be complete. 0: groups are complete when all samples are.
    """

    config: RewardsConfig
    stages: Sequence[Stage]
    put: Callable[[Sequence[Unit]], None]
    prompts: Mapping[str, Prompt]
    state: TrainerState
    group_size: int = 0
    trace_ratio: float = 1.0
    """Share of the calls of workers, besides the first, that are recorded below the span that it is made for."""
    parts: Parts = field(default_factory=Parts)
    """Those calls."""
    _items: dict[str, Item] = field(default_factory=dict)
    _groups: dict[str, list[str]] = field(default_factory=dict)
    _indices: dict[str, int] = field(default_factory=dict)
    """By sample, its place in its group."""
    _passed: dict[str, int] = field(default_factory=dict)
    """By sample, the number of stages that it has passed."""
    _queued: dict[str, int] = field(default_factory=dict)
    """By sample, the newest stage for which it was queued."""
    _said: dict[str, dict[str, Judgement]] = field(default_factory=dict)
    _final: list[str] | None = None
    _inferred: bool = False
    _deadline: Deadline | None = None
    _calls: list[tuple[tuple[int, ...], float, float]] = field(default_factory=list)
    _waits: list[tuple[float, float]] = field(default_factory=list)
    _scores: "Future[list[Score]]" = field(default_factory=Future)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.parts.begin(current(), self.trace_ratio)

    # -- samples -------------------------------------------------------------------------------------------------------

    def add(self, samples: Sequence[Sample]) -> None:
        """Begins to judge ``samples``, which are finished; those that were added before, by a worker that died since, only if they have changed."""
        with self._lock:
            for sample in samples:
                self._add(sample)
            self._advance([sample.id for sample in samples])

    def _add(self, sample: Sample) -> None:
        known = self._items.get(sample.id)
        if known is not None and (known.completion, known.completion_ids, known.outcome) == (sample.text, sample.token_ids, sample.outcome):
            return
        if known is None:
            self._groups.setdefault(sample.prompt_id, []).append(sample.id)
            self._indices[sample.id] = sample.index
        self._items[sample.id] = _item(sample, self.prompts[sample.prompt_id])
        self._passed[sample.id], self._queued[sample.id], self._said[sample.id] = 0, -1, {}
        if sample.fault:
            self._said[sample.id] = {self.config.composition[0].label: infrastructure_fault(f"sample '{sample.id}': {sample.fault}")}
        elif sample.outcome and not any(function.function == "agent" for function in self.config.composition):
            unread = "its agent returned a number, which no reward function reads; name 'agent' in rewards.functions"
            self._said[sample.id] = {self.config.composition[0].label: infrastructure_fault(f"sample '{sample.id}': {unread}")}

    def complete(self, samples: Sequence[Sample]) -> None:
        """Says which samples the step has, in order. Those that were added are not judged again, unless they have changed; those that are not in it
        are forgotten. ``rewards.deadline_s`` begins."""
        with self._lock:
            self._deadline = Deadline(self.config.deadline_s)
            for sample in samples:
                self._add(sample)
            self._final = [sample.id for sample in samples]
            of_step = set(self._final)
            self._groups = {prompt: kept for prompt, ids in self._groups.items() if (kept := [each for each in ids if each in of_step])}
            self._inferred = self._inferred or not any(stage.needs_inference for stage in self.stages)
            self._advance(self._final)
            self._resolve()

    def add_inferred(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Adds what the inference phase has computed, by name a value for each sample of ``complete``, for the functions that need it."""
        with self._lock:
            assert self._final is not None, "inference comes after the samples are complete"
            for place, sample_id in enumerate(self._final):
                item = self._items[sample_id]
                self._items[sample_id] = item._replace(columns={**item.columns, **{name: values[place] for name, values in columns.items()}})
            self._inferred, self._deadline = True, Deadline(self.config.deadline_s)
            self._advance(self._final)

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def future(self) -> "Future[list[Score]]":
        """The scores, in the order of the samples of ``complete``."""
        return self._scores

    def result(self) -> list[Score]:
        """Waits for the scores and returns them in the order of the samples of ``complete``."""
        began = time.perf_counter()
        try:
            return self._scores.result()
        finally:
            self._waits.append((began, time.perf_counter()))

    def times(self) -> dict[str, RewardTime]:
        """Returns the time of each function by its label."""
        labels = [function.label for function in self.config.composition]
        totals, tails = [0.0] * len(labels), [0.0] * len(labels)
        with self._lock:
            for judges, began, ended in self._calls:
                for judge in judges:
                    totals[judge] += ended - began
                    tails[judge] += sum(max(0.0, min(ended, until) - max(began, since)) for since, until in self._waits)
        return {label: RewardTime(total, total - tail, tail) for label, total, tail in zip(labels, totals, tails, strict=True)}

    def fail(self, error: BaseException) -> None:
        """Ends the judgement with ``error``."""
        with self._lock:
            if not self._scores.done():
                self._scores.set_exception(error)

    # -- the workers' side ---------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        """Returns the seconds that are left of ``rewards.deadline_s``, which begins when the samples are complete."""
        with self._lock:
            return self.config.deadline_s if self._deadline is None else self._deadline.left_s()

    @property
    def ended(self) -> bool:
        return self._scores.done()

    def items_of(self, units: Sequence[Unit]) -> list[Item]:
        """Returns the samples of ``units`` that no function has failed on."""
        with self._lock:
            return [self._items[each]._replace(correct=self._correct(each)) for unit in units for each in unit.sample_ids if not self._is_broken(each)]

    def _correct(self, sample_id: str) -> bool | None:
        deciding = self._said[sample_id].get(self.config.accuracy_function)
        return None if deciding is None else is_correct(deciding, self.config)

    def record_call(self, judges: Sequence[int], began: float, ended: float) -> None:
        """Records that ``judges`` were called together, in seconds of ``perf_counter``."""
        with self._lock:
            self._calls.append((tuple(judges), began, ended))

    def give(self, units: Sequence[Unit], items: Sequence[Item], said: Sequence[Mapping[str, Judgement]]) -> None:
        """Takes the judgements of ``items``, which ``items_of(units)`` returned."""
        with self._lock:
            judged = {item.sample_id: (item, judgements) for item, judgements in zip(items, said, strict=True)}
            done: list[str] = []
            for unit in units:
                for sample_id in unit.sample_ids:
                    if sample_id in judged and judged[sample_id][0].completion_ids != self._items[sample_id].completion_ids:
                        continue  # The sample was drawn again in the meantime.
                    self._said[sample_id].update(judged[sample_id][1] if sample_id in judged else {})
                    self._passed[sample_id] = unit.stage + 1
                    done.append(sample_id)
            self._advance(done)
            self._resolve()

    def _advance(self, sample_ids: Sequence[str]) -> None:
        """Queues what has become ready now that ``sample_ids`` have come this far."""
        ready: list[Unit] = []
        if self.ended:
            return
        for sample_id in sample_ids:
            at = self._passed[sample_id]
            if at == len(self.stages) or self._queued[sample_id] >= at or (self.stages[at].needs_inference and not self._inferred):
                continue
            peers = self._peers(self.stages[at].scope, sample_id)
            if peers and all(self._passed[peer] == at for peer in peers):
                self._queued.update(dict.fromkeys(peers, at))
                ready.append(Unit(self, at, tuple(peers)))
        if ready:
            self.put(ready)

    def _peers(self, scope: Scope, sample_id: str) -> Sequence[str]:
        """Returns the samples that one call sees with ``sample_id``; none as long as they are not complete."""
        if scope == "sample":
            return [sample_id]
        if scope == "batch":
            return self._final or []
        group = self._groups.get(self._items[sample_id].group, [])
        is_complete = self._final is not None or len(group) == self.group_size
        return sorted(group, key=self._indices.__getitem__) if is_complete else []

    def _is_broken(self, sample_id: str) -> bool:
        return any(judgement.state is ScoreState.INFRASTRUCTURE_FAULT for judgement in self._said[sample_id].values())

    def _resolve(self) -> None:
        if self._final is None or self._scores.done() or any(self._passed[each] < len(self.stages) for each in self._final):
            return
        labels = [function.label for function in self.config.composition]
        called = {labels[judge] for stage in self.stages for judge in stage.judges}
        in_order = lambda said: {label: said[label] if label in said else not_applicable() for label in labels if label in said or label not in called}
        self._scores.set_result([compose(each, in_order(self._said[each]), self.config) for each in self._final])


def _item(sample: Sample, prompt: Prompt) -> Item:
    return Item(
        sample.id, prompt.text, sample.text, sample.token_ids, prompt.ground_truth, prompt.task, prompt.columns, prompt.messages, prompt.id, sample.messages,
        sample.sampled_tokens, outcome=sample.outcome,
    )  # fmt: skip
