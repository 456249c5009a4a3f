"""The methods of ``LLM`` for models that embed or score texts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.engine.engine import GENERATES, Engine
from tandem.engine.llm_inputs import PromptInput, check_count
from tandem.engine.lora.request import LoRARequest
from tandem.engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tandem.engine.pooling.pairs import check_one_label, cosine_similarity, pair_template, pair_text, paired
from tandem.engine.pooling.params import PoolingParams, PoolingTask
from tandem.engine.processing.outputs import RequestOutput
from tandem.model.huggingface.pooling_config import ModelPooling
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, UserError

Pooled = PoolingRequestOutput[PoolingOutput]
GivenParams = PoolingParams | Sequence[PoolingParams] | None
Run = Callable[[Sequence[PromptInput], list[PoolingParams]], list[RequestOutput]]
"""Computes prompts with their parameters, in order."""


def params_for(given: GivenParams, count: int, task: PoolingTask | None) -> list[PoolingParams]:
    """Returns the parameters of each prompt, all of which do ``task``. Raises ``UserError`` for parameters of another task."""
    listed = [given or PoolingParams()] * count if given is None or isinstance(given, PoolingParams) else list(given)
    check_count("pooling_params", listed, count, "give one, or one for each")
    for params in listed:
        if task is not None and params.task not in (None, task):
            raise UserError(f"pooling_params task is '{params.task}' and the call does '{task}'; leave it out")
    return [params if task is None else replace(params, task=task) for params in listed]


def encoded(run: Run, prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[Pooled]:
    """Returns the vectors or scores of ``prompts`` as tensors."""
    return [pooled_output(output) for output in run(prompts, params)]


def embedded(run: Run, prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[EmbeddingRequestOutput]:
    """Returns the vectors of ``prompts``."""
    return [as_embedding(output) for output in encoded(run, prompts, params)]


def classified(run: Run, prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[ClassificationRequestOutput]:
    """Returns the scores of ``prompts``."""
    return [as_classification(output) for output in encoded(run, prompts, params)]


def scored(
    run: Run, engine: Engine, folder: Path, first: Sequence[str], second: Sequence[str], params: PoolingParams | None, template: str | None
) -> list[ScoringRequestOutput]:
    """Returns the score of each pair: of the model that reads both texts, or the cosine similarity of their vectors. ``folder``: of the tokenizer."""
    if engine.pooler is None:
        raise UserError(GENERATES)
    pairs = paired(first, second, ("data_1", "data_2"))
    if engine.pooler.model_pooling.scored_by is None:
        outputs = encoded(run, [*first, *second], params_for(params, len(first) + len(second), "embed"))
        return [as_similarity(a, b) for a, b in paired(outputs[: len(first)], outputs[len(first) :], ("data_1", "data_2"))]
    if engine.tokenizer is None:
        raise UserError("data_1 is a text and this engine has no tokenizer; give one")
    prompts = prompts_of_pairs(engine.pooler.model_pooling, folder, engine.tokenizer, pairs, template)
    return [as_score(output) for output in encoded(run, prompts, params_for(params, len(prompts), "classify"))]


def prompts_of_pairs(
    pooling: ModelPooling, folder: Path, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], template: str | None
) -> list[dict[str, Any]]:
    """Returns what a model that scores pairs reads of each. Raises ``UserError`` for a model with several labels, and a template that is broken."""
    check_one_label(pooling)
    compiled = pair_template(pooling, folder, template)
    texts = [pair_text(query, document, compiled) for query, document in pairs]
    return [{"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=compiled is None)} for text in texts]


def pooled_output(output: RequestOutput) -> Pooled:
    """Returns the result of a pooling request. Raises ``RunError`` for one that was aborted."""
    return PoolingRequestOutput(output.request_id, PoolingOutput(_tensor(output)), output.prompt_token_ids, output.num_cached_tokens)


def as_embedding(output: Pooled) -> EmbeddingRequestOutput:
    """Returns ``output`` with its numbers as the components of a vector."""
    return _with(output, EmbeddingOutput(output.outputs.data.tolist()))


def as_classification(output: Pooled) -> ClassificationRequestOutput:
    """Returns ``output`` with its numbers as the scores of labels."""
    return _with(output, ClassificationOutput(output.outputs.data.tolist()))


def as_score(output: Pooled) -> ScoringRequestOutput:
    """Returns ``output`` with its number as the score of a pair."""
    return _with(output, ScoringOutput(float(output.outputs.data[0])))


def as_similarity(first: Pooled, second: Pooled) -> ScoringRequestOutput:
    """Returns the cosine similarity of two vectors."""
    return PoolingRequestOutput(
        f"{first.request_id}_{second.request_id}", ScoringOutput(cosine_similarity(first.outputs.data.tolist(), second.outputs.data.tolist())),
        first.prompt_token_ids + second.prompt_token_ids, first.num_cached_tokens + second.num_cached_tokens,
    )  # fmt: skip


def as_list(given: Any) -> list[Any]:
    """Returns one text or prompt as a list, and several as they are."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _tensor(output: RequestOutput) -> torch.Tensor:
    if output.pooled is None:
        raise RunError(f"request {output.request_id} was aborted before it was pooled")
    return torch.frombuffer(bytearray(output.pooled.data), dtype=torch.float32).view(output.pooled.shape)


def _with(output: Pooled, outputs: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens)


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
