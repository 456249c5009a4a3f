"""An agent with a calculator, written against the ``openai`` SDK: it knows nothing of training. ``tandem train calculator_agent`` trains its model."""

import json

from openai import OpenAI

from tandem.data.tools.calculator import calculator

client = OpenAI()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    }
]


def answer(question: str) -> str | None:
    messages = [{"role": "user", "content": question}]
    for _ in range(3):
        message = client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function)})
    return None


def run(function) -> str:
    if function.name != "calculator":
        return f"error: there is no tool '{function.name}'"
    try:
        return calculator(**json.loads(function.arguments))
    except (TypeError, ValueError, ArithmeticError) as error:
        return f"error: {error}"
