"""Chat templates that compute without end are refused, those that end have the text of jinja2's own sandbox, and tools that a template does not show are
noticed."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.text import bounded_jinja
from tandem.text.chat import ChatTemplate, apply_chat_template
from tandem.types import EndlessTemplate, UserError

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over texts": "{% set x = 'a' * 99999 %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for a in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "filters of filters": "{% for a in range(99999) %}{{ range(9999) | map('string') | map('upper') | list | length }}{% endfor %}",
    "a call block": "{% macro m() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{% call m() %}{% endcall %}"
    "{% endfor %}{% endfor %}",
}  # fmt: skip
TOO_LARGE = {
    "a power of powers": "{{ 9 ** (9 ** 9) }}",
    "a product": "{% set ns = namespace(x=2) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a repeated text": "{{ 'ab' * 10 ** 9 }}",
    "a repeated list": "{{ 10 ** 9 * [1, 2] }}",
    "a text joined to itself": "{% set ns = namespace(x='abcdefgh') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a text added to itself": "{% set ns = namespace(x='abcdefgh') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a block of itself": "{% set ns = namespace(x='abcdefgh') %}{% for a in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    "{% endfor %}",
}  # fmt: skip
ENDS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }}{{ loop.previtem is defined }}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.nextitem is defined }}{% else %}none{% endfor %}",
    "{% for x in nothing %}{{ x }}{% else %}none{% endfor %}{{ nothing ~ 1 ~ [2] ~ none }}",
    "{% for key, value in messages[0].items() %}{{ key ~ '=' ~ value }}{% endfor %}{{ messages[0].content + '!' }}{{ '=' * 7 }}{{ 2 ** 10 }}{{ 3 * 4.5 }}",
    "{{ messages | map(attribute='content') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% for a in [[1, [2]], 3] recursive %}{{ a if a is number else loop(a) }}{% endfor %}{{ 'x' | indent(4, true) }}{{ '%s-%d' | format('a', 3) }}",
]
MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "你好"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """``write(template)`` returns a folder with it."""

    def folder(template: str) -> Path:
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return folder


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_refused_in_one_line_and_the_next_text_has_all_of_the_time(
    name: str, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_jinja, "MOST_SECONDS", 0.2)
    template = ChatTemplate.from_folder(write(ENDLESS[name]))
    for _ in range(2):
        began = time.thread_time()
        with pytest.raises(UserError) as refused:
            template.render(MESSAGES)
        assert str(refused.value).endswith("refuses these messages: it takes more than 0.2 seconds of processor time, as one that loops without end")
        assert 0.2 <= time.thread_time() - began < 5.0 and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_texts_and_numbers_that_grow_without_end_are_refused_before_they_are_made(name: str, write: Callable[[str], Path]) -> None:
    folder = write(TOO_LARGE[name])
    with pytest.raises(UserError, match=r"the chat template of '.*' refuses these messages: .*(makes too large a value|makes a text of more than)"):
        ChatTemplate.from_folder(folder).render(MESSAGES)


@pytest.mark.parametrize("source", ENDS)
def test_a_template_that_ends_has_the_text_of_the_sandbox_of_jinja2(source: str, write: Callable[[str], Path]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert ChatTemplate.from_folder(write(source)).render(MESSAGES) == plain.from_string(source).render(messages=MESSAGES)


SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
IGNORES = "{% for m in messages %}{{ m.content }}{% endfor %}"
REFUSES_NONE = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + IGNORES


OF_SYSTEM = "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + IGNORES
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
OF_MANY = "{% if messages | length > 1 %}{{ tools | tojson }}{% endif %}x"
OF_ONE = "{% if messages | length == 1 %}{{ tools | tojson }}{% endif %}x"
REFUSES_ALL = "{{ raise_exception('these messages are not those of a game') }}"
OF_VARIABLE = "{% if game %}{{ tools | tojson }}{% endif %}" + IGNORES


@pytest.mark.parametrize(
    ("source", "ignores"),
    [
        (SHOWS, False), (IGNORES, True), (REFUSES_NONE, False), (OF_SYSTEM, False), (WITHOUT_SYSTEM + IGNORES, True), (WITHOUT_SYSTEM + SHOWS, False),
        (OF_MANY, False), (OF_ONE, False), (REFUSES_ALL, False),
    ],
)  # fmt: skip
def test_a_template_is_judged_by_its_tools_whatever_was_rendered_before(source: str, ignores: bool, write: Callable[[str], Path]) -> None:
    for before in ([], [MESSAGES[:1]], [MESSAGES], [MESSAGES, MESSAGES[:1]]):
        template = ChatTemplate.from_folder(write(source), with_tools=True)
        for messages in before:
            with contextlib.suppress(UserError):
                template.render(messages, tools=TOOLS)
                template.check_tools(TOOLS)
        assert template.ignores_tools(TOOLS) is ignores
        assert template.ignores_tools(TOOLS) is ignores and not template.ignores_tools([])


def test_other_tools_and_variables_are_judged_for_themselves_and_a_template_without_end_is_not_taken_for_one_that_reads_tools(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate.from_folder(write(OF_VARIABLE), with_tools=True)
    for _ in range(2):
        assert template.ignores_tools(TOOLS) and not template.ignores_tools(TOOLS, game=True)
    of_two = ChatTemplate.from_folder(write("{% if tools and tools | length > 1 %}{{ tools | tojson }}{% endif %}x"), with_tools=True)
    for _ in range(2):
        assert of_two.ignores_tools(TOOLS) and not of_two.ignores_tools(TOOLS * 2)
    monkeypatch.setattr(bounded_jinja, "MOST_SECONDS", 0.2)
    endless = ChatTemplate.from_folder(write("{% if not tools %}" + ENDLESS["loops in loops"] + "{% endif %}x"), with_tools=True)
    with pytest.raises(EndlessTemplate):
        endless.ignores_tools(TOOLS)


def test_a_template_of_its_own_for_tools_is_asked_and_not_the_other(tmp_path: Path) -> None:
    for of_tools, ignores in ((SHOWS, False), (IGNORES, True)):
        named = [{"name": "default", "template": IGNORES + "."}, {"name": "tool_use", "template": of_tools}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        template = ChatTemplate.from_folder(tmp_path, with_tools=True)
        assert template.ignores_tools(TOOLS) is ignores


def test_a_text_in_python_warns_of_tools_that_the_model_does_not_see(write: Callable[[str], Path], recwarn: pytest.WarningsRecorder) -> None:
    apply_chat_template(write(SHOWS), MESSAGES, tools=TOOLS)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"writes the same text with the tool and without, so that the model does not see them"):
        apply_chat_template(write(IGNORES), MESSAGES, tools=TOOLS)
