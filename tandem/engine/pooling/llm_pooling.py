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
from tandem.engine.pooling.pairs import cosine_similarity, pair_template, pair_text, paired
from tandem.engine.pooling.params import PoolingParams, PoolingTask
from tandem.engine.processing.outputs import RequestOutput
from tandem.types import RunError, UserError

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


def encoded(run: Run, prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Returns the vectors or scores of ``prompts`` as tensors."""
    return [_with(output, PoolingOutput(_tensor(output))) for output in run(prompts, params)]


def embedded(run: Run, prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[EmbeddingRequestOutput]:
    """Returns the vectors of ``prompts``."""
    return [_with(output, EmbeddingOutput(_tensor(output).tolist())) for output in run(prompts, params)]


def classified(run: Run, prompts: Sequence[PromptInput], params: list[PoolingParams]) -> list[ClassificationRequestOutput]:
    """Returns the scores of ``prompts``."""
    return [_with(output, ClassificationOutput(_tensor(output).tolist())) for output in run(prompts, params)]


def scored(
    run: Run, engine: Engine, folder: Path, first: Sequence[str], second: Sequence[str], params: PoolingParams | None, template: str | None
) -> list[ScoringRequestOutput]:
    """Returns the score of each pair: of the model that reads both texts, or the cosine similarity of their vectors. ``folder``: of the tokenizer."""
    if engine.pooler is None:
        raise UserError(GENERATES)
    pairs = paired(first, second, ("data_1", "data_2"))
    if engine.pooler.model_pooling.scored_by is None:
        outputs = embedded(run, [*first, *second], params_for(params, len(first) + len(second), "embed"))
        queries, documents = outputs[: len(first)], outputs[len(first) :]
        return [
            PoolingRequestOutput(
                f"{a.request_id}_{b.request_id}", ScoringOutput(cosine_similarity(a.outputs.embedding, b.outputs.embedding)),
                a.prompt_token_ids + b.prompt_token_ids, a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in paired(queries, documents, ("data_1", "data_2"))
        ]  # fmt: skip
    if engine.tokenizer is None:
        raise UserError("data_1 is a text and this engine has no tokenizer; give one")
    compiled = pair_template(engine.pooler.model_pooling, folder, template)
    texts = [pair_text(query, document, compiled) for query, document in pairs]
    prompts = [{"prompt": text, "prompt_token_ids": engine.tokenizer.encode(text, add_special_tokens=compiled is None)} for text in texts]
    outputs_of_pairs = run(prompts, params_for(params, len(prompts), "classify"))
    return [_with(output, ScoringOutput(float(_tensor(output)[0]))) for output in outputs_of_pairs]


def as_list(given: Any) -> list[Any]:
    """Returns one text or prompt as a list, and several as they are."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _tensor(output: RequestOutput) -> torch.Tensor:
    if output.pooled is None:
        raise RunError(f"request {output.request_id} was aborted before it was pooled")
    return torch.frombuffer(bytearray(output.pooled.data), dtype=torch.float32).view(output.pooled.shape)


def _with(output: RequestOutput, outputs: Any) -> PoolingRequestOutput[Any]:
    return PoolingRequestOutput(output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens)


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
