"""Multi-token prediction (DeepSeek-AI, 2024, "DeepSeek-V3", section 2.2): the layer behind a model's last one, which predicts one token further."""

from pathlib import Path

import torch
from torch import Tensor

from tandem.layout.pipeline_stages import Span
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors, read_tensors
from tandem.model.huggingface.multi_token_config import LAYERS_KEY, check_predictor, layer_shapes, predictor_names
from tandem.model.layer import factor_of_norm
from tandem.types import UserError

_WITHIN = Span(1, 2, 3)
"""The stage of a layer that has others before and behind it."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
"""Copies of the model's own embedding and head in the layer's tensors."""


class MultiTokenPredictor:
    """One layer of multi-token prediction, packed. h' = layer(projection [enorm(embedding(t_{i+1})), hnorm(h_i)]) (equations 21 and 22 there, with the
    embedding first, as in the published weights); its norm and the model's head give the logits of t_{i+2} (equation 23).

    ``layer``: a decoder of this one layer, whose final norm is that before the head. ``vocabulary``: the decoder whose embedding and head are used, the model
    itself, so that they stay those of a model that is trained; or, where the model's is divided between ranks, ``layer``, which then has its own.
    """

    state_layers: tuple[int, ...] = ()

    def __init__(self, layer: Decoder, vocabulary: Decoder, embedding_norm: Tensor, state_norm: Tensor, projection: Tensor) -> None:
        self.layer, self.vocabulary, self.kernels = layer, vocabulary, layer.kernels
        self.shapes, self.dtype = layer.shapes, layer.dtype
        self._embedding_norm, self._state_norm, self._final_norm = (
            factor_of_norm(weight, layer.shapes.norms_from_one) for weight in (embedding_norm, state_norm, layer.norm.weight.detach())
        )
        self._projection = self.kernels.pack(projection)

    def use_context(self, tokens: int) -> None:
        """As ``Decoder.use_context``."""
        self.layer.use_context(tokens)

    def combined(self, states: Tensor) -> Tensor:
        """Returns ``states[T, H]``, the model's hidden states after its final norm."""
        return states

    @torch.no_grad()
    def compute(self, tokens: Tensor, states: Tensor, positions: Tensor, context: PagedContext) -> Tensor:
        """Computes h' [T, H] of ``tokens[T]`` and the ``states[T, H]`` before them, without the norm before the head."""
        both = torch.cat((self._normed(self.vocabulary.embedded(tokens), self._embedding_norm), self._normed(states, self._state_norm)), dim=1)
        computed: Tensor = self.layer(tokens, positions, context, span=_WITHIN, received=self.kernels.linear_packed(both, self._projection, None))
        return computed

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Computes the logits [R, V] of h' [R, H]."""
        return self.vocabulary.logits(self._normed(states, self._final_norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x.contiguous(), weight, self.shapes.rms_norm_eps, self.shapes.centred_norms)


def load_predictor(folder: str | Path, model: Decoder) -> MultiTokenPredictor:
    """Returns the first layer of multi-token prediction of the folder of ``model``, packed as its layers are. Raises ``UserError`` if it has none, or one that
    is broken."""
    check_predictor(folder, model.shapes)
    try:
        return _load(folder, model, layer_shapes(model.shapes, model.group is None))
    except UserError as error:
        raise UserError(f"model '{folder}', layer of multi-token prediction: {error}") from None


def _load(folder: str | Path, model: Decoder, shapes: ModelShapes) -> MultiTokenPredictor:
    names, dtype, device, shares = predictor_names(folder, model.shapes), model.dtype, model.device, model.group is None
    own = {"model.embed_tokens.weight", "lm_head.weight"} if not shares else set()
    read = dict(read_tensors(folder, lambda name: name in own or name in names[1:] or name.startswith(names.layer)))
    hidden = shapes.hidden_size
    rest = {name: (hidden, 2 * hidden) if name == names.projection else (hidden,) for name in names[1:]}
    for name, shape in rest.items():
        if name not in read:
            raise UserError(f"tensor '{name}' is missing from the weights; {LAYERS_KEY} requires it")
        if tuple(read[name].shape) != shape:
            raise UserError(f"tensor '{name}' has shape {list(read[name].shape)}; config.json requires {list(shape)}")
    embedding_norm, state_norm, projection, final_norm = (read.pop(name).to(device, dtype) for name in rest)
    held = {name.removeprefix(names.layer): tensor for name, tensor in read.items() if name.startswith(names.layer)}
    embedding, head = held.pop(_EMBEDDING, read.get("model.embed_tokens.weight")), held.pop(_HEAD, read.get("lm_head.weight"))
    tensors = {f"model.layers.0.{name}": tensor for name, tensor in held.items()} | {"model.norm.weight": final_norm}
    if shares:
        tensors["model.embed_tokens.weight"] = torch.zeros(1, hidden)
    else:
        if embedding is None or (head is None and not model.shapes.tie_word_embeddings):
            raise UserError("tensor 'model.embed_tokens.weight' or 'lm_head.weight' is missing from the weights; config.json requires it")
        tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding if head is None else head}
    layer = Decoder(shapes, model.kernels, dtype=dtype, device=device)
    layer.quantization = model.quantization
    try:
        load_tensors(layer, tensors.items(), pack=True)
    except UserError as error:
        raise UserError(str(error).replace("model.layers.0.", names.layer)) from None
    return MultiTokenPredictor(layer, model if shares else layer, embedding_norm, state_norm, projection)
