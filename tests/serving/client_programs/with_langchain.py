"""LangChain's chat model of OpenAI: tools, streams, structured output."""

import json
import sys
from typing import Annotated

from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, calls, text = sys.argv[1:]


class Sum(BaseModel):
    """The sum of two digits."""

    a: Annotated[int, Field(ge=0, le=9)]
    b: Annotated[int, Field(ge=0, le=9)]


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def model(**fields):
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_retries=0, max_tokens=300, extra_body=fields)


writing = {"structured_outputs": {"choice": [calls]}}
whole = model(**writing).bind_tools([add]).invoke("1+2?")
streamed = AIMessageChunk(content="")
for chunk in model(**writing).bind_tools([add]).stream("1+2?"):
    streamed += chunk
plain = model(structured_outputs={"choice": [text]}).invoke("x")
found = model(seed=1).with_structured_output(Sum, method="json_schema").invoke("1+2?")
forced = model(seed=1).bind_tools([Sum], tool_choice="Sum").invoke("1+2?")
names = [[call["name"] for call in each.tool_calls] for each in (whole, streamed)]
arguments = [[call["args"] for call in each.tool_calls] for each in (whole, streamed)]
print(json.dumps({
    "names": names, "arguments": arguments, "text": plain.content, "structured": found.model_dump(), "forced": [call["name"] for call in forced.tool_calls],
    "tokens": whole.usage_metadata["output_tokens"] > 0,
}))  # fmt: skip
