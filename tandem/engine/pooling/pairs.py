"""Pairs of texts: which belong together, what a model that scores pairs reads of one, and how similar two vectors are. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem.model.huggingface.pooling_config import ModelPooling
from tandem.text.chat import ChatTemplate
from tandem.types import UserError

T = TypeVar("T")

QWEN3_RERANKER = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction or "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ messages[0].content }}
<Document>: {{ messages[1].content }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
"""The prompt that Qwen3-Reranker was trained with, as its model card writes it."""
RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "self")


def paired(first: Sequence[T], second: Sequence[T], names: tuple[str, str]) -> list[tuple[T, T]]:
    """Returns the pairs of two lists: one with one, or the only one of the first with each of the second. Raises ``UserError`` for lists of other lengths;
    ``names`` are theirs."""
    if not first or not second:
        raise UserError(f"'{names[0] if not first else names[1]}' is empty; give at least one text")
    if len(first) not in (1, len(second)):
        raise UserError(f"'{names[0]}' has {len(first)} texts and '{names[1]}' {len(second)}; give one, or as many")
    return list(zip(list(first) * (len(second) if len(first) == 1 else 1), second, strict=True))


def check_one_label(pooling: ModelPooling) -> None:
    """Raises ``UserError`` for a model with several labels, which has no one score of a pair."""
    if len(pooling.labels) > 1:
        raise UserError(f"a score of a pair is one number and the model has {len(pooling.labels)} labels; ask for its classes instead")


def pair_template(pooling: ModelPooling, folder: Path, given: str | None = None) -> ChatTemplate | None:
    """Returns the template of pairs: the one that is ``given``, that of the tokenizer in ``folder`` if it is for pairs, or that of Qwen3-Reranker; ``None``:
    the two texts follow each other. Raises ``UserError`` for a template that is broken."""
    if given is None and not (pooling.has_template or pooling.is_qwen3_reranker):
        return None
    return ChatTemplate.from_folder(folder, source=given if given is not None else None if pooling.has_template else QWEN3_RERANKER)


def pair_text(query: str, document: str, template: ChatTemplate | None, variables: Mapping[str, Any] | None = None) -> str:
    """Returns what the model reads of a pair. The text of a template has its special tokens; other text gets the tokenizer's. Raises ``UserError`` where
    the template refuses."""
    if template is None:
        if variables:
            raise UserError(f"'{next(iter(variables))}' is a variable of a chat template and the pairs have none; start with chat_template")
        return query + document
    for name in variables or {}:
        if name in RESERVED:
            raise UserError(f"'chat_template_kwargs' has {name!r}, which the pair itself gives; leave it out")
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return template.render(messages, add_generation_prompt=True, **{"instruction": None, **(variables or {})})


def cosine_similarity(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the cosine of the angle between two vectors; 0 for a vector of zeros."""
    norms = math.sqrt(math.fsum(x * x for x in first)) * math.sqrt(math.fsum(x * x for x in second))
    return math.fsum(x * y for x, y in zip(first, second, strict=True)) / norms if norms else 0.0
