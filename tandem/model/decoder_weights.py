"""The weights of the decoder, in the forms that trainer and engine multiply them in."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tandem.kernels.api import Kernels, PackedWeight
from tandem.layout.pipeline_stages import Span, whole
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import WHOLE, local_shapes
from tandem.model.dense_layers import PackedLayers
from tandem.model.latent_projections import pack_absorbed
from tandem.model.layer import Layer, Norm
from tandem.model.layer_pass import AroundLayer
from tandem.model.layer_weights import LayerWeights, layer_weights, with_factors
from tandem.model.linear import Linear
from tandem.model.moe import ExpertLayer
from tandem.model.parallel.model_parallel import ModelParallel
from tandem.model.parallel.tensor_parallel import RankGroup, collectives
from tandem.model.quantization.scheme import Scheme, pack_stored, pack_weight, scheme_named
from tandem.model.recompute import Recompute
from tandem.model.rotary import rotary_order, rotary_tables
from tandem.model.router_balance import RouterBalance
from tandem.model.routing import ReplayCount
from tandem.model.trained_adapter import is_adapter_parameter, packed_by
from tandem.types.kv_cache import KVCacheDtype


class DecoderWeights(nn.Module):
    """The parameters of a decoder, and the forms that they are multiplied in: plain, packed, frozen beside an adapter, or adopted from another process.

    Parameters are uninitialised until ``initialise`` or ``load_tensors`` fills them. A *packed* decoder (``pack``) has its matrices in the
    kernels' own layout, only infers, and has no plain matrices until ``unpack``.

    With a ``group`` it is one engine rank's shard (of the shapes ``local``) and only infers, together with the other ranks; with
    ``parallel`` it trains together with them. With ``spans`` it holds pipeline stages: their layers, on the first stage the embedding, on
    the last the final norm, the head and a copy of a tied embedding; parts on other stages are not attributes."""

    lm_head: Linear | None
    score: Linear | None

    def __init__(
        self,
        shapes: ModelShapes,
        kernels: Kernels,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: RankGroup | None = None,
        spans: Sequence[Span] = (),
        parallel: ModelParallel | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.shapes = shapes
        self.kernels = kernels
        self.group, self.parallel = group, parallel
        assert group is None or parallel is None, "a decoder shard either infers or trains"
        self.shard_spec = group.shard_spec if group is not None else WHOLE if parallel is None else parallel.shard_spec
        self.local = local = local_shapes(shapes, self.shard_spec)
        self.spans = spans = tuple(spans) or (whole(shapes.num_hidden_layers),)
        self.dtype = dtype
        if self.holds("model.embed_tokens.weight"):
            self.embed_tokens = nn.Parameter(torch.empty(local.vocab_size, shapes.hidden_size, dtype=dtype, device=device))
        self.layers = nn.ModuleList()
        for index in self.layer_numbers:
            # Layers keep their index in the whole model, so that parameters have the same names on every stage.
            self.layers.add_module(str(index), Layer(shapes, index, dtype, device, self.shard_spec))
        if self.holds("model.norm.weight"):
            self.norm = Norm((shapes.hidden_size,), dtype, device)
        has_head = self.holds("lm_head.weight") and shapes.language_head and not shapes.tie_word_embeddings
        self.lm_head = Linear(local.vocab_size, shapes.hidden_size, False, dtype, device) if has_head else None
        has_score = self.holds("score.weight") and shapes.value_head != "none"
        self.score = Linear(shapes.num_labels, shapes.hidden_size, shapes.value_head == "token", dtype, device) if has_score else None
        # Not a buffer, so that it stays fp32 when the parameters are converted.
        self.positions = shapes.default_context
        self.rotary_tables = tuple(table.to(device) for table in rotary_tables(shapes, self.positions))
        order = rotary_order(local)
        self.rotary_order = None if order is None else order.to(device)
        self._collectives = collectives(group)
        self.kv_cache_dtype: KVCacheDtype = "auto"
        self.quantization: Scheme | None = None if shapes.lora is None or shapes.lora.quantization == "none" else scheme_named(shapes.lora.quantization)
        # Whether an engine keeps experts in MXFP4, as their folder has them.
        self.experts_in_mxfp4 = False
        self.around_layer: AroundLayer | None = None
        self.recompute: Recompute = "none"
        self.router_balance: RouterBalance | None = None
        self.replay_count = ReplayCount()
        self._packed: PackedLayers | None = None
        self._packed_head: Any = None
        self._packed_embedding: PackedWeight | None = None
        self._adopted: dict[str, torch.Size] = {}
        self._packed_matrices: list[tuple[Any, ...]] = []
        self.is_frozen, self._has_adapter = False, shapes.lora is not None
        if self._has_adapter:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter_parameter(name))

    def use_context(self, tokens: int) -> None:
        """Computes from now on as all processes of a run do whose longest sequence has up to ``tokens`` tokens (see ``ModelShapes.positions_in``)."""
        if (positions := self.shapes.positions_in(tokens)) != self.positions:
            device, self.positions = self.device, positions
            self.rotary_tables = tuple(table.to(device) for table in rotary_tables(self.shapes, positions))

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """A context in which a plain decoder computes with its weights alone: as the model that the adapter was added to."""
        assert self._packed is None
        before, self._has_adapter = self._has_adapter, False
        try:
            yield
        finally:
            self._has_adapter = before

    @property
    def head_weight(self) -> Tensor:
        """The plain language-model head [V, H]; the embedding table if they are tied. Raises ``RuntimeError`` if the decoder is packed."""
        assert self.shapes.language_head, "the model has no language-model head"
        if self.lm_head is None:
            return self.embed_tokens
        if self.lm_head.weight is None:
            raise RuntimeError("a packed decoder has no plain head; call unpack() and load weights first")
        return self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.rotary_tables[0].device

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def packed(self) -> tuple[object, ...]:
        """The packed weights; compares unequal after packing again."""
        return self._packed, self._packed_head

    def packed_matrices(self) -> list[dict[str, Any]]:
        """Returns the packed matrices of every layer by name, and the head in a final dictionary of its own. Empty if the decoder is not
        packed."""
        if self._packed is None:
            return []
        names = ("qkv", "output", "gate_up", "down", "experts")
        latent = lambda step: {} if step.latent is None else step.latent.matrices()
        linear = lambda step: {} if step.linear_attention is None else {"qkvz": step.linear_attention.qkvz, "ba": step.linear_attention.ba}
        return [*({name: getattr(step, name) for name in names} | latent(step) | linear(step) for step in self._packed), {"head": self._packed_head}]

    def matrix(self, index: int, place: int) -> Any:
        """Returns the packed matrix ``place`` of ``Layer.linears`` of layer ``index``."""
        return self._packed_matrices[self.layer_numbers.index(index)][place]

    @property
    def packed_head(self) -> Any:
        return self._packed_head

    def replace_packed(self, matrices: Mapping[tuple[int, int], Any], head: Any) -> None:
        """Puts packed ``matrices`` in the places of those of the same layer and place of ``Layer.linears``, and ``head`` if it is not ``None``."""
        assert self._packed is not None
        # Norms whose factors are not their weights may have changed too.
        if matrices or self.shapes.norms_from_one:
            numbers = self.layer_numbers
            self._packed_matrices = [
                tuple(matrices.get((index, place), own) for place, own in enumerate(kept)) for index, kept in zip(numbers, self._packed_matrices, strict=True)
            ]
            self._packed = self._packed_steps(self._adapted(self._packed_matrices), [step.experts for step in self._packed])
        if head is not None:
            self._packed_head = head

    @torch.no_grad()
    def pack(self, fill: Callable[[int], None] | None = None) -> None:
        """Packs every matrix and the head for inference, and drops the plain matrices one by one (the embedding table stays).

        ``fill(index)``, if given, is called before layer ``index`` is packed, to write its plain matrices. Matrices are quantized as stored
        in a checkpoint, or else rounded as ``quantization`` says, experts of a folder in MXFP4 only if their numbers are not of it; routers stay plain, and so
        does the head unless ``quantization`` includes it.

        Later changes of the weights have no effect until ``pack`` is called again; ``load_tensors`` leaves the decoder unpacked for that.
        On a packed decoder it only packs a tied head again, and nothing if its weights are adopted.
        """
        if self._adopted:
            return
        was_plain = self._packed is None
        if was_plain:
            matrices, experts = [], []
            # Looked up by name, because only kernels in C++ read weights where they lie.
            side_by_side = getattr(self.kernels, "side_by_side", tuple)
            for index, layer in enumerate(self._layers()):
                if fill is not None:
                    fill(index)
                matrices.append(tuple(side_by_side([self._pack_matrix(layer, linear) for linear in layer.linears()])))
                experts.append(layer.experts.pack(self.kernels, self.expert_quantization, self.experts_in_mxfp4) if layer.experts else None)
            self._packed_matrices = matrices
            self._packed = self._packed_steps(self._adapted(matrices), experts)
        if self.lm_head is None:
            if self.shapes.language_head:
                self._packed_head = pack_weight(self.kernels, self.embed_tokens, self.head_quantization)
        elif was_plain:
            self._packed_head = self._pack_linear(self.lm_head, self.head_quantization)

    @torch.no_grad()
    def adopt(
        self, own: Mapping[str, Tensor], matrices: list[tuple[Any, ...]], experts: list[ExpertLayer | None], embedding: PackedWeight | None, head: Any
    ) -> None:
        """Computes with packed weights that another process holds, from now on; its own, plain or packed, are dropped, and nothing is copied.

        ``own``: norms, biases, routers and a plain embedding by their names here (``named_parameters``; an empty tensor in the place of one that is packed);
        ``matrices`` of every layer, in the order of ``Layer.linears``, and its ``experts``; ``embedding``: the table, if it is packed because it is ``head``
        too. Not for a shard that trains, an adapter or a quantized model.
        """
        assert self.parallel is None and not self._has_adapter and self.quantization is None
        shapes = self._adopted | {name: self.get_parameter(name).shape for name in own if name not in self._adopted}
        for name, tensor in own.items():
            self.get_parameter(name).data = tensor
        for layer in self._layers():
            if layer.experts is not None:
                layer.experts.drop()
            for linear in layer.linears():
                linear.weight = None
        if self.lm_head is not None:
            self.lm_head.weight = None
        self._adopted, self._packed_embedding, self._packed_head = shapes, embedding, head
        self._packed_matrices = [*matrices]
        self._packed = self._packed_steps(self._packed_matrices, experts)

    def twin(self) -> Self:
        """Returns another decoder of the same model, kernels and quantization, whose weights are uninitialised. Not for a shard or one that trains."""
        assert self.group is None and self.parallel is None
        twin = type(self)(self.shapes, self.kernels, dtype=self.dtype, device=self.device)
        twin.quantization, twin.kv_cache_dtype = self.quantization, self.kv_cache_dtype
        twin.experts_in_mxfp4 = self.experts_in_mxfp4
        twin.use_context(self.positions)
        return twin

    def exchange_weights(self, twin: Self) -> None:
        """Computes with the weights of ``twin`` from now on, which has those of this decoder then. Nothing is copied, so it takes as long for any size."""
        assert twin.shapes == self.shapes and twin.is_packed
        for name in ("_parameters", "_modules", "_packed", "_packed_head", "_packed_embedding", "_packed_matrices", "_adopted"):
            own = getattr(self, name)
            setattr(self, name, getattr(twin, name))
            setattr(twin, name, own)

    @torch.no_grad()
    def freeze(self, fill: Callable[[int], None]) -> None:
        """Quantizes the plain matrices of every layer as ``quantization`` says, for training an adapter beside them: they have no gradient, and no plain
        form any more. ``fill``: as of ``pack``."""
        assert self.quantization is not None and self._packed is None
        for index, layer in zip(self.layer_numbers, self._layers(), strict=True):
            fill(index)
            for linear in layer.linears():
                assert linear.weight is not None
                if not layer.is_by_head(linear):
                    packed = pack_weight(self.kernels, linear.weight, self.quantization)
                    # Offloading moves whole storages: without the room before a large page.
                    is_view = packed.data.untyped_storage().nbytes() > packed.data.nbytes
                    linear.frozen = packed._replace(data=packed.data.clone()) if is_view else packed
            for linear in layer.linears():
                kept = linear.weight if layer.is_by_head(linear) else None
                linear.weight = None if kept is None else nn.Parameter(kept.detach().clone(), requires_grad=False)
        self.is_frozen = True

    def frozen_tensors(self) -> list[Tensor]:
        """Returns the tensors of the matrices that ``freeze`` has quantized."""
        held = [linear.frozen for layer in self._layers() for linear in layer.linears() if linear.frozen is not None]
        return [tensor for packed in held for tensor in (packed.data, packed.scales, packed.zeros) if tensor is not None]

    def unpack(self, in_one_layer: bool = False) -> None:
        """Drops the packed weights, and adopted ones, and allocates plain, uninitialised ones. ``in_one_layer``: the matrices of all layers share the memory
        of one layer, for a ``pack`` that fills one layer at a time; this avoids a second copy of the model and its page faults."""
        self._packed = self._packed_head = self._packed_embedding = None
        for name, shape in self._adopted.items():
            adopted = self.get_parameter(name)
            adopted.data = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._adopted = {}
        self._packed_matrices, self.is_frozen = [], False
        held: dict[tuple[int, ...], nn.Parameter] = {}
        for index, layer in enumerate(self._layers()):
            if layer.experts is not None and not layer.experts.is_plain:
                layer.experts.allocate()
            for place, linear in enumerate(layer.linears()):
                # The key includes index and shape, because layers may differ.
                key = (0 if in_one_layer else index, place, linear.rows, linear.columns)
                if key not in held:
                    is_shared = any(linear.weight is other for other in held.values())
                    held[key] = self._plain(linear, None if is_shared else linear.weight)
                linear.weight, linear.frozen = held[key], None
        if self.lm_head is not None:
            self.lm_head.weight = self._plain(self.lm_head, self.lm_head.weight)

    def _plain(self, linear: Linear, kept: nn.Parameter | None) -> nn.Parameter:
        """Returns a plain matrix for ``linear``: the existing one, or a new one."""
        if kept is not None:
            return kept
        like = self.embed_tokens
        return nn.Parameter(torch.empty(linear.rows, linear.columns, dtype=like.dtype, device=like.device))

    def pack_adapter(self) -> None:
        """Packs the adapter's matrices of a packed decoder again, after they have changed."""
        assert self._packed is not None
        self._packed = self._packed_steps(self._adapted(self._packed_matrices), [step.experts for step in self._packed])

    def _adapted(self, matrices: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Returns the packed ``matrices`` of every layer with their packed adapters."""
        pack = packed_by(self.kernels)
        return [
            tuple(w if linear.adapter is None else self._with_adapter(layer, linear, w, pack) for linear, w in zip(layer.linears(), own, strict=True))
            for layer, own in zip(self._layers(), matrices, strict=True)
        ]

    def _with_adapter(self, layer: Layer, linear: Linear, weight: Any, pack: Callable[[Tensor], Any]) -> Any:
        """Returns the packed ``weight`` of a layer's matrix with its packed adapter."""
        assert linear.adapter is not None
        if layer.is_by_head(linear):
            assert self.shapes.latent is not None
            return pack_absorbed(self.kernels, self.shapes.latent, linear.adapter.around(weight))
        return linear.adapter.around(weight, pack)

    def _pack_matrix(self, layer: Layer, linear: Linear) -> Any:
        """Returns a layer's packed matrix and drops the plain one. One that is multiplied head by head is never quantized; with an adapter, which is added to
        the weight itself, it stays as it is."""
        if not layer.is_by_head(linear):
            return self._pack_linear(linear, self.quantization)
        assert linear.weight is not None and self.shapes.latent is not None
        weight, linear.weight = linear.weight, None
        # Cloned, because layers may share the memory of one.
        return pack_absorbed(self.kernels, self.shapes.latent, weight) if linear.adapter is None else weight.detach().clone()

    @property
    def expert_quantization(self) -> Scheme | None:
        """How experts are rounded; beside an adapter in training they are not, because the trainer has them as they are."""
        return None if self.shapes.lora is not None and self.shapes.lora.quantization != "none" else self.quantization

    @property
    def head_quantization(self) -> Scheme | None:
        return self.quantization if self.quantization is not None and self.quantization.head else None

    def _pack_linear(self, linear: Linear, scheme: Scheme | None) -> Any:
        if linear.stored:
            packed, linear.stored = pack_stored(self.kernels, linear.stored), ()
            return packed
        assert linear.weight is not None
        packed = pack_weight(self.kernels, linear.weight, scheme)
        linear.weight = None
        return packed

    def _plain_steps(self) -> list[LayerWeights]:
        return self._steps(
            [tuple(self._plain_weight(linear) for linear in layer.linears()) for layer in self._layers()],
            [layer.experts.plain() if layer.experts else None for layer in self._layers()],
        )

    def _plain_weight(self, linear: Linear) -> Any:
        weight = linear.weight if linear.frozen is None else linear.frozen
        return linear.adapter.around(weight) if linear.adapter is not None and self._has_adapter else weight

    @property
    def layer_numbers(self) -> list[int]:
        """The indices in the whole model of the layers that this decoder holds."""
        return [index for span in self.spans for index in range(span.start, span.stop)]

    def holds(self, name: str) -> bool:
        """Returns whether this decoder holds the parameter ``name`` (Hugging Face), or a part of it."""
        return any(span.holds(name, self.shapes.tie_word_embeddings) for span in self.spans)

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))

    def _steps(self, matrices: list[tuple[Any, ...]], experts: list[ExpertLayer | None]) -> list[LayerWeights]:
        trains = self.parallel is not None
        return [
            layer_weights(layer, index, own, mixture, self.local, self.shard_spec, trains)
            for layer, index, own, mixture in zip(self._layers(), self.layer_numbers, matrices, experts, strict=True)
        ]

    @torch.no_grad()
    def _packed_steps(self, matrices: list[tuple[Any, ...]], experts: list[ExpertLayer | None]) -> PackedLayers:
        return PackedLayers(with_factors(step) for step in self._steps(matrices, experts))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self._packed is not None:
            raise RuntimeError("a packed decoder cannot be moved or converted; call unpack() and load weights first")
        super()._apply(fn, recurse)
        weight = next(self.parameters())
        self.dtype, self.rotary_tables = weight.dtype, tuple(table.to(weight.device) for table in self.rotary_tables)
        self.rotary_order = None if self.rotary_order is None else self.rotary_order.to(weight.device)
        return self
