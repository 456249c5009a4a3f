"""Log-probabilities in the forms of OpenAI's two interfaces. All are of temperature 1, nothing filtered."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.processing.outputs import Logprob
from tandem.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent (as in vLLM)."""

Entry = dict[int, Logprob]


@dataclass
class CompletionLogprobs:
    """The ``logprobs`` object of a completion's choice, as its tokens come. ``count``: the number of most likely tokens
    asked for; ``tokenizer``: gives the text of tokens without an entry; ``shows_ids``: tokens are named by their ids; ``offset``: characters of text before
    the next token."""

    count: int
    tokenizer: Tokenizer
    shows_ids: bool = False
    offset: int = 0
    tokens: list[str] = field(default_factory=list)

    def take(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> dict[str, Any]:
        """Returns the object for further tokens. An entry is ``None`` for the first token of a prompt, which nothing predicts."""
        columns: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in zip(token_ids, entries, strict=True):
            text = self._text(token) if entry is None else entry[token].decoded_token or ""
            columns["tokens"].append(_name(token, text, self.shows_ids))
            columns["token_logprobs"].append(None if entry is None else _number(entry[token].logprob))
            columns["top_logprobs"].append(None if entry is None else _top(entry, token, self.count, self.shows_ids))
            columns["text_offset"].append(self.offset)
            self.offset += len(text)
        return columns

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False) if token < self.tokenizer.vocab_size else ""


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], count: int, shows_ids: bool = False) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice. ``shows_ids``: tokens are named by their ids; their ``bytes`` are those of the text."""
    return {
        "content": [
            {
                **_chat_entry(token, entry[token], shows_ids),
                "top_logprobs": [_chat_entry(other, value, shows_ids) for other, value in entry.items() if value.rank <= count],
            }
            for token, entry in zip(token_ids, entries, strict=True)
        ],
        "refusal": None,
    }


def _chat_entry(token: int, value: Logprob, shows_ids: bool) -> dict[str, Any]:
    text = value.decoded_token or ""
    return {"token": _name(token, text, shows_ids), "logprob": _number(value.logprob), "bytes": list(text.encode("utf-8", "surrogatepass"))}


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: for each token of the prompt the entries by token id."""
    return None if entries is None else [None if entry is None else by_token_id(entry) for entry in entries]


def by_token_id(entry: Entry) -> dict[str, Any]:
    return {
        str(token): {"logprob": _number(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token, value in entry.items()
    }


def _top(entry: Entry, drawn: int, count: int, shows_ids: bool) -> dict[str, float]:
    shown = ((token, value) for token, value in entry.items() if token == drawn or value.rank <= count)
    return {_name(token, value.decoded_token or "", shows_ids): _number(value.logprob) for token, value in shown}


def _name(token: int, text: str, shows_ids: bool) -> str:
    """Returns what a token is called: its text, which several can share, or vLLM's name with its id."""
    return f"token_id:{token}" if shows_ids else text


def _number(value: float) -> float:
    return max(value, LOWEST)
