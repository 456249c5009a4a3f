"""LiteLLM as a library: chat with tools, streams, reasoning, and Anthropic's messages."""

import json
import sys

import litellm

url, calls, text = sys.argv[1:]
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
about = {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "api_key": "none", "messages": [{"role": "user", "content": "1+2?"}], "max_tokens": 300}


def writing(text):
    return {"extra_body": {"structured_outputs": {"choice": [text]}}}


whole = litellm.completion(**about, tools=tools, **writing(calls))
streamed = litellm.stream_chunk_builder(list(litellm.completion(**about, tools=tools, stream=True, **writing(calls))))
thought = litellm.completion(**about, **writing(f"<think>hm</think>{text}"))
answers = [each.choices[0] for each in (whole, streamed)]
print(json.dumps({
    "names": [[call.function.name for call in each.message.tool_calls] for each in answers],
    "arguments": [[json.loads(call.function.arguments) for call in each.message.tool_calls] for each in answers],
    "text": thought.choices[0].message.content, "reasoning": thought.choices[0].message.reasoning_content,
    "reasons": [each.finish_reason for each in answers],
}))  # fmt: skip
