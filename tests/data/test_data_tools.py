"""Tools: their schemas beside those of transformers, their arguments, and the calculator beside Python's own arithmetic."""

import random
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from tandem.config.load import build
from tandem.config.model import NewModelConfig
from tandem.config.recipe import Recipe
from tandem.config.task import TaskConfig
from tandem.data.task_prompts import task_prompts
from tandem.data.tools.calculator import calculator
from tandem.data.tools.load import load_tools
from tandem.data.tools.schema import check_arguments, tool_schema
from tandem.model.new_model import write_tokenizer
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls import parse_tool_calls
from tandem.types import UserError


def search(query: str, limit: int = 3, sites: list[str] | None = None, where: Literal["web", "news"] = "web", exact: bool = False) -> str:
    """Searches the web
    for pages.

    Args:
        query: What to look for, in the words
            of a search engine.
        limit: The number of results.
        sites: Where to look; everywhere by default.
        where: The kind of page.
        exact: Whether the words stand together.

    Returns:
        The pages.
    """
    return query


def measure(values: list[float], options: dict[str, int], unit: int | str, other: Any = None) -> float:
    """Measures.

    Args:
        values: Numbers.
        options: By name.
        unit: Its unit.
        other: Anything.
    """
    return 0.0


@pytest.mark.parametrize("function", [search, measure, calculator])
def test_the_schema_of_a_function_is_that_of_transformers(function):
    ours, theirs = tool_schema(function, "here"), get_json_schema(function)
    theirs["function"].pop("return", None)
    assert ours == theirs


def test_a_function_that_a_model_cannot_call_is_one_clear_line():
    def without_types(x):
        """Does.

        Args:
            x: It.
        """

    def without_description(x: int) -> int:
        """Does."""
        return x

    def without_docstring(x: int) -> int:
        return x

    def positional(x: int, /) -> int:
        """Does."""
        return x

    def of_a_set(x: set[int]) -> int:
        """Does.

        Args:
            x: It.
        """
        return 0

    problems = {without_types: "has no type", without_description: "is not described", without_docstring: "has no docstring", positional: "named arguments",
                of_a_set: "use str, int"}  # fmt: skip
    for function, problem in problems.items():
        with pytest.raises(UserError, match=problem):
            tool_schema(function, "mine.py:f")


def test_wrong_arguments_are_told_to_the_model():
    schema = tool_schema(search, "here")
    assert check_arguments(schema, {"query": "a", "limit": 2, "sites": ["x"], "where": "news", "exact": True}) == ""
    assert check_arguments(schema, {"query": "a", "sites": None}) == ""
    assert check_arguments(schema, {}) == "search needs the argument 'query'"
    assert check_arguments(schema, {"query": "a", "size": 1}) == "search has no argument 'size'; it has query, limit, sites, where, exact"
    assert check_arguments(schema, {"query": 3}) == "the argument 'query' of search must be of type string"
    assert check_arguments(schema, {"query": "a", "limit": True}) == "the argument 'limit' of search must be of type integer"
    assert check_arguments(schema, {"query": "a", "limit": 1.5}) == "the argument 'limit' of search must be of type integer"
    assert check_arguments(schema, {"query": "a", "where": "mars"}) == "the argument 'where' of search must be one of 'web', 'news'"
    assert "must be of type array" in check_arguments(schema, {"query": "a", "sites": [1]})


def test_the_calculator_computes_what_python_computes():
    draw = random.Random(0)
    for _ in range(300):
        numbers = [draw.choice((str(draw.randint(0, 10**12)), f"{draw.uniform(0, 9):.3f}", str(draw.randint(1, 9)))) for _ in range(4)]
        operators = [draw.choice("+-*/%") for _ in range(3)]
        text = f"({numbers[0]} {operators[0]} {numbers[1]}) {operators[1]} -{numbers[2]} {operators[2]} {numbers[3]}"
        try:
            expected = eval(text)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                calculator(text)
            continue
        assert float(calculator(text)) == float(expected), text
    assert calculator("6 / 2") == "3" and calculator("7 / 2") == "3.5" and calculator("2 ** 10 // 3") == "341"
    assert calculator("123456789012345678 + 1") == "123456789012345679"


@pytest.mark.parametrize(
    "text", ["", "1 +", "__import__('os')", "(1).real", "[1]", "'a' * 3", "x + 1", "1 if 1 else 2", "9 ** 9 ** 9", "1j", "True + 1", "(" * 300]
)
def test_the_calculator_computes_nothing_but_arithmetic_in_bounded_time(text):
    with pytest.raises((ValueError, SyntaxError)):
        calculator(text)


def test_tools_are_loaded_by_path_and_name(tmp_path):
    (tmp_path / "mine.py").write_text('def shout(text: str) -> str:\n    """Shouts.\n\n    Args:\n        text: What.\n    """\n    return text.upper()\n')
    tools = load_tools(["calculator", f"{tmp_path}/mine.py:shout"])
    assert list(tools) == ["calculator", "shout"] and tools["shout"].file == f"{tmp_path}/mine.py" and tools["shout"].function("a") == "A"
    for paths, problem in (([f"{tmp_path}/mine.py:whisper"], "has no 'whisper'; it has shout"), (["calculator"] * 2, "two tools are named 'calculator'")):
        with pytest.raises(UserError, match=problem):
            load_tools(paths)


def test_demonstrations_show_the_call_and_learn_everything_but_its_result(tmp_path):
    write_tokenizer(NewModelConfig(chat=True), tmp_path)
    task, tokenizer = TaskConfig("addition", 1, 2, chat=True, tools=("calculator",)), Tokenizer.from_folder(tmp_path)
    prompts = task_prompts(task, tmp_path, seed=0, context_tokens=128)
    kinds = set()
    for index in range(20):
        shown = prompts.demonstration(index, 0, 0.5, 2)
        question = tokenizer.decode(shown.prompt_token_ids, skip_special_tokens=False)
        a, b = map(int, question.removeprefix("<system>calculator(expression)<end><user>").removesuffix("=<end><assistant>").split("+"))
        whole = tokenizer.decode(shown.completion_token_ids, skip_special_tokens=False)
        learned = [token for token, is_learned in zip(shown.completion_token_ids, shown.learned, strict=True) if is_learned]
        written = tokenizer.decode(learned, skip_special_tokens=False)
        if shown.correct:
            assert whole == f'[calculator(expression="{a}+{b}")]<end><tool>{a + b}<end><assistant>{a + b}<end>'
            assert written == f'[calculator(expression="{a}+{b}")]<end>{a + b}<end>'
            assert parse_tool_calls("pythonic", whole.partition("<end>")[0])[0].arguments == {"expression": f"{a}+{b}"}
        else:
            assert whole == written and int(whole.removesuffix("<end>")) != a + b
        kinds.add(shown.correct)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"rollout": {"multi_turn": {}}}, "'rollout.multi_turn' is given and 'task.tools' is not"),
        ({"task": {"name": "sort", "chat": True, "tools": ["calculator"]}}, "'task.tools' is given and 'rollout.multi_turn' is not"),
        ({"task": {"name": "sort", "tools": ["calculator"]}}, "set task.chat to true"),
        ({"task": {"name": "sort", "chat": True, "tools": ["abacus"]}}, "contains 'abacus', which is neither calculator nor"),
        ({"rollout": {"multi_turn": {"max_turns": 0}}}, "'rollout.multi_turn.max_turns' is 0"),
        ({"rollout": {"multi_turn": {"tool_timeout_s": 0}}}, "'rollout.multi_turn.tool_timeout_s' is 0"),
        ({"rollout": {"multi_turn": {"tool_call_parser": "xml"}}}, "must be one of hermes, llama3_json, mistral, pythonic"),
    ],
)
def test_a_recipe_whose_tools_cannot_work_is_one_clear_line(sections, problem):
    with pytest.raises(UserError, match=problem) as error:
        build(Recipe, {"model": {"path": "m"}, "task": {"name": "sort"}, **sections})
    assert "\n" not in str(error.value)
