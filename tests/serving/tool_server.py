"""A server whose model may call tools and think, and the tools of its tests."""

from typing import Any

TEMPLATE = (
    "{{ opening }}{% if tools %}[tools]{% for t in tools %}{{ t.function.name }}:{{ t.function.parameters | tojson }};{% endfor %}\n{% endif %}"
    "{%- for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}"
    "{%- if add_generation_prompt %}[assistant] {% if thinks %}<think>\n{% endif %}{% endif %}"
)
FLAGS = (
    "--default-chat-template-kwargs", '{"opening": "(o)"}', "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--reasoning-parser", "qwen3", "--served-model-name", "tiny", "--chat-template", TEMPLATE
)  # fmt: skip
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"], "additionalProperties": False}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


API_KEY = "secret"


def writing(text: str) -> dict[str, Any]:
    """Returns the field that makes the model write ``text``."""
    return {"structured_outputs": {"choice": [text]}}
