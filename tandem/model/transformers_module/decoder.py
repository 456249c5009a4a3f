"""A decoder whose network is a module of transformers, with the interface of ``Decoder`` for the engine, the trainer and the publication of weights."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.kernels.api import Kernels
from tandem.kernels.kv_dtype import stored_dtype
from tandem.layout.parameters import parameters
from tandem.layout.pipeline_stages import whole
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import WHOLE
from tandem.model.attention import AttentionContext, PackedContext
from tandem.model.decoder import Decoder
from tandem.model.joint_balance import JointBalance
from tandem.model.lora import LoraBatch
from tandem.model.quantization.scheme import Scheme, pack_weight, scheme_named
from tandem.model.recompute import Recompute, around_layers
from tandem.model.routing import ReplayCount, WithoutGradient
from tandem.model.transformers_module.attention import NAME, Computing, attach
from tandem.model.transformers_module.describe import new_module, read_config
from tandem.model.transformers_module.kept import Kept
from tandem.model.transformers_module.replaced import KernelLinear, add_adapters, products, replace_parts
from tandem.model.transformers_module.router_loss import attach_router_loss
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype


class TransformersDecoder(Decoder):
    """The module of transformers that ``shapes`` describe, over a flat batch of T tokens.

    Attention, linear layers, experts, the adapter that is trained, root-mean-square norms, common activations, the head and the log-probabilities are Tandem's
    kernels; the rest is the module's own. It is never sharded, and has no value head. ``config``: of transformers, as ``read_config`` returns
    it.
    """

    def __init__(self, shapes: ModelShapes, kernels: Kernels, config: Any, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        nn.Module.__init__(self)
        assert shapes.transformers is not None
        self.shapes = self.local = shapes
        self.positions = shapes.max_position_embeddings
        self.kernels, self.dtype, self.config = kernels, dtype, config
        network = new_module(config, NAME, dtype, device, shapes.transformers.trust_remote_code)
        # Nothing reads the logits of routers after a pass, which this would keep.
        network.config.output_router_logits = False
        self.computing = Computing(shapes, kernels)
        self.kept = Kept(network, dtype, shapes.lora is None)
        replace_parts(network, self.computing)
        add_adapters(network, shapes)
        attach(network, self.computing)
        attach_router_loss(network, self.computing)
        # Parameters are named by the first place that has them: as in a ``Decoder`` where it has the same.
        self.embed_tokens = network.get_input_embeddings().weight
        self.layers = network.get_submodule(shapes.transformers.layers)
        self.network = network
        for index, layer in enumerate(self.layers):
            layer.forward = partial(self._layer, index, layer.forward)  # type: ignore[method-assign, assignment]
        self.group = self.parallel = self.router_balance = None
        self.shard_spec, self.spans = WHOLE, (whole(shapes.num_hidden_layers),)
        self.lm_head = self.score = None
        self.kv_cache_dtype: KVCacheDtype = "auto"
        self.quantization: Scheme | None = None if shapes.lora is None or shapes.lora.quantization == "none" else scheme_named(shapes.lora.quantization)
        self.around_layer = None
        self.recompute: Recompute = "none"
        self.replay_count = ReplayCount()
        self.is_frozen = False
        self._is_packed, self._packed_head, self._version = False, None, 0
        self._around: Any = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    def dense_program(self) -> None:
        """Returns ``None``: the module computes its layers itself."""

    @property
    def head_weight(self) -> Tensor:
        """The head [V, H]; one with a bias has it as a further column, which ``_to_head`` multiplies with 1."""
        head = self.network.get_output_embeddings()
        weight: Tensor = head.weight
        return weight if head.bias is None else torch.cat((weight, head.bias.unsqueeze(1)), dim=1)

    def _to_head(self, hidden: Tensor) -> Tensor:
        read = super()._to_head(hidden)
        return read if self.network.get_output_embeddings().bias is None else torch.cat((read, read.new_ones(len(read), 1)), dim=1)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionContext, router_logits: list[Tensor] | None = None,
        lora: LoraBatch | None = None, span: Any = None, received: Tensor | None = None, aux: Any = None,
    ) -> Tensor:  # fmt: skip
        """Computes as ``Decoder.forward``. Raises ``ValueError`` if a packed sequence is longer than the model's context."""
        assert received is None and router_logits is None and aux is None
        self.computing.lora = lora
        if isinstance(attention, PackedContext) and attention.max_seqlen > self.positions:
            raise ValueError(f"a sequence of {attention.max_seqlen} tokens is longer than the model's {self.positions} positions")
        is_trained = isinstance(attention, PackedContext) and not self._is_packed and lora is None
        with contextlib.nullcontext() if is_trained else torch.no_grad():
            hidden = self._compute(tokens, positions, attention)
        return hidden if attention.wanted is None else hidden.index_select(0, attention.wanted)

    def _compute(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        # ZeRO gives the parameters other memory after the module is made.
        self.kept.bind()
        kernels, self._around = self.kernels, None
        if isinstance(context, PackedContext):
            kernels, self._around = around_layers(self.recompute, self.kernels, self.around_layer)
        self.computing.begin(kernels, context, stored_dtype(self.kv_cache_dtype, self.dtype), tokens)
        joint = self.router_balance if isinstance(context, PackedContext) else None
        self.computing.balance = balance = joint.new_pass() if isinstance(joint, JointBalance) else None
        base = self.network.base_model
        output = base(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, return_dict=True)
        if balance is not None:
            balance.end()
        hidden: Tensor = output.last_hidden_state[0]
        if hidden.requires_grad:
            for parameter in self.kept.parameters():
                hidden = WithoutGradient.apply(hidden, parameter) if parameter.requires_grad else hidden
        return hidden

    def _layer(self, index: int, forward: Callable[..., Any], hidden: Tensor, *given: Any, **named: Any) -> Any:
        """Computes layer ``index`` of the module within the wrapper of layers."""
        if self._around is None:
            return forward(hidden, *given, **named)
        state, rest = self.computing.state(), list[Any]()

        def layer(x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
            # A layer that is computed again in the backward pass computes with what this pass had.
            self.computing.restore(state)
            output = forward(residual, *given, **named)
            rest[:] = [output[1:]] if isinstance(output, tuple) else []
            return (output[0] if isinstance(output, tuple) else output), residual

        x, _ = self._around(index, layer, None, hidden)
        return (x, *rest[0]) if rest else x

    # -- weights -------------------------------------------------------------------------------------------------------

    def huggingface_parameters(self) -> dict[str, Tensor]:
        """Returns every parameter by its name in the folder. Raises ``RuntimeError`` if they are packed, or quantized beside an adapter."""
        if self._is_packed or self.is_frozen:
            raise RuntimeError("a packed decoder has no plain weights; call unpack() and load weights first")
        module = self.shapes.transformers
        assert module is not None
        tensors, kept = {}, self.kept.by_name()
        for (name, shape), own, start in zip(module.parameters, module.names, module.starts, strict=True):
            owner = (kept[own] if own in kept else self.network.get_parameter(own)).detach()
            tensors[name] = owner.view(-1)[start : start + math.prod(shape)].view(shape)
        tensors |= self.adapter_parameters()
        return {name: tensors[name] for name, _ in parameters(self.shapes)}

    def adapter_parameters(self) -> dict[str, Tensor]:
        """Returns a view of every parameter of the adapter by its name; also of a packed decoder."""
        tensors: dict[str, Tensor] = {}
        for name, module in self.network.named_modules():
            if isinstance(module, KernelLinear) and module.adapter is not None:
                tensors |= module.adapter.named([name])
        return tensors

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        assert not self._is_packed
        before, self.computing.has_adapter = self.computing.has_adapter, False
        try:
            yield
        finally:
            self.computing.has_adapter = before

    def pack_adapter(self) -> None:
        for each in products(self.network):
            if isinstance(each, KernelLinear):
                each.pack_adapter(self.kernels)
        self._version += 1

    @property
    def is_packed(self) -> bool:
        return self._is_packed

    @property
    def packed(self) -> tuple[object, ...]:
        return self._is_packed, self._version, self._packed_head

    def packed_matrices(self) -> list[dict[str, Any]]:
        if not self._is_packed:
            return []
        of_layers = [{str(place): each.packed for place, each in enumerate(products(layer))} for layer in self.layers]
        return [*of_layers, {"head": self._packed_head}]

    @torch.no_grad()
    def pack(self, fill: Callable[[int], None] | None = None) -> None:
        """Packs every matrix and the head for inference, and drops the plain matrices, as ``Decoder.pack``."""
        if not self._is_packed:
            for index, layer in enumerate(self.layers):
                if fill is not None:
                    fill(index)
                self._pack_products(layer)
            self._pack_products(self.network)
            self._is_packed = True
        if self.head_quantization is not None and self.network.get_output_embeddings().bias is not None:
            raise UserError(f"quantization has '+head', and the head of {type(self.network).__name__} has a bias, which that would round; leave '+head' out")
        self._packed_head = pack_weight(self.kernels, self.head_weight, self.head_quantization)
        self._version += 1

    @torch.no_grad()
    def freeze(self, fill: Callable[[int], None]) -> None:
        assert self.quantization is not None and not self._is_packed
        for index, layer in enumerate(self.layers):
            fill(index)
            self._freeze_products(layer, self.quantization)
        self._freeze_products(self.network, self.quantization)
        self.is_frozen = True

    def _freeze_products(self, module: nn.Module, scheme: Scheme) -> None:
        for each in products(module):
            if isinstance(each, KernelLinear) and each.frozen is None and self._scheme_of(each) is not None:
                each.plain_shape = tuple(each.weight.shape)
                each.freeze(self.kernels, scheme)

    def _scheme_of(self, product: object) -> Scheme | None:
        """Returns how ``product`` is rounded: beside an adapter in training only linear layers that could have one are, as in the trainer."""
        assert self.shapes.transformers is not None
        is_adaptable = isinstance(product, KernelLinear) and product.name in self.shapes.transformers.linears
        return self.quantization if is_adaptable else self.expert_quantization

    def _pack_products(self, module: nn.Module) -> None:
        for each in products(module):
            if each.packed is None:
                each.packed, each.plain_shape = each.pack(self.kernels, self._scheme_of(each)), tuple(each.weight.shape)
                each.weight.data = each.weight.data.new_empty(0)

    def unpack(self, in_one_layer: bool = False) -> None:
        for each in products(self.network):
            if each.packed is not None:
                each.packed = None
                each.weight.data = torch.empty(each.plain_shape, dtype=self.dtype, device=self.device)
            elif isinstance(each, KernelLinear) and each.frozen is not None:
                each.frozen = None
                each.weight = nn.Parameter(torch.empty(each.plain_shape, dtype=self.dtype, device=self.device), requires_grad=False)
        self._is_packed, self._packed_head, self.is_frozen = False, None, False

    def twin(self) -> "TransformersDecoder":
        twin = TransformersDecoder(self.shapes, self.kernels, self.config, dtype=self.dtype, device=self.device)
        twin.quantization, twin.kv_cache_dtype = self.quantization, self.kv_cache_dtype
        return twin

    def exchange_weights(self, twin: Decoder) -> None:
        assert isinstance(twin, TransformersDecoder) and twin.shapes == self.shapes and twin.is_packed
        self._is_packed, twin._is_packed = True, self._is_packed
        self._packed_head, twin._packed_head = twin._packed_head, self._packed_head
        self._version += 1
        for own, other in zip(self.parameters(), twin.parameters(), strict=True):
            own.data, other.data = other.data, own.data
        self.kept.bind()
        twin.kept.bind()
        for product, of_twin in zip(products(self.network), products(twin.network), strict=True):
            product.packed, of_twin.packed = of_twin.packed, product.packed
            product.plain_shape = of_twin.plain_shape

    def frozen_tensors(self) -> list[Tensor]:
        held = [each.frozen for each in products(self.network) if isinstance(each, KernelLinear) and each.frozen is not None]
        return [tensor for packed in held for tensor in (packed.data, packed.scales, packed.zeros) if tensor is not None]

    def _apply(self, fn: Any, recurse: bool = True) -> "TransformersDecoder":
        if self._is_packed:
            raise RuntimeError("a packed decoder cannot be moved or converted; call unpack() and load weights first")
        nn.Module._apply(self, fn, recurse)
        self.kept.bind()
        self.dtype = self.embed_tokens.dtype
        return self


def new_decoder(shapes: ModelShapes, kernels: Kernels, folder: str | Path, dtype: torch.dtype, device: torch.device | str) -> TransformersDecoder:
    """Returns the decoder of the model in ``folder``, whose weights are uninitialised."""
    assert shapes.transformers is not None
    return TransformersDecoder(shapes, kernels, read_config(folder, shapes.transformers.trust_remote_code), dtype=dtype, device=device)


__all__ = ["TransformersDecoder", "new_decoder"]
