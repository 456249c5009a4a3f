"""Chat templates render the text that transformers renders."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tandem.text.chat import apply_chat_template
from tandem.text.continuation import cut_at_mark, mark_end
from tandem.types import UserError

TEMPLATE = """{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
    {{- '</tools>' }}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'nobody' %}{{ raise_exception('unknown role nobody') }}{% endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|' + message.role + '|>\n' + message['content'] | trim + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'. "},
    {"role": "skip", "content": ""},
    {"role": "user", "content": "你好"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a <b> 'é'", "parameters": {"type": "object"}}}]


@pytest.fixture(params=["settings", "file", "named list"])
def folder(request, byte_level, tmp_path):
    shutil.copytree(byte_level, tmp_path / "t")
    path = tmp_path / "t" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if request.param == "file":
        (tmp_path / "t" / "chat_template.jinja").write_text(TEMPLATE)
    elif request.param == "settings":
        settings["chat_template"] = TEMPLATE
    else:
        settings["chat_template"] = [{"name": name, "template": TEMPLATE} for name in ("default", "tool_use")]
    path.write_text(json.dumps(settings))
    return tmp_path / "t"


@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}, {"tools": TOOLS}]
)
def test_text_is_that_of_transformers(options, folder) -> None:
    from transformers import PreTrainedTokenizerFast

    options = {"add_generation_prompt": True, **options}
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = peer.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert apply_chat_template(folder, MESSAGES, **options) == expected


@pytest.mark.parametrize("content", ["The answer is", " spaces around  ", "twice twice", "line\n"])
@pytest.mark.parametrize("trim", [True, False])
def test_a_message_that_is_continued_ends_where_transformers_ends_it(folder, content, trim) -> None:
    from transformers import PreTrainedTokenizerFast

    template = TEMPLATE if trim else TEMPLATE.replace(" | trim", "")
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    peer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = peer.apply_chat_template(messages, tokenize=False, continue_final_message=True, chat_template=template)
    marked = apply_chat_template(folder, mark_end(messages), add_generation_prompt=False, template=template)
    assert cut_at_mark(marked) == expected


def test_what_cannot_be_continued_is_refused(folder) -> None:
    for messages, words in (([], "needs a last message"), ([{"role": "skip", "content": "x"}], "does not show the last message")):
        with pytest.raises(UserError, match=words):
            cut_at_mark(apply_chat_template(folder, mark_end(messages), add_generation_prompt=False))


def test_faults_are_named_in_one_line(folder, byte_level, tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="unknown role nobody"):
        apply_chat_template(folder, [{"role": "nobody", "content": ""}])
    with pytest.raises(UserError, match="no chat template"):
        apply_chat_template(byte_level, MESSAGES)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        apply_chat_template(tmp_path / "nowhere", MESSAGES)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"tandem-rl\[chat\]"):
        apply_chat_template(folder, MESSAGES)


def test_a_template_cannot_reach_outside_its_sandbox(folder) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="refuses"):
        apply_chat_template(folder, MESSAGES)


BROKEN = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000, "break": "{% break %}",
    "not closed": "{% if x", "filter": "{{ messages|none_such }}", "tag": "{% do 1 %}",
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_template_that_python_or_jinja_cannot_compile_is_named_in_one_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(BROKEN[kind])
    with pytest.raises(UserError, match=r"the chat template of '.*' is broken: .+; save the tokenizer again, or correct the template$") as refused:
        apply_chat_template(tmp_path, [{"role": "user", "content": "x"}])
    assert "\n" not in str(refused.value)
