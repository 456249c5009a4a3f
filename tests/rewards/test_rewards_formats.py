"""JSON schemas, scripts and lengths."""

from typing import Any

import pytest

from tandem.config.length_reward import LengthRewardConfig
from tandem.config.load import build
from tandem.config.rewards import FormatCheckerConfig, RewardFunctionConfig, RewardsConfig
from tandem.rl.rewards.format_checker import format_checker, last_json, share_of_scripts
from tandem.rl.rewards.judgement import Item, JudgeCall, TrainerState
from tandem.rl.rewards.length_reward import length_judge
from tandem.rl.rewards.pool import RewardPool
from tandem.types import FinishReason, Prompt, Sample, ScoreState, UserError, WeightVersion

PERSON = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
}  # fmt: skip


def formed(text: str, **settings: Any) -> float | None:
    return format_checker(FormatCheckerConfig(**settings))(Item("s", "p", text, (), None, "t", {})).value


@pytest.mark.parametrize(
    ("text", "match", "value"),
    [
        ('{"name": "Ada", "age": 36}', "full", 1.0), (' {"age": 0,\n"name": "x"}\n', "full", 1.0), ('{"name": "Ada", "age": 36.5}', "full", 0.0),
        ('{"name": "", "age": 3}', "full", 0.0), ('{"name": "Ada", "age": -1}', "full", 0.0), ('{"name": "Ada", "age": 3, "x": 1}', "full", 0.0),
        ('{"name": "Ada"}', "full", 0.0), ('{"name": "Ada", "age": NaN}', "full", 0.0), ("{'name': 'Ada', 'age': 3}", "full", 0.0), ("", "full", 0.0),
        ('Here: {"name": "Ada", "age": 36}', "full", 0.0), ('Here: {"name": "Ada", "age": 36}. Good?', "contains", 1.0),
        ('{"name": "Ada", "age": 1} or rather {"name": 1}', "contains", 0.0), ("{ [ {", "contains", 0.0), ("[" * 100_000, "contains", 0.0),
        ("[" * 100_000, "full", 0.0),
    ],
)  # fmt: skip
def test_a_completion_fits_a_json_schema_as_jsonschema_rs_says(text: str, match: str, value: float) -> None:
    """``jsonschema_rs`` is another implementation; it judges every whole text that is JSON."""
    assert formed(text, json_schema=PERSON, match=match) == value
    rust = pytest.importorskip("jsonschema_rs")
    found, parsed = last_json(text)
    if found:
        assert rust.is_valid(PERSON, parsed) == (formed(text, json_schema=PERSON, match="contains") == 1.0)


def test_a_schema_that_is_not_one_is_refused_with_one_line() -> None:
    with pytest.raises(UserError, match="is not a valid JSON schema: "):
        format_checker(FormatCheckerConfig(json_schema={"type": "objekt"}))


@pytest.mark.parametrize(
    ("text", "scripts", "share"),
    [
        ("Hello, wörld! 123", ("latin",), 1.0), ("Hello 世界", ("latin",), 5 / 7), ("Hello 世界", ("han", "latin"), 1.0), ("你好，世界。", ("han",), 1.0),
        ("Привет", ("latin",), 0.0), ("かなカナ漢字", ("hiragana", "katakana", "han"), 1.0), ("ＡＢｶﾅ", ("latin",), 0.5), ("12 + 3 = 15", ("han",), 1.0),
    ],
)  # fmt: skip
def test_the_share_of_letters_of_scripts(text: str, scripts: tuple[str, ...], share: float) -> None:
    assert share_of_scripts(text, scripts) == formed(text, scripts=scripts) == share


def lengths(rule: dict[str, Any], items: list[tuple[int, bool | None]], step: int = 0) -> list[float | None]:
    config = LengthRewardConfig(**rule)
    config.check()
    judge = length_judge(RewardFunctionConfig("length", length=config))
    made = [Item(f"0/p{i // 4}/{i % 4}", "?", "", (), None, "t", {}, group=f"p{i // 4}", length=n, correct=right) for i, (n, right) in enumerate(items)]
    return [judgement.value for judgement in judge.judge(made, JudgeCall(TrainerState(step)))]  # type: ignore[union-attr]


def test_kimis_length_reward_is_that_of_its_paper() -> None:
    """0.5 - (len - min) / (max - min) for a right answer, at most 0 for a wrong one (Kimi k1.5, section 2.3.3)."""
    group: list[tuple[int, bool | None]] = [(100, True), (300, True), (200, False), (120, False)]
    assert lengths({"rule": "kimi"}, group) == pytest.approx([0.5, -0.5, 0.0, 0.0])
    assert lengths({"rule": "kimi"}, [(100, False), (300, False), (200, True), (250, False)]) == pytest.approx([0.0, -0.5, 0.0, -0.25])
    assert lengths({"rule": "kimi"}, [(7, True), (7, False), (7, True), (7, True), *group]) == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.5, -0.5, 0.0, 0.0])
    assert lengths({"rule": "kimi"}, [(1, True), (3, None)]) == [0.5, None]
    assert lengths({"rule": "kimi", "start_step": 3}, group, step=2) == [0.0] * 4 and lengths({"rule": "kimi", "start_step": 3}, group, step=3)[0] == 0.5


def test_dapos_overlong_penalty_is_that_of_its_paper() -> None:
    rule = {"rule": "soft_overlong", "max_tokens": 20480, "buffer_tokens": 4096}
    values = lengths(rule, [(16384, True), (16385, True), (18432, False), (20480, True), (30000, True)])
    assert values == pytest.approx([0.0, -1 / 4096, -0.5, -1.0, -1.0])


def test_the_distance_from_a_target_is_a_share_of_it() -> None:
    assert lengths({"rule": "target", "target_tokens": 100}, [(100, True), (50, True), (130, None), (300, True)]) == pytest.approx([0.0, -0.5, -0.3, -1.0])


def test_kimis_rule_reads_what_the_accuracy_function_says_and_leaves_out_samples_with_a_fault() -> None:
    section = {
        "accuracy": "answer", "model_fault_value": 0,
        "functions": [{"function": "length", "weight": 0.5, "length": {"rule": "kimi"}}, {"function": "answer_matcher", "name": "answer"}],
    }
    at = WeightVersion(0, 0)
    texts = ["7", "7 7 7", "8 8"]
    tokens = [(1,) * 10, (1,) * 30, (1,) * 20]
    samples = [
        Sample(f"0/p{p}/{i}", f"p{p}", i, (1,), ids, (0.0,) * len(ids), (0.0,) * len(ids), (at,) * len(ids), FinishReason.STOP, text)
        for p in range(2) for i, (ids, text) in enumerate(zip(tokens, texts, strict=True))
    ]  # fmt: skip
    prompts = [Prompt("p0", "?", (1,), "7", "dataset"), Prompt("p1", "?", (1,), ["8 8", "7"], "dataset")]
    with RewardPool(build(RewardsConfig, section)) as pool:
        scores = pool.score(samples, prompts)
    assert [score.components["length"] for score in scores] == pytest.approx([0.5, -0.5, 0.0, 0.5, -0.5, 0.0])
    assert [score.value for score in scores] == pytest.approx([1.25, -0.25, 0.0, 1.25, -0.25, 1.0])
    with RewardPool(build(RewardsConfig, section)) as pool:
        broken = pool.score(samples[:3], [Prompt("p0", "?", (1,), {"no": "text"}, "dataset")])
    assert [score.state for score in broken] == [ScoreState.INFRASTRUCTURE_FAULT] * 3


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ({"function": "format_checker", "format": {"scripts": ["klingon"]}}, "contains 'klingon'; write one of latin, greek"),
        ({"function": "format_checker", "format": {"scripts": ["han"], "tags": ["a"]}}, "it has tags and scripts"),
        ({"function": "format_checker", "format": {}}, "it has none"),
        ({"function": "format_checker", "format": {"scripts": ["han"], "match": "contains"}}, "reads the whole completion; remove it"),
        ({"function": "length"}, "reward function 'length' needs a section 'length'"),
        ({"function": "task", "length": {"rule": "kimi"}}, "has a section 'length', which belongs to length"),
        ({"function": "length", "length": {"rule": "soft_overlong"}}, "'length.max_tokens' of a reward function is 0; the rule soft_overlong needs 1 or more"),
        ({"function": "length", "length": {"rule": "kimi", "target_tokens": 3}}, "and the rule kimi does not read it; remove it"),
        ({"function": "length", "length": {"max_tokens": 3, "buffer_tokens": 5}}, "'length.buffer_tokens' of a reward function is 5, more than length"),
        ({"function": "length", "length": {"rule": "kimi"}}, "'rewards.accuracy' is 'length', whose rule kimi reads what is correct"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(function: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        build(RewardsConfig, {"functions": [function]})
    assert "\n" not in str(refused.value)
