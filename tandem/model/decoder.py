"""The decoder, shared by trainer and engine. Differences between model families are in its ``ModelShapes``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import KVLayer, PackedWeight, TokenLogprobs
from tandem.kernels.decode_step import DecodeProgram, DecodeRows
from tandem.kernels.dense_layers import DenseProgram
from tandem.kernels.kv_dtype import stored_dtype
from tandem.kernels.mixed import has_independent_rows, head_kernels
from tandem.kernels.quantized import PackedQuantized
from tandem.kernels.trained_layers import TrainedLayer, TrainedNorm, train_layers_of
from tandem.layout.pipeline_stages import Span, whole
from tandem.layout.sharding import vocabulary_part
from tandem.model.attention import AttentionContext, PackedContext, PagedContext, rotations
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder_weights import DecoderWeights
from tandem.model.embedding_scale import embedding_factor
from tandem.model.head_outputs import HeadOutputs
from tandem.model.layer import Layer, Norm, factor_of_norm
from tandem.model.layer_pass import LayerBatch, run_layer
from tandem.model.layer_weights import LayerWeights
from tandem.model.linear import Linear
from tandem.model.lora import LoraBatch
from tandem.model.parallel.context_parallel import SharedContext
from tandem.model.parallel.model_parallel import Collectives, training_collectives
from tandem.model.parallel.vocabulary_parallel import Head, first_rank_logits, shared_logits, shared_logprobs
from tandem.model.quantization.frozen import frozen_linear
from tandem.model.recompute import around_layers
from tandem.model.routing import Replay
from tandem.model.trained_adapter import adapted_linear
from tandem.model.trained_layers import trained_layers
from tandem.model.value_head import label_scores, values_of


class Decoder(DecoderWeights):
    """A decoder-only transformer over a flat batch of T tokens: what is computed with the weights of ``DecoderWeights``.

    ``kv_cache_dtype``: the engine's, whose bits packed sequences must match; their keys and values are rounded to it. ``around_layer``, if
    given, wraps every layer of a packed batch; unless ``recompute`` is ``none`` it must let exceptions pass, because a recomputation ends
    with one.
    """

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionContext, router_logits: list[Tensor] | None = None,
        lora: LoraBatch | None = None, span: Span | None = None, received: Tensor | None = None, aux: AuxHiddenStates | None = None,
    ) -> Tensor:
        """Computes ``tokens[T]`` and ``positions[T]`` int64 -> ``hidden[T, H]`` after the final norm, or ``hidden[W, H]`` of the rows that
        the context requests. With ``parallel`` every rank is given the whole packed batch and returns its own hidden states, as
        ``token_logprobs`` takes them.

        Positions are absolute and must be below ``positions``, which is not checked under a ``PagedContext``. A packed
        decoder, and any decoder under a ``PagedContext``, computes without gradient. ``router_logits``: a list that receives the [T, E] of
        every mixture of experts (for ``moe.load_balancing_loss``). ``lora``: the rows with an adapter; there is no gradient then. ``aux``: receives the
        inputs of the layers that it names.

        ``span``: the pipeline stage to run (``None``: the whole model). A stage after the first takes ``received``, the residual stream
        returned by the previous stage, and uses only the length of ``tokens``; a stage before the last returns the residual stream, [T, H]
        or this rank's part of it.

        Raises ``ValueError`` if a packed sequence is longer than the model's context.
        """
        is_packed_batch = isinstance(attention, PackedContext)
        if isinstance(attention, PackedContext) and attention.max_seqlen > self.positions:
            raise ValueError(f"a sequence of {attention.max_seqlen} tokens is longer than the model's {self.positions} positions")
        if self._packed is None and is_packed_batch and lora is None:
            has_more = router_logits is not None or span is not None or aux is not None
            if isinstance(attention, PackedContext) and attention.beginnings is not None and torch.is_grad_enabled() and not has_more:
                train, layers = train_layers_of(self.kernels), self._trained_layers()
                if train is not None and layers is not None:
                    norm = TrainedNorm(self.norm.weight, self.shapes.rms_norm_eps, self.shapes.centred_norms)
                    return train(self._embed(tokens, self._collectives), positions, attention.beginnings, layers, norm, attention.wanted)
            stage = span or self.spans[0]
            steps = [weights for weights in self._plain_steps() if stage.start <= weights.attention.index < stage.stop]
            return self._run(steps, self.kernels.linear, tokens, positions, attention, router_logits, span=stage, received=received, aux=aux)
        with torch.no_grad():
            if self._packed is None:
                return self._run(self._plain_steps(), self.kernels.linear, tokens, positions, attention, router_logits, lora, span, received, aux)
            has_more = router_logits is not None or lora is not None or span is not None
            if isinstance(attention, PagedContext) and not has_more:
                program = self.dense_program()
                if program is not None and len(tokens) <= program.most_tokens:
                    caches = cast("Sequence[KVLayer]", attention.caches)
                    residual = self._embed(tokens, self._collectives)
                    inputs = None if aux is None else aux.inputs_of(residual)
                    return program.run(residual, positions, caches, attention.batch, attention.wanted, inputs)
            return self._run(self._packed, self.kernels.linear_packed, tokens, positions, attention, router_logits, lora, span, received, aux)

    @property
    def computes_beginnings_once(self) -> bool:
        """Whether training computes what the sequences of a batch begin with in common once, where its context says what that is."""
        return train_layers_of(self.kernels) is not None and self._trained_layers() is not None

    def _trained_layers(self) -> list[TrainedLayer] | None:
        """Returns the layers in the form in which kernels compute equal beginnings once; ``None`` where something else is computed, or between layers."""
        is_whole = self._packed is None and self.group is None and self.parallel is None and self.spans == (whole(self.shapes.num_hidden_layers),)
        is_plain = not self.is_frozen and not self._has_adapter and self.router_balance is None and self.rotary_order is None
        stores_as_computed = stored_dtype(self.kv_cache_dtype, self.dtype) is torch.float32 is self.dtype
        if not (is_whole and is_plain and stores_as_computed and self.around_layer is None and self.recompute == "none"):
            return None
        return trained_layers(self._plain_steps(), self.rotary_tables)

    def dense_program(self) -> DenseProgram | None:
        """Returns the packed layers of a whole model as the kernels' program; ``None`` where they have none for them."""
        if self._packed is None or self.group is not None:
            return None
        return self._packed.program(self.kernels, self.norm.weight, self.shapes.norms_from_one, self.rotary_tables, self.rotary_order)

    def decode_program(self, rows: DecodeRows) -> DecodeProgram | None:
        """Returns the program of a decoding step of an engine's ``rows``; ``None`` where the kernels have none for it."""
        program = self.dense_program()
        if program is None or self._packed is None or not isinstance(self._packed_head, PackedWeight | PackedQuantized):
            return None
        embedding = self.embed_tokens if self._packed_embedding is None else self._packed_embedding
        return self._packed.decode_program(program, embedding, self._packed_head, self.shapes, rows)

    def _run(
        self, layers: list[LayerWeights], linear: Any, tokens: Tensor, positions: Tensor, context: AttentionContext,
        router_logits: list[Tensor] | None, lora: LoraBatch | None = None, span: Span | None = None, received: Tensor | None = None,
        aux: AuxHiddenStates | None = None,
    ) -> Tensor:
        wanted = context.wanted
        if self.is_frozen:
            linear = partial(frozen_linear, self.kernels, linear)
        linear = partial(adapted_linear, linear) if self._has_adapter else linear
        assert wanted is None or lora is None, "rows with an adapter are indices of the whole batch"
        shared: AttentionContext | SharedContext = context
        collectives, expert_ranks = self._collectives, None
        replayed = context.routed_experts if isinstance(context, PackedContext) else None
        if self.parallel is not None and isinstance(context, PackedContext):
            shared, own = self.parallel.share(context, len(tokens))
            tokens, positions, replayed = tokens[own], positions[own], None if replayed is None else replayed[own]
            collectives, expert_ranks = training_collectives(self.parallel, len(tokens)), self.parallel.expert
        kernels, around = self.kernels, None
        if isinstance(context, PackedContext):
            kernels, around = around_layers(self.recompute, self.kernels, self.around_layer)
        balance = self.router_balance if isinstance(context, PackedContext) else None
        rotated = rotations(positions, self.rotary_tables, self.rotary_order)
        batch = LayerBatch(
            kernels, linear, rotated, shared, stored_dtype(self.kv_cache_dtype, self.dtype), collectives, expert_ranks,
            balance, router_logits, lora, layers is self._packed and lora is None and self.group is None,
            None if replayed is None else Replay(replayed, self.replay_count),
        )
        x: Tensor | None = None
        if span is None or span.is_first:
            residual = self._embed(tokens, collectives)
        else:
            assert received is not None
            # Adding -0 changes nothing, and the sum and its gradient are computed as in one process.
            x, residual = received, torch.full_like(received, -0.0)
        for weights in layers:
            if aux is not None:
                aux.receive(weights.attention.index, x, residual)
            rows = wanted if weights is layers[-1] else None
            if around is None:
                x, residual = run_layer(batch, weights, x, residual, rows)
            else:
                x, residual = around(weights.attention.index, partial(run_layer, batch, weights, rows=rows), x, residual)
        assert x is not None
        if span is not None and not span.is_last:
            return x + residual
        norm = factor_of_norm(self.norm.weight, self.shapes.norms_from_one)
        return self.kernels.add_rms_norm(x, residual, norm, self.shapes.rms_norm_eps, self.shapes.centred_norms)[0]

    def _embed(self, tokens: Tensor, collectives: Collectives) -> Tensor:
        return self._of_all_parts(tokens, collectives, self._rows)

    def whole_embedded(self, tokens: Tensor) -> Tensor:
        """Returns the rows of the whole embedding for ``tokens[T]``, as ``embedded``: [T, H], or this rank's part of them as of the residual stream."""
        return self._of_all_parts(tokens, training_collectives(self.parallel, len(tokens)), self.embedded)

    def _of_all_parts(self, tokens: Tensor, collectives: Collectives, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what ``rows_of`` gives for ``tokens`` by the parts of the embedding on all ranks together."""
        if self.shard_spec.size == 1:
            return rows_of(tokens)
        own = tokens - self.shard_spec.rank * vocabulary_part(self.shapes, self.shard_spec)
        held = (own >= 0) & (own < self.local.vocab_size)
        rows = rows_of(own.clamp(0, self.local.vocab_size - 1))
        # Adding -0 changes nothing, not even the sign of zeros.
        return collectives.embedded(rows.masked_fill(~held.unsqueeze(1), -0.0))

    def _rows(self, tokens: Tensor) -> Tensor:
        """Returns the rows of this rank's part of the embedding, as the first layer reads them."""
        factor = embedding_factor(self.shapes, self.dtype)
        rows = self.embedded(tokens)
        return rows if factor == 1.0 else rows * factor

    def embedded(self, tokens: Tensor) -> Tensor:
        """Returns the rows of the embedding, or of this rank's part of it, for ``tokens[T]``, without the factor that the first layer reads them with."""
        if self._packed_embedding is not None:
            return self.kernels.packed_rows(tokens, self._packed_embedding)
        return F.embedding(tokens, self.embed_tokens)

    def _to_head(self, hidden: Tensor) -> Tensor:
        """Returns what the language-model head reads of ``hidden[R, H]``: divided as the logits are."""
        scaling = self.shapes.multipliers.logits_scaling
        return hidden if scaling == 1.0 else hidden * (1.0 / scaling)

    def head_outputs(self, hidden: Tensor, rows: Tensor, targets: Tensor, temperature: float, tokens: int) -> HeadOutputs:
        """Returns ``token_logprobs`` and ``values`` of the tokens ``rows[R]``, by the heads that this model has."""
        logprobs = self.token_logprobs(hidden, rows, targets, temperature, tokens) if self.shapes.language_head else None
        return HeadOutputs(logprobs, None if self.score is None else self.values(hidden, rows, tokens))

    def outputs(self, tokens: Tensor, positions: Tensor, context: PackedContext, rows: Tensor, targets: Tensor, temperature: float) -> HeadOutputs:
        """Returns the ``head_outputs`` of a packed batch."""
        context, rows = self.wanting(context, rows, len(tokens))
        return self.head_outputs(self(tokens, positions, context), rows, targets, temperature, len(tokens))

    def wanting(self, context: PackedContext, rows: Tensor, tokens: int) -> tuple[PackedContext, Tensor]:
        """Returns the context of a packed batch of which the tokens ``rows[R]`` are wanted, so that the last layer computes nothing behind its attention for
        the other ones, and the places of ``rows`` among the hidden states: the same as given where that would change a bit of a result (except in float64,
        whose products depend on the number of rows)."""
        # A mixture of experts is told which tokens it sees; tensor- and context-parallel ranks exchange all rows.
        sees_all = self.shapes.experts_of(self.shapes.num_hidden_layers - 1) is not None or not has_independent_rows(self.kernels)
        if sees_all or (self.parallel is not None and not self.parallel.has_all_rows):
            return context, rows
        wanted, places = rows.unique(return_inverse=True)
        return (context, rows) if len(wanted) == tokens else (replace(context, wanted=wanted), places)

    def values(self, hidden: Tensor, rows: Tensor, tokens: int) -> Tensor:
        """Returns the value head's numbers [R] of the tokens ``rows[R]`` of a packed batch of ``tokens`` tokens; ``hidden`` is the output of
        ``forward``. With ``parallel`` every rank returns all of them."""
        assert self.score is not None and self.score.weight is not None, "the model has no value head"
        return values_of(self.kernels, self.parallel, hidden, self.score.weight, self.score.bias, rows, tokens)

    def label_scores(self, hidden: Tensor) -> Tensor:
        """Returns the value head's numbers [R, L] of ``hidden[R, H]``, one for each label, where the model has no parallel ranks of a trainer."""
        assert self.score is not None and self.score.weight is not None, "the model has no value head"
        return label_scores(self.kernels, hidden, self.score.weight, self.score.bias)

    def token_logprobs(self, hidden: Tensor, rows: Tensor, targets: Tensor, temperature: float, tokens: int) -> TokenLogprobs:
        """Returns the log-probabilities of ``targets[R]`` after the tokens ``rows[R]`` (ascending) of a packed batch of ``tokens`` tokens;
        ``hidden`` is the output of ``forward``. With ``parallel`` every rank returns all of them."""
        if self.parallel is None:
            return self.kernels.token_logprobs(self._to_head(hidden.index_select(0, rows)), self.head_weight, targets, temperature, self.shapes.logit_cap)
        return shared_logprobs(self.kernels, self.parallel, self._to_head(hidden), self._head_part, rows, targets, temperature, tokens)

    def packed_logits(self, hidden: Tensor, tokens: int) -> Tensor:
        """Returns the logits [tokens, V] of a packed batch, whole on every rank; ``hidden`` is the output of ``forward``."""
        if self.parallel is None:
            return self.logits(hidden)
        return shared_logits(self.kernels, self.parallel, self._to_head(hidden), self._head_part, tokens)

    def first_rank_logits(self, hidden: Tensor) -> Tensor | None:
        """Returns the logits [R, V] of ``hidden[R, H]`` of a packed batch, which every tensor-parallel rank has whole, on the first of them (``None``: on the
        others)."""
        return self.logits(hidden) if self.parallel is None else first_rank_logits(self.kernels, self.parallel, self._to_head(hidden), self._head_part)

    @property
    def _head_part(self) -> Head:
        part = vocabulary_part(self.shapes, self.shard_spec)
        return Head(self.head_weight, self.shard_spec.rank * part, part, self.shapes.vocab_size, self.shapes.logit_cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes ``hidden[R, H]`` -> [R, V]; ranks other than the first return only their own columns."""
        hidden = self._to_head(hidden)
        if self._packed_head is not None:
            own = head_kernels(self.kernels).linear_packed(hidden, self._packed_head, None)
        else:
            own = head_kernels(self.kernels).linear(hidden, self.head_weight, None)
        if self.shapes.logit_cap is not None:
            own = self.kernels.soft_cap(own, self.shapes.logit_cap)
        if self.group is None:
            return own
        return self.group.first_rank_columns(own, vocabulary_part(self.shapes, self.shard_spec), self.shapes.vocab_size)


__all__ = ["AttentionContext", "Decoder", "Layer", "Linear", "Norm", "PackedContext", "PagedContext"]
