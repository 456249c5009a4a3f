"""Section ``rewards``: which functions score a sample, and what happens when one fails."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from tandem.config.addresses import check_no_secret
from tandem.config.code_executor import CodeExecutorConfig
from tandem.config.judge_model import JudgeModelConfig
from tandem.config.length_reward import LengthRewardConfig
from tandem.config.limits import check_at_least_one, check_float32, check_seconds
from tandem.types.errors import UserError

SCORED_AS_PUBLISHED = ("gsm8k", "math", "multiple_choice")
BUILT_IN_REWARDS = ("task", "answer_matcher", "format_checker", "code_executor", "length", "judge", "agent", "verifiers", *SCORED_AS_PUBLISHED)
COMPARING = ("task", "answer_matcher", *SCORED_AS_PUBLISHED)
"""Built-in functions that compare a completion with the ground truth."""
INFERRED_COLUMNS = {"reference": "reference_logprobs", "reward_model": "reward_model_score"}
"""The argument of a function that needs the output of a model."""
SCRIPTS = {
    "latin": "LATIN", "greek": "GREEK", "cyrillic": "CYRILLIC", "armenian": "ARMENIAN", "georgian": "GEORGIAN", "hebrew": "HEBREW", "arabic": "ARABIC",
    "devanagari": "DEVANAGARI", "bengali": "BENGALI", "tamil": "TAMIL", "telugu": "TELUGU", "thai": "THAI", "hangul": "HANGUL", "hiragana": "HIRAGANA",
    "katakana": "KATAKANA", "han": "CJK",
}  # fmt: skip
"""Of each script, how Unicode's names of its letters begin."""
ADDRESSES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class AnswerMatcherConfig:
    """How a completion is compared with the ground truth."""

    extract: Literal["whole", "last_number", "boxed"] = "whole"
    """What to extract from the completion. `whole`: all of it without surrounding white space; `last_number`: the last number; `boxed`: the
    content of the last `\\boxed{...}`, also of a ground truth that has one."""
    compare: Literal["exact", "numeric", "math_verify"] = "exact"
    """How to compare: `exact` text, `numeric` value (1,000.0 equals 1e3 and 3/4 equals 0.75), or `math_verify` (needs `pip install 'tandem-rl[math]'`):
    numbers, fractions, percents, units, LaTeX, sets, intervals, matrices and relations by their value; for the letter of a choice, letters."""
    after: str = ""
    """Use only the text after the last occurrence of this text (`####` for GSM8K), in the completion and in a ground truth that contains it. Empty:
    everything."""
    ignore_case: bool = False
    """Treat upper and lower case as equal."""
    tolerance: float = 0.0
    """Relative tolerance of `numeric`. 0: exact rational arithmetic."""
    precision: int = 6
    """Decimals to which `math_verify` compares numbers."""
    relation_is_set: bool = False
    """For `math_verify`: `1 < x < 2` equals the interval (1, 2) of a ground truth that is a set."""

    def check(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise UserError(f"'answer.tolerance' of a reward function is {self.tolerance}; it must be at least 0 and below 1")
        if self.tolerance and self.compare != "numeric":
            raise UserError(
                f"'answer.tolerance' of a reward function is {self.tolerance} but 'answer.compare' is '{self.compare}'; use numeric"
            )
        if not 0 <= self.precision <= 15:
            raise UserError(f"'answer.precision' of a reward function is {self.precision}; it must be from 0 to 15 decimals")
        if self.compare != "math_verify" and (self.precision != 6 or self.relation_is_set):
            raise UserError(f"'answer.precision' and 'answer.relation_is_set' belong to math_verify, and 'answer.compare' is '{self.compare}'; remove them")


@dataclass(frozen=True, slots=True)
class FormatCheckerConfig:
    """The format that a completion must have. Exactly one of `pattern`, `tags`, `json_schema` and `scripts`."""

    pattern: str = ""
    """A regular expression; `.` matches line breaks."""
    tags: tuple[str, ...] = ()
    """Each `<tag>...</tag>` exactly once, in this order, none inside another."""
    json_schema: Mapping[str, Any] = field(default_factory=dict)
    """A JSON schema (`pip install 'tandem-rl[json-schema]'`) that the completion, as JSON, fits. With `match: contains` the last JSON object or array in it."""
    scripts: tuple[str, ...] = ()
    """Scripts such as `latin` or `han`; the reward is the share of letters that belong to one of them, so that an answer keeps to its language (DeepSeek-R1).
    1 without letters."""
    match: Literal["full", "contains"] = "full"
    """`full`: the whole completion has the format. `contains`: a part of it."""

    def check(self) -> None:
        given = [name for name in ("pattern", "tags", "json_schema", "scripts") if getattr(self, name)]
        if len(given) != 1:
            has = " and ".join(given) or "none"
            raise UserError(f"section 'format' of a reward function needs one of pattern, tags, json_schema and scripts; it has {has}")
        for script in self.scripts:
            if script not in SCRIPTS:
                raise UserError(f"'format.scripts' of a reward function contains {script!r}; write one of {', '.join(SCRIPTS)}")
        if self.scripts and self.match != "full":
            raise UserError("'format.match' of a reward function is contains, and 'format.scripts' reads the whole completion; remove it")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"'format.pattern' of a reward function is {self.pattern!r}, which is not a valid regular expression: {error}") from None
        for tag in self.tags:
            if not re.fullmatch(r"[\w-]+", tag):
                raise UserError(f"'format.tags' of a reward function contains {tag!r}; write the name alone, for example think")


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """How an HTTP endpoint is asked."""

    retries: int = 4
    """Further attempts where it does not answer, or answers that it is busy (429, 5xx), with waits of 0.5, 1, 2, ... seconds."""
    timeout_s: float = 60.0
    """Maximum seconds of one request; `rewards.deadline_s` bounds all of them."""
    batch_size: int = 0
    """Maximum samples of a request; several requests are sent at once. 0: all samples that are finished in one."""
    token_variable: str = ""
    """The environment variable with the token that is sent as `Authorization: Bearer`. Empty: none."""

    def check(self) -> None:
        check_seconds("endpoint", self, "timeout_s")
        for name in ("retries", "batch_size"):
            if not 0 <= getattr(self, name) <= 10**6:
                raise UserError(f"'endpoint.{name}' of a reward function is {getattr(self, name)}; it must be from 0 to 1000000")
        if self.token_variable and not self.token_variable.isidentifier():
            raise UserError("'endpoint.token_variable' of a reward function is not the name of an environment variable; write the name, never the token")


@dataclass(frozen=True, slots=True)
class RewardFunctionConfig:
    """One reward function."""

    function: str
    """`task` (the task's own), `answer_matcher`, `format_checker`, `code_executor`, `length`, `judge`, `agent` (the number that the agent of
    `rollout.agent` returned), `verifiers` (the environment of a task `verifiers:NAME`); `gsm8k`, `math` or `multiple_choice`, which score as
    the benchmark's authors do; your own as `module:function` or `path/to/file.py:function`; or the address of an HTTP endpoint, `http://host:port/path`."""
    name: str = ""
    """Name of its value in metrics. Empty: the function's name."""
    weight: float = 1.0
    """Its weight in the reward."""
    signature: Literal["auto", "trl", "verl"] = "auto"
    """Signature of your own function: `trl` is `f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)`, of which it
    takes what it names, and `None` for a sample to which it does not apply; `verl` is `compute_score(data_source, solution_str, ground_truth, extra_info)`;
    `auto` detects it from the parameters' names. Both may be `async`."""
    scope: Literal["auto", "sample", "group", "batch"] = "auto"
    """What one call of your own function sees, and so when it runs: `sample`, as soon as one is finished; `group`, all samples of a prompt; `batch`, all of the
    step, after the rollout. `auto`: `group` for TRL's signature and `sample` for verl's."""
    needs: tuple[Literal["reference", "reward_model"], ...] = ()
    """Models whose output your own function reads; it runs after the inference phase, and not in evaluations. `reference`: the argument `reference_logprobs`,
    of each sample the reference model's log-probability of each token; `reward_model`: the argument `reward_model_score`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Additional keyword arguments for your own function."""
    answer: AnswerMatcherConfig = AnswerMatcherConfig()
    """Settings of `answer_matcher` and `task`, below."""
    format: FormatCheckerConfig | None = None
    """Settings of `format_checker`, below."""
    judge: JudgeModelConfig | None = None
    """Settings of `judge`, below."""
    length: LengthRewardConfig | None = None
    """Settings of `length`, below."""
    code: CodeExecutorConfig = field(default_factory=CodeExecutorConfig)
    """Settings of `code_executor`, below."""
    endpoint: EndpointConfig = EndpointConfig()
    """Settings of an HTTP endpoint, below."""

    @property
    def is_endpoint(self) -> bool:
        """Whether it is an address."""
        return self.function.startswith(ADDRESSES)

    @property
    def label(self) -> str:
        """The name of its value in metrics."""
        if self.is_endpoint:
            path = self.function.partition("://")[2].partition("?")[0].rstrip("/")
            return self.name or path.rpartition("/")[2].partition(":")[0]
        return self.name or self.function.rpartition(":")[2]

    def check(self) -> None:
        built_in = self.function in BUILT_IN_REWARDS
        where, colon, what = self.function.rpartition(":")
        if self.is_endpoint:
            check_no_secret(f"reward function '{self.label}'", self.function)
            _check_address(self.function)
        elif not built_in and not (colon and where and what.isidentifier()):
            raise UserError(
                f"reward function '{self.function}' is neither one of {', '.join(BUILT_IN_REWARDS)} nor of the form module:function, "
                "path/to/file.py:function or http://host/path"
            )
        if not -1e6 < self.weight < 1e6:
            raise UserError(f"'weight' of reward function '{self.label}' is {self.weight}; it must be a finite number")
        for section, owner in (("format", "format_checker"), ("length", "length"), ("judge", "judge")):
            is_given = getattr(self, section) is not None
            if is_given != (self.function == owner):
                problem = f"has a section '{section}', which belongs to {owner}" if is_given else f"needs a section '{section}'"
                raise UserError(f"reward function '{self.label}' {problem}")
        if self.answer != AnswerMatcherConfig() and self.function not in ("task", "answer_matcher"):
            raise UserError(f"reward function '{self.label}' has a section 'answer', which belongs to answer_matcher and task")
        if self.code != CodeExecutorConfig() and self.function != "code_executor":
            raise UserError(f"reward function '{self.label}' has a section 'code', which belongs to code_executor")
        if (built_in or self.is_endpoint) and (self.arguments or self.signature != "auto" or self.scope != "auto" or self.needs):
            what = "is built in" if built_in else "is an endpoint"
            raise UserError(f"'arguments', 'signature', 'scope' and 'needs' belong to functions of your own, and '{self.label}' {what}; remove them")
        if self.endpoint != EndpointConfig() and not self.is_endpoint and self.judge is None:
            raise UserError(f"reward function '{self.label}' has a section 'endpoint', which belongs to an address such as http://host/score and to judge")
        if self.judge is not None:
            check_no_secret(f"reward function '{self.label}'", self.judge.url)
            _check_address(self.judge.url)
            if self.endpoint.batch_size:
                raise UserError(f"reward function '{self.label}' has 'endpoint.batch_size', and a judge is asked about one sample at a time; remove it")


def _check_address(url: str) -> None:
    try:
        is_valid = url.startswith(ADDRESSES) and bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        is_valid = False
    if not is_valid or any(character.isspace() for character in url):
        raise UserError(f"reward function '{url}' is not an address; write http://host:port/path")


_OF_TASK = (RewardFunctionConfig(function="task", name="correct"),)


@dataclass(frozen=True, slots=True)
class RewardsConfig:
    """The reward functions, and what happens when one fails. The reward is the weighted sum of the functions; a sample for which a function
    failed is masked."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """A list; the keys of an entry are below. Empty: the task's own function."""
    accuracy: str = ""
    """Name of the function that decides whether a sample is correct. Empty: the first."""
    accuracy_threshold: float = 1.0
    """A sample is correct if that function's value is at least this."""
    model_fault_value: float = 0.0
    """Score of a completion in which the answer matcher finds nothing to compare."""
    workers: int = 1
    """Number of worker processes, each of at least 15 MiB and two open files."""
    deadline_s: float = 120.0
    """Maximum seconds to score the samples of a step once the last of them is finished."""
    sample_deadline_s: float = 10.0
    """Maximum seconds for one function and one sample; then the worker process is terminated."""
    start_deadline_s: float = 60.0
    """Maximum seconds for a worker to load the functions."""
    max_fault_share: float = 0.1
    """Maximum share of a step's samples without a score; above it the run ends."""

    @property
    def needs(self) -> set[str]:
        """The models whose output a function reads."""
        return {model for function in self.functions for model in function.needs}

    @property
    def composition(self) -> tuple[RewardFunctionConfig, ...]:
        """The functions, or the task's own function if none is given."""
        return self.functions or _OF_TASK

    @property
    def accuracy_function(self) -> str:
        """The name of the function that decides whether a sample is correct."""
        return self.accuracy or self.composition[0].label

    def check(self) -> None:
        labels = [function.label for function in self.composition]
        for label in labels:
            if labels.count(label) > 1:
                raise UserError(f"two reward functions are named '{label}'; give each a 'name' of its own")
        if self.accuracy_function not in labels:
            raise UserError(f"'rewards.accuracy' is '{self.accuracy}', which is not one of the reward functions: {', '.join(labels)}")
        check_at_least_one("rewards", self, "workers")
        check_seconds("rewards", self, "deadline_s", "sample_deadline_s", "start_deadline_s")
        if self.sample_deadline_s > self.deadline_s:
            raise UserError(f"'rewards.sample_deadline_s' is {self.sample_deadline_s}, more than rewards.deadline_s ({self.deadline_s})")
        for function in self.composition:
            if function.needs and function.label == self.accuracy_function:
                raise UserError(
                    f"'rewards.accuracy' is '{function.label}', which needs the output of a model and is not called in evaluations; name another function"
                )
            if function.length is not None and function.length.rule == "kimi" and self.accuracy_function == function.label:
                raise UserError(f"'rewards.accuracy' is '{function.label}', whose rule kimi reads what is correct; name the function that says so")
            if function.function == "code_executor" and function.code.wall_s > self.sample_deadline_s:
                raise UserError(
                    f"'code.wall_s' of reward function '{function.label}' is {function.code.wall_s:g}, more than rewards.sample_deadline_s "
                    f"({self.sample_deadline_s:g})"
                )
        if not 0 <= self.max_fault_share <= 1:
            raise UserError(f"'rewards.max_fault_share' is {self.max_fault_share}; it must be from 0 to 1")
        check_float32("rewards", self, "model_fault_value", "accuracy_threshold")
