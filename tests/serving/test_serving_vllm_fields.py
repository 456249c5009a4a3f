"""The fields that vLLM adds to OpenAI's requests: the table of docs/serving.md, and a last message that the model continues."""

import re
from pathlib import Path

from server_process import Server

from tandem.serving.protocol import ChatCompletionRequest, CompletionRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_table_of_fields_is_what_requests_have() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition("vLLM's fields beyond OpenAI's:")[2].partition("## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    rows = {row[1]: set(re.findall(r"`(\w+)`", row[0])) for row in cells if len(row) == 2}
    completion, chat = set(CompletionRequest.model_fields), set(ChatCompletionRequest.model_fields)
    assert rows["work"] <= completion & chat and len(rows["work"]) == 16
    assert rows["works in completions"] <= completion - chat and rows["work in chat completions"] <= chat - completion
    assert rows["refused"] <= set(CompletionRequest.not_supported) & set(ChatCompletionRequest.not_supported)
    ignored = next(fields for state, fields in rows.items() if state.startswith("ignored"))
    assert len(ignored) == 2 + 1 and not ignored & (completion | chat | set(ChatCompletionRequest.not_supported))


def test_the_model_continues_the_last_message(shared: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = shared.post("/v1/chat/completions", {**body, "continue_final_message": True, "add_generation_prompt": False})
    assert answer.status_code == 200, answer.text
    rendered = shared.complete("[user] hi\n[assistant] the quick", max_tokens=8, temperature=0, add_special_tokens=False, return_token_ids=True)
    found, wanted = answer.json()["choices"][0], rendered["choices"][0]
    assert (found["prompt_token_ids"], found["token_ids"]) == (wanted["prompt_token_ids"], wanted["token_ids"])
    refusal = shared.post("/v1/chat/completions", {**body, "continue_final_message": True})
    assert refusal.status_code == 400 and "exclude each other" in refusal.json()["error"]["message"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    whole = shared.post("/v1/chat/completions", {**body, "messages": parts, "continue_final_message": True, "add_generation_prompt": False})
    assert whole.json()["choices"][0]["prompt_token_ids"] == shared.post("/tokenize", {"prompt": "[user] the fox"}).json()["tokens"]
