from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from tandem.config.load import apply_overrides, build, read_yaml, to_mapping
from tandem.types import UserError


@dataclass(frozen=True)
class Inner:
    learning_rate: float = 1e-3
    kind: Literal["constant", "cosine"] = "constant"
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    steps: int = 3
    inner: Inner = Inner()
    maybe: Inner | None = None
    open: Mapping[str, Any] = field(default_factory=dict)
    flag: bool = False


def message(section: type, data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        build(section, data)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_mistyped_key_is_refused_and_the_nearest_right_one_is_named() -> None:
    assert "did you mean 'inner.learning_rate'" in message(Outer, {"name": "x", "inner": {"learning_rat": 1}})


def test_an_unknown_key_without_a_near_one_lists_what_is_known() -> None:
    assert "known here: flag" in message(Outer, {"name": "x", "zzzzzz": 1})


def test_a_missing_key_without_default_is_named() -> None:
    assert "'name' is missing" in message(Outer, {})


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"steps": 1.5}, "'steps' is 1.5; it must be a whole number"),
        ({"steps": True}, "'steps' is True"),
        ({"steps": None}, "'steps' is empty"),
        ({"steps": 10**20}, "below 2^63"),
        ({"flag": "yes please"}, "true or false"),
        ({"inner": {"kind": "cosin"}}, "did you mean 'cosine'"),
        ({"inner": {"learning_rate": "fast"}}, "must be a number"),
        ({"inner": {"stop": "x"}}, "must be a list"),
        ({"inner": 3}, "must be a section"),
        ({"inner": {"learning_rate": float("nan")}}, "must be a number"),
        ({"inner": {"learning_rate": "1e400"}}, "must be a number, and finite"),
        ({"inner": {"learning_rate": float("-inf")}}, "must be a number, and finite"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_and_value(data: dict[str, Any], part: str) -> None:
    assert part in message(Outer, {"name": "x", **data})


def test_numbers_that_yaml_1_1_reads_as_text_are_still_numbers() -> None:
    assert build(Outer, {"name": "x", "inner": {"learning_rate": "1e-4"}}).inner.learning_rate == 1e-4


def test_a_built_configuration_survives_the_way_to_plain_data_and_back() -> None:
    built = build(Outer, {"name": "x", "maybe": {"kind": "cosine", "stop": ["a", "b"]}, "open": {"k": [1, 2]}})
    assert build(Outer, to_mapping(built)) == built


def test_overrides_set_nested_keys_without_touching_the_original() -> None:
    data: dict[str, Any] = {"inner": {"kind": "constant"}}
    changed = apply_overrides(data, ["--inner.kind=cosine", "--inner.stop=[a]", "--name=x"])
    assert changed == {"inner": {"kind": "cosine", "stop": ["a"]}, "name": "x"}
    assert data == {"inner": {"kind": "constant"}}


def test_an_override_begins_a_section_that_a_saved_recipe_has_without_a_value() -> None:
    changed = apply_overrides({"name": "x", "maybe": None}, ["--maybe.kind=cosine"])
    assert build(Outer, changed).maybe == Inner(kind="cosine")


@pytest.mark.parametrize("override", ["--inner", "=3", "--name.sub=3"])
def test_a_malformed_override_is_refused(override: str) -> None:
    with pytest.raises(UserError):
        apply_overrides({"name": "x"}, [override])


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Any) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(UserError, match=r"r\.yaml:3: key 'a' is given twice"):
        read_yaml(recipe)


@pytest.mark.parametrize("text", ["a: [1, 2\n", "- 1\n- 2\n", "", "just words\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Any, text: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=r"r\.yaml"):
        read_yaml(recipe)


def test_a_recipe_that_does_not_exist_or_is_not_text_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path / "b.yaml")
