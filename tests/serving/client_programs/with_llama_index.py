"""LlamaIndex's model for servers like OpenAI's: chat, streams and tools."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, calls, text = sys.argv[1:]


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def now() -> str:
    """The time."""
    return ""


def model(text):
    return OpenAILike(
        model="tiny", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=300, max_retries=0,
        additional_kwargs={"extra_body": {"structured_outputs": {"choice": [text]}}},
    )


tools = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(now)]
answer = model(calls).chat_with_tools(tools, user_msg="1+2?", allow_parallel_tool_calls=True)
selected = model(calls).get_tool_calls_from_response(answer)
streamed = "".join(chunk.delta or "" for chunk in model(text).stream_chat([ChatMessage(role="user", content="x")]))
whole = model(text).chat([ChatMessage(role="user", content="x")]).message.content
print(json.dumps({"names": [each.tool_name for each in selected], "arguments": [each.tool_kwargs for each in selected], "streamed": streamed, "text": whole}))
