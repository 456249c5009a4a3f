"""The pooler: makes vectors and scores of hidden states."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.pooling.dense import Dense
from tandem.engine.pooling.outputs import PooledData
from tandem.engine.pooling.params import PoolingParams, PoolingTask
from tandem.model.decoder import Decoder
from tandem.model.huggingface.pooling_config import ModelPooling
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError, WeightVersion

LogitsOf = Callable[[int, int], Tensor]
"""Returns the logits of rows ``first`` to ``last - 1`` of a step's hidden states."""
_SMALLEST_NORM = 1e-12


class Pooler:
    """The pooling of one model. ``model_pooling``: what its folder says. Raises ``UserError`` for words that are not one token of its vocabulary."""

    def __init__(self, decoder: Decoder, model_pooling: ModelPooling, tokenizer: Tokenizer | None) -> None:
        self.model_pooling = model_pooling
        self.decoder = decoder
        self._words = _word_ids(model_pooling, tokenizer)
        self.width = decoder.shapes.hidden_size
        """Components of a vector."""
        self._dense: list[Dense] = []
        for module in model_pooling.dense:
            self._dense.append(Dense.load(module, self.width, decoder.embed_tokens.device))
            self.width = module.out_features

    @property
    def task(self) -> PoolingTask:
        """What a request does that names no task."""
        scored_by = self.model_pooling.scored_by
        return "embed" if scored_by is None else "token_classify" if scored_by == "token" else "classify"

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What requests may do."""
        several: dict[str | None, tuple[PoolingTask, ...]] = {
            None: ("embed", "token_embed"), "sequence": ("classify", "token_classify"), "token": ("token_classify",), "words": ("classify",),
        }  # fmt: skip
        return several[self.model_pooling.scored_by]

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """Returns ``params`` with the model's own values for what they leave open. Raises ``UserError`` for what the model cannot do."""
        pooling = self.model_pooling
        task = params.task or self.task
        if task not in self.tasks:
            does = "embeds texts" if pooling.scored_by is None else "scores texts"
            raise UserError(f"pooling task is '{task}' and the model {does}; it can do {', '.join(self.tasks)}")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        return replace(
            params, task=task, use_activation=pooling.use_activation if params.use_activation is None else params.use_activation,
            dimensions=params.dimensions or pooling.dimensions,
        )  # fmt: skip

    def _check_dimensions(self, dimensions: int) -> None:
        pooling, width = self.model_pooling, self.width
        if pooling.scored_by is not None:
            raise UserError(f"pooling dimensions is {dimensions} and the model scores texts; leave it out")
        if not pooling.is_matryoshka and dimensions != width:
            raise UserError(
                f"pooling dimensions is {dimensions}; the model has {width} and was not trained to have fewer (its config.json has no is_matryoshka): leave "
                "it out"
            )
        if pooling.matryoshka_dimensions and dimensions not in pooling.matryoshka_dimensions:
            raise UserError(f"pooling dimensions is {dimensions}; the model has {', '.join(map(str, pooling.matryoshka_dimensions))}")
        if dimensions > width:
            raise UserError(f"pooling dimensions is {dimensions}; the model has {width}")

    def reads_all_states(self, params: PoolingParams) -> bool:
        """Returns whether a request with the resolved ``params`` needs the hidden states of all tokens, so that none may come from the prefix cache."""
        return params.task not in ("embed", "classify") or (params.task == "embed" and self.model_pooling.pooling_type == "MEAN")

    def vectors(self, states: Tensor, params: PoolingParams) -> Tensor:
        """Returns the vectors [N, D] of hidden ``states[N, H]``, in fp32."""
        for layer in self._dense:
            states = layer(self.decoder.kernels, states)
        kept = states if params.dimensions is None else states[:, : params.dimensions]
        vectors = kept.to(torch.promote_types(kept.dtype, torch.float32))
        if params.use_activation:
            # One row at a time, since a reduction over several may sum in another order.
            norms = torch.stack([torch.linalg.vector_norm(row) for row in vectors.unbind(0)])
            vectors = vectors / norms.clamp_min(_SMALLEST_NORM).unsqueeze(1)
        return vectors.float()

    def scores(self, states: Tensor, row: int, logits_of: LogitsOf, params: PoolingParams) -> Tensor:
        """Returns the scores [N, L] of hidden ``states[N, H]``, which begin at ``row`` of the step, in fp32."""
        if self.model_pooling.scored_by == "words":
            logits = logits_of(row, row + len(states))
            no, yes = self._words
            scores = (logits[:, yes] if no is None else logits[:, yes] - logits[:, no]).unsqueeze(1)
        else:
            scores = self.decoder.label_scores(states)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if params.use_activation:
            # A sum over labels is taken one row at a time, as that over components.
            scores = torch.stack([row.softmax(0) for row in scores.unbind(0)]) if self.model_pooling.is_one_of else scores.sigmoid()
        return scores.float()


def _word_ids(pooling: ModelPooling, tokenizer: Tokenizer | None) -> tuple[int | None, int]:
    if pooling.word_ids is not None:
        return pooling.word_ids
    if pooling.words is None:
        return None, 0
    if tokenizer is None:
        raise UserError("classifier_from_token names tokens and this engine has no tokenizer; give one")
    ids = []
    for word in pooling.words:
        found = tokenizer.backend.token_to_id(word)
        if found is None:
            raise UserError(f"classifier_from_token has {word!r}, which is not a token of the model's vocabulary")
        ids.append(found)
    return ids[0], ids[1]


class PooledStates:
    """Collects the hidden states of one request, chunk by chunk. ``result``: the vector [D] or the scores [L], or those of each token [T, D] or [T, L], in
    fp32 in host memory; ``None`` until the last chunk.

    The bits are the same for any chunks, since sums are taken token by token.
    """

    def __init__(self, pooler: Pooler, params: PoolingParams, num_tokens: int) -> None:
        self.result: Tensor | None = None
        self._pooler, self._params, self._num_tokens = pooler, params, num_tokens
        self._is_of_tokens = params.task in ("token_embed", "token_classify")
        self._is_embedding = params.task in ("embed", "token_embed")
        self._parts: list[Tensor] = []
        self._total: Tensor | None = None

    def note(self, hidden: Tensor, row: int, count: int, start: int, logits_of: LogitsOf) -> None:
        """Takes a chunk of the text. A chunk at position 0 begins anew, as after a preemption.

        Args:
            hidden: The hidden states [T, H] of the step.
            row: The row at which the chunk begins.
            count: Tokens of the chunk.
            start: Position of its first token.
            logits_of: Returns the logits of rows of the step.
        """
        states, is_last = hidden[row : row + count], start + count == self._num_tokens
        if start == 0:
            self._parts, self._total = [], None
        if self._is_of_tokens:
            self._parts.append(self._results(states, row, logits_of).cpu())
            self.result = torch.cat(self._parts) if is_last else None
        elif self._is_embedding and self._pooler.model_pooling.pooling_type == "MEAN":
            self._add(states)
            if is_last and self._total is not None:
                self.result = self._results((self._total / self._num_tokens).unsqueeze(0), row, logits_of)[0].cpu()
        elif is_last:
            self.result = self._results(states[-1:], row + count - 1, logits_of)[0].cpu()

    def data(self, version: WeightVersion) -> PooledData | None:
        """Returns the result, which the weights ``version`` have computed; ``None`` if there is none, as of a request that was aborted."""
        if self.result is None:
            return None
        result = self.result.contiguous()
        return PooledData(tuple(result.shape), ctypes.string_at(result.data_ptr(), result.nbytes), version)

    def _add(self, states: Tensor) -> None:
        rows = states.to(torch.promote_types(states.dtype, torch.float32)).unbind(0)
        total = torch.zeros_like(rows[0]) if self._total is None else self._total
        for each in rows:
            total = total + each
        self._total = total

    def _results(self, states: Tensor, row: int, logits_of: LogitsOf) -> Tensor:
        if self._is_embedding:
            return self._pooler.vectors(states, self._params)
        return self._pooler.scores(states, row, logits_of, self._params)
