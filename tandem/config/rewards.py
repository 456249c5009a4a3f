"""Section ``rewards``: who judges a sample, and what happens when a judge breaks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.types.errors import UserError

BUILT_IN_REWARDS = ("task", "answer_matcher", "format_checker")


@dataclass(frozen=True, slots=True)
class AnswerMatcherConfig:
    """How a completion is compared with the ground truth.

    ``after``: only what stands behind the last occurrence of this text counts (``####`` for GSM8K); empty: everything.
    ``extract``: ``whole`` takes it as it is but for white space at both ends, ``last_number`` the last number in it,
    ``boxed`` the inside of the last ``\\boxed{...}``. ``compare``: ``exact`` text, ``numeric`` value (1,000.0 equals
    1e3 and 3/4 equals 0.75) or ``math_verify`` (needs the extra ``math``). ``tolerance``: relative, of ``numeric``; 0
    is exact rational arithmetic.
    """

    extract: Literal["whole", "last_number", "boxed"] = "whole"
    compare: Literal["exact", "numeric", "math_verify"] = "exact"
    after: str = ""
    ignore_case: bool = False
    tolerance: float = 0.0

    def check(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise UserError(f"'answer.tolerance' of a reward function is {self.tolerance}; it must be at least 0 and below 1")
        if self.tolerance and self.compare != "numeric":
            raise UserError(
                f"'answer.tolerance' of a reward function is {self.tolerance} but 'answer.compare' is '{self.compare}'; use numeric"
            )


@dataclass(frozen=True, slots=True)
class FormatCheckerConfig:
    """Exactly one of ``pattern`` (a regular expression; ``.`` matches line breaks) and ``tags`` (each
    ``<tag>...</tag>`` exactly once, in this order, none inside another). ``match``: ``full`` asks the whole completion
    to have the form (white space at both ends and between tags aside), ``contains`` a part of it."""

    pattern: str = ""
    tags: tuple[str, ...] = ()
    match: Literal["full", "contains"] = "full"

    def check(self) -> None:
        if bool(self.pattern) == bool(self.tags):
            given = "both are given" if self.pattern else "neither is given"
            raise UserError(f"section 'format' of a reward function needs either 'pattern' or 'tags'; {given}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"'format.pattern' of a reward function is {self.pattern!r}, which is no regular expression: {error}") from None
        for tag in self.tags:
            if not re.fullmatch(r"[\w-]+", tag):
                raise UserError(f"'format.tags' of a reward function holds {tag!r}; write the name alone, for example think")


@dataclass(frozen=True, slots=True)
class RewardFunctionConfig:
    """One judge. ``function``: ``task`` (the task's own judge: exact match, or ``score_answer`` of a ``reasoning_gym``
    dataset), ``answer_matcher``, ``format_checker``, or a function of your own as ``module:function`` or
    ``path/to/file.py:function``.

    ``name``: what its value is called in metrics; empty takes the function's name. ``weight``: its factor in the
    reward. ``signature``: of your own function, ``trl`` is ``f(prompts, completions, completion_ids, **columns)`` and
    ``verl`` is ``compute_score(data_source, solution_str, ground_truth, extra_info)``; ``auto`` goes by the parameters'
    names. ``arguments``: further keyword arguments for it. ``answer``, ``format``: settings of the built-in judges.
    """

    function: str
    name: str = ""
    weight: float = 1.0
    signature: Literal["auto", "trl", "verl"] = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    answer: AnswerMatcherConfig = AnswerMatcherConfig()
    format: FormatCheckerConfig | None = None

    @property
    def label(self) -> str:
        """The name of its value in metrics."""
        return self.name or self.function.rpartition(":")[2]

    def check(self) -> None:
        built_in = self.function in BUILT_IN_REWARDS
        where, colon, what = self.function.rpartition(":")
        if not built_in and not (colon and where and what.isidentifier()):
            raise UserError(
                f"reward function '{self.function}' is none of {', '.join(BUILT_IN_REWARDS)} and not of the form module:function or "
                "path/to/file.py:function"
            )
        if not -1e6 < self.weight < 1e6:
            raise UserError(f"'weight' of reward function '{self.label}' is {self.weight}; it must be a finite number")
        if (self.format is not None) != (self.function == "format_checker"):
            problem = "needs a section 'format'" if self.format is None else "has a section 'format', which belongs to format_checker"
            raise UserError(f"reward function '{self.label}' {problem}")
        if self.answer != AnswerMatcherConfig() and self.function not in ("task", "answer_matcher"):
            raise UserError(f"reward function '{self.label}' has a section 'answer', which belongs to answer_matcher and task")
        if built_in and (self.arguments or self.signature != "auto"):
            raise UserError(f"'arguments' and 'signature' belong to functions of your own, and '{self.label}' is built in; remove them")


@dataclass(frozen=True, slots=True)
class RewardsConfig:
    """The reward of a sample is the weighted sum of ``functions`` (none: the task's own judge).

    ``accuracy``: the name of the function that says whether a sample is correct (empty: the first), which it is where
    its value reaches ``accuracy_threshold``. ``model_fault_value``: what the answer matcher gives a completion in which
    there is nothing to compare.

    ``workers``: processes that judge. ``deadline_s``: the longest that judging one batch may take;
    ``sample_deadline_s``: the longest that one function may take over one sample before its process is ended.
    ``start_deadline_s``: for a worker to load the functions. A sample whose judge failed is masked; past
    ``max_fault_share`` of a step's samples the run stops.
    """

    functions: tuple[RewardFunctionConfig, ...] = ()
    accuracy: str = ""
    accuracy_threshold: float = 1.0
    model_fault_value: float = 0.0
    workers: int = 1
    deadline_s: float = 120.0
    sample_deadline_s: float = 10.0
    start_deadline_s: float = 60.0
    max_fault_share: float = 0.1

    @property
    def composition(self) -> tuple[RewardFunctionConfig, ...]:
        """The functions, the task's own judge where none is given."""
        return self.functions or (RewardFunctionConfig(function="task", name="correct"),)

    @property
    def accuracy_function(self) -> str:
        """The name of the function that says whether a sample is correct."""
        return self.accuracy or self.composition[0].label

    def check(self) -> None:
        labels = [function.label for function in self.composition]
        for label in labels:
            if labels.count(label) > 1:
                raise UserError(f"two reward functions are called '{label}'; give each a 'name' of its own")
        if self.accuracy_function not in labels:
            raise UserError(f"'rewards.accuracy' is '{self.accuracy}', which is none of the reward functions: {', '.join(labels)}")
        if self.workers < 1:
            raise UserError(f"'rewards.workers' is {self.workers}; it must be at least 1")
        for name in ("deadline_s", "sample_deadline_s", "start_deadline_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"'rewards.{name}' is {getattr(self, name)}; it must be above 0 and finite")
        if self.sample_deadline_s > self.deadline_s:
            raise UserError(f"'rewards.sample_deadline_s' is {self.sample_deadline_s}, more than rewards.deadline_s ({self.deadline_s})")
        if not 0 <= self.max_fault_share <= 1:
            raise UserError(f"'rewards.max_fault_share' is {self.max_fault_share}; it must be from 0 to 1")
        for name in ("model_fault_value", "accuracy_threshold"):
            if not abs(getattr(self, name)) < float("inf"):
                raise UserError(f"'rewards.{name}' is {getattr(self, name)}; it must be finite")
