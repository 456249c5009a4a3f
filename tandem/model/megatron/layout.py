"""Megatron-Core's parameter names and sharding of a decoder, as published by its checkpoint converters (NVIDIA/Megatron-LM,
``tools/checkpoint``).

A rank's file contains its shard of every tensor, under a name with the layer's index on its pipeline stage:

- ``self_attention.linear_qkv`` stacks, for each query group, the rows of its queries, its key and its value; tensor-parallel ranks have equal runs of these
  rows, also where there are fewer groups than ranks;
- ``mlp.linear_fc1`` of a tensor-parallel rank stacks its rows of gate on its rows of up;
- ``linear_proj`` and ``linear_fc2`` are sharded by columns, everything else that is sharded by rows;
- the vocabulary is padded with copies of its last row; with several stages, a tied embedding is stored again on the last one, as
  the head;
- experts are assigned in runs to expert-parallel ranks and numbered from 0 on each;
- latent attention has matrices into its compressed vectors, which every tensor-parallel rank has whole (``linear_q_down_proj``, ``linear_kv_down_proj``), and
  out of them (``linear_q_up_proj``, ``linear_kv_up_proj``), or ``linear_q_proj`` where queries are not compressed.

There are two naming schemes: Transformer Engine's fused layers store a norm's weight in the linear layer that follows it, the local ones
separately. Experts are numbered in the name (``local_experts``) or at its end (grouped: ``linear_fc1.weight3``)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.layout.expert_shapes import CHOICE_BIAS, SHARED_GATE, ExpertShapes
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.megatron.division import divided_by_tensor
from tandem.model.megatron.terms import missing_term
from tandem.types import UserError

Spelling = Literal["transformer_engine", "local"]
VOCABULARY_MULTIPLE = 128
"""Megatron's default ``make_vocab_size_divisible_by``."""


@dataclass(frozen=True, slots=True)
class MegatronMesh:
    """The number of ranks along each axis. ``virtual``: stages on each rank of a pipeline, more than 1 if it is interleaved: of p ranks, rank r has the
    stages r, r + p and so on."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.pipeline * self.virtual

    def check(self, shapes: ModelShapes) -> None:
        """Raises ``UserError`` for a model that these ranks do not divide, or whose terms Megatron's layout has no place for."""
        lacking = missing_term(shapes)
        if lacking is not None:
            raise UserError(f"the {shapes.architecture} model has {lacking}, which Megatron's layout has no place for")
        counts = [("tensor", self.tensor, what, count) for what, count in divided_by_tensor(shapes, max(1, self.tensor))]
        counts.append(("pipeline", self.pipeline, "layers", shapes.num_hidden_layers))
        if self.virtual != 1:
            if self.pipeline < 2:
                raise UserError(f"--virtual-pipeline is {self.virtual} and --pipeline {self.pipeline}; an interleaved pipeline has at least 2 ranks")
            counts.append(("virtual-pipeline", self.virtual, "layers on each rank", shapes.num_hidden_layers // self.pipeline))
        for axis, size, what, count in counts:
            if size < 1 or count % size:
                raise UserError(f"--{axis} is {size}, which does not divide the model's {count} {what}; choose a divisor")
        experts = shapes.experts.num_experts if shapes.experts else 0
        if self.expert < 1 or (self.expert > 1 and (not experts or experts % self.expert)):
            raise UserError(f"--expert is {self.expert}, and the model has {experts or 'no'} experts; choose a divisor of this number")

    def ranks(self) -> "Iterator[MegatronRank]":
        """Yields every rank that has a file, tensor-parallel neighbours together."""
        for pipeline in range(self.pipeline):
            for expert in range(self.expert):
                for tensor in range(self.tensor):
                    yield MegatronRank(tensor, pipeline, expert)

    def folder(self, rank: "MegatronRank") -> str:
        """Returns ``mp_rank_TT[_PPP[_EEE]]``, without axes of one rank."""
        name = f"mp_rank_{rank.tensor:02d}"
        name += f"_{rank.pipeline:03d}" if self.pipeline > 1 else ""
        return name + (f"_{rank.expert:03d}" if self.expert > 1 else "")


class MegatronRank(NamedTuple):
    tensor: int
    pipeline: int
    expert: int


def padded_vocabulary(shapes: ModelShapes, tensor: int) -> int:
    """Returns the rows of the padded embedding: a multiple of ``VOCABULARY_MULTIPLE`` on every rank."""
    multiple = VOCABULARY_MULTIPLE * tensor
    return -(-shapes.vocab_size // multiple) * multiple


class Entry(NamedTuple):
    """One tensor of a rank's file. ``names``: its Hugging Face parts; ``join`` returns the shard of tensor-parallel rank t of n from the
    whole parts; ``split`` returns the whole parts from the shards of all ranks. ``is_replicated``: the same on every tensor-parallel rank."""

    name: str
    names: tuple[str, ...]
    join: Callable[[list[Tensor], int, int], Tensor]
    split: Callable[[list[Tensor]], list[Tensor]]
    is_replicated: bool = False


def entries(
    shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank, spelling: Spelling, grouped: bool = False, virtual: int = 0
) -> Iterator[Entry]:
    """Yields the tensors in the file of ``rank``, of its stage number ``virtual``. ``grouped``: experts are named as in grouped layers."""
    per_stage, stage = shapes.num_hidden_layers // mesh.stages, virtual * mesh.pipeline + rank.pipeline
    if stage == 0:
        yield _vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", shapes)
    for local in range(per_stage):
        layer = stage * per_stage + local
        yield from _layer(shapes, mesh, rank, f"decoder.layers.{local}.", f"model.layers.{layer}.", layer, spelling, grouped)
    if stage == mesh.stages - 1:
        yield _same("decoder.final_layernorm.weight", "model.norm.weight")
        if not shapes.tie_word_embeddings:
            yield _vocabulary("output_layer.weight", "lm_head.weight", shapes)
        elif mesh.stages > 1:
            yield _vocabulary("output_layer.weight", "model.embed_tokens.weight", shapes)


def _layer(
    shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank, to: str, of: str, layer: int, spelling: Spelling, grouped: bool
) -> Iterator[Entry]:
    fused = spelling == "transformer_engine"
    experts = shapes.experts_of(layer)
    if shapes.latent is None:
        yield from _attention(shapes, to, of, fused)
    else:
        yield from _latent_attention(shapes.latent, to, of, fused)
    yield _columns(f"{to}self_attention.linear_proj.weight", f"{of}self_attn.o_proj.weight")
    if shapes.output_bias:
        yield _same(f"{to}self_attention.linear_proj.bias", f"{of}self_attn.o_proj.bias")
    inside = fused and experts is None
    yield _same(f"{to}mlp.linear_fc1.layer_norm_weight" if inside else f"{to}pre_mlp_layernorm.weight", f"{of}post_attention_layernorm.weight")
    if experts is None:
        for kind, is_there in (("weight", True), ("bias", shapes.mlp_bias)):
            if is_there:
                yield _gated(f"{to}mlp.linear_fc1.{kind}", (f"{of}mlp.gate_proj.{kind}", f"{of}mlp.up_proj.{kind}"))
        yield _columns(f"{to}mlp.linear_fc2.weight", f"{of}mlp.down_proj.weight")
        if shapes.mlp_bias:
            yield _same(f"{to}mlp.linear_fc2.bias", f"{of}mlp.down_proj.bias")
        return
    yield from _experts(experts, mesh, rank, to, of, grouped)


def _attention(shapes: ModelShapes, to: str, of: str, fused: bool) -> Iterator[Entry]:
    yield _same(f"{to}self_attention.linear_qkv.layer_norm_weight" if fused else f"{to}input_layernorm.weight", f"{of}input_layernorm.weight")
    for kind, is_there in (("weight", True), ("bias", shapes.attention_bias)):
        if is_there:
            yield _qkv(f"{to}self_attention.linear_qkv.{kind}", tuple(f"{of}self_attn.{p}_proj.{kind}" for p in "qkv"), shapes)
    if shapes.qk_norm:
        yield _same(f"{to}self_attention.q_layernorm.weight", f"{of}self_attn.q_norm.weight")
        yield _same(f"{to}self_attention.k_layernorm.weight", f"{of}self_attn.k_norm.weight")


def _latent_attention(latent: LatentAttention, to: str, of: str, fused: bool) -> Iterator[Entry]:
    yield _same(f"{to}input_layernorm.weight", f"{of}input_layernorm.weight")
    for part, down, up in (("q", "q_a_proj", "q_b_proj"), ("kv", "kv_a_proj_with_mqa", "kv_b_proj")):
        at = f"{to}self_attention.linear_{part}_"
        if part == "q" and not latent.q_lora_rank:
            yield _rows(f"{at}proj.weight", f"{of}self_attn.q_proj.weight")
            continue
        yield _same(f"{at}down_proj.weight", f"{of}self_attn.{down}.weight")
        norm = f"{at}up_proj.layer_norm_weight" if fused else f"{to}self_attention.{part}_layernorm.weight"
        yield _same(norm, f"{of}self_attn.{part}_a_layernorm.weight")
        yield _rows(f"{at}up_proj.weight", f"{of}self_attn.{up}.weight")


def _experts(experts: ExpertShapes, mesh: MegatronMesh, rank: MegatronRank, to: str, of: str, grouped: bool) -> Iterator[Entry]:
    names = experts.names
    yield _same(f"{to}mlp.router.weight", f"{of}{names.router}.weight")
    if experts.sigmoid is not None:
        yield _same(f"{to}mlp.router.expert_bias", f"{of}{CHOICE_BIAS}")
    held = experts.num_experts // mesh.expert
    for local in range(held):
        spelled = f"linear_fc{{}}.weight{local}" if grouped else f"local_experts.{local}.linear_fc{{}}.weight"
        gate, up, down = (f"{of}{name.format(rank.expert * held + local)}.weight" for name in (names.gate, names.up, names.down))
        yield _gated(f"{to}mlp.experts.{spelled.format(1)}", (gate, up))
        yield _columns(f"{to}mlp.experts.{spelled.format(2)}", down)
    if experts.shared_intermediate_size:
        gate, up, down = (f"{of}{names.shared}.{name}_proj.weight" for name in ("gate", "up", "down"))
        yield _gated(f"{to}mlp.shared_experts.linear_fc1.weight", (gate, up))
        yield _columns(f"{to}mlp.shared_experts.linear_fc2.weight", down)
    if experts.shared_gate:
        yield _same(f"{to}mlp.shared_experts.gate_weight", f"{of}{SHARED_GATE}")


def _same(name: str, of: str) -> Entry:
    return Entry(name, (of,), lambda parts, rank, size: parts[0], lambda parts: [parts[0]], is_replicated=True)


def _rows(name: str, of: str) -> Entry:
    return Entry(name, (of,), lambda parts, rank, size: parts[0].chunk(size)[rank], lambda parts: [torch.cat(parts)])


def _columns(name: str, of: str) -> Entry:
    return Entry(name, (of,), lambda parts, rank, size: parts[0].chunk(size, dim=1)[rank], lambda parts: [torch.cat(parts, dim=1)])


def _gated(name: str, of: tuple[str, ...]) -> Entry:
    def join(parts: list[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([part.chunk(size)[rank] for part in parts])

    def split(parts: list[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]

    return Entry(name, of, join, split)


def _qkv(name: str, of: tuple[str, ...], shapes: ModelShapes) -> Entry:
    groups, head = shapes.num_key_value_heads, shapes.head_dim
    queries = shapes.num_attention_heads // groups * head

    def join(parts: list[Tensor], rank: int, size: int) -> Tensor:
        grouped = [part.unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1).chunk(size)[rank]

    def split(parts: list[Tensor]) -> list[Tensor]:
        grouped = torch.cat(parts).unflatten(0, (groups, queries + 2 * head))
        return [part.flatten(0, 1).contiguous() for part in grouped.split((queries, head, head), dim=1)]

    return Entry(name, of, join, split)


def _vocabulary(name: str, of: str, shapes: ModelShapes) -> Entry:
    def join(parts: list[Tensor], rank: int, size: int) -> Tensor:
        rows = padded_vocabulary(shapes, size)
        padding = parts[0][-1:].expand(rows - parts[0].shape[0], -1)
        return torch.cat([parts[0], padding]).chunk(size)[rank]

    return Entry(name, (of,), join, lambda parts: [torch.cat(parts)[: shapes.vocab_size]])
