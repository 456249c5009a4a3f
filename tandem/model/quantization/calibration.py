"""Calibration text, and the inputs of a layer's linear layers for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Routing, gate_of
from tandem.model.attention import attend, rotations
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.layer_pass import added, to_residual
from tandem.model.layer_weights import with_factors
from tandem.model.moe import gated, mixture
from tandem.runtime.machine.available_memory import total_bytes
from tandem.text.long_text import ENCODING_BYTES_PER_BYTE
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError
from tandem.types.input_file import read_input

QKV, OUTPUT, GATE_UP, DOWN, END = range(5)
"""The inputs of a layer's four linear layers in the order of the forward pass, and the layer's output."""

CHUNK_TOKENS = 4096


class Chunk(NamedTuple):
    """A batch of sequences: the residual stream [T, H] before a layer, and the positions of its tokens."""

    residual: Tensor
    positions: Tensor
    context: PackedContext


def read_texts(path: str | Path) -> list[str]:
    """Returns the texts of a ``.jsonl`` file (the field ``text`` of each line), or any other file as one text. Raises ``UserError``."""
    path = Path(path)
    try:
        content = read_input(path, total_bytes() // ENCODING_BYTES_PER_BYTE, "give less text: all of it is encoded at once").decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"calibration '{path}' cannot be read as text: {error}") from None
    if path.suffix != ".jsonl":
        texts = [content] if content.strip() else []
    else:
        texts = [_text_of(line, number, path) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not texts:
        raise UserError(f"calibration '{path}' contains no text; give a file with text")
    return texts


def _text_of(line: str, number: int, path: Path) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"calibration '{path}' line {number} has no text; every line must be a JSON object with the field 'text'")
    return str(row["text"])


def sequences_of(texts: list[str], tokenizer: Tokenizer, count: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """Returns (calibration sequences, held-out ones) of ``length`` tokens each, taken from the concatenated texts: at most ``count``, and a
    quarter as many held-out ones from the end. Raises ``UserError`` if there are fewer than two."""
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode(text)
        if tokenizer.eos_token_ids:
            tokens.append(tokenizer.eos_token_ids[0])
    rows = list(torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length))
    if len(rows) < 2:
        raise UserError(f"the calibration text has {len(tokens)} tokens; at least two sequences of {length} are needed; give more text")
    held_out = max(1, min(count // 4, len(rows) // 5))
    return rows[:-held_out][:count], rows[-held_out:]


def chunks_of(decoder: Decoder, sequences: list[Tensor]) -> Iterator[Chunk]:
    """Yields the sequences' embeddings in chunks of about ``CHUNK_TOKENS`` tokens."""
    each = max(1, CHUNK_TOKENS // len(sequences[0]))
    for start in range(0, len(sequences), each):
        part = sequences[start : start + each]
        lengths = [len(s) for s in part]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths])
        residual = decoder._rows(torch.cat(part)).detach()
        yield Chunk(residual, positions, PackedContext(bounds, max(lengths)))


@torch.no_grad()
def inputs_of(decoder: Decoder, index: int, stage: int, chunk: Chunk) -> Tensor:
    """Returns what layer ``index`` computes from ``chunk`` up to ``stage``: the inputs [T, K] of a linear layer, or at ``END`` the residual
    stream [T, H] after it."""
    kernels, eps, centred = decoder.kernels, decoder.shapes.rms_norm_eps, decoder.shapes.centred_norms
    step = with_factors(decoder._plain_steps()[index])
    x, residual = added(kernels, None, chunk.residual, step.input_norm, eps, centred)
    normed = x
    if stage == QKV:
        return x
    qkv = kernels.linear(x, step.qkv, step.qkv_bias)
    rotation = rotations(chunk.positions, decoder.rotary_tables, decoder.rotary_order)[step.attention.rotation]
    x = attend(kernels, step.attention, qkv, rotation, chunk.context)
    if stage == OUTPUT:
        return x
    x = kernels.linear(x, step.output, step.output_bias)
    x = x if step.written is None else to_residual(kernels, x, step.written[0], eps, centred)
    x, residual = (normed, x + residual) if step.parallel_blocks else added(kernels, x, residual, step.mlp_norm, eps, centred)
    if stage == GATE_UP:
        return x
    inner = None if step.gate_up is None else gate_of(kernels, step.activation)(kernels.linear(x, step.gate_up, step.gate_up_bias))
    if stage == DOWN:
        assert inner is not None, "the layer has a mixture without shared experts"
        return inner
    dense = None if inner is None else kernels.linear(inner, step.down, step.down_bias)
    if step.experts is not None:
        routed = mixture(kernels, step.experts, x)
        x = routed if dense is None else routed + gated(kernels, step.experts, x, dense)
    else:
        assert dense is not None
        x = dense
    return residual + (x if step.written is None else to_residual(kernels, x, step.written[1], eps, centred))


class RoutedInputs(NamedTuple):
    """What the experts of a layer read: ``rows[R, H]`` and, of ``down``, ``inner[R, F]``, those of expert e from ``bounds[e]`` to ``bounds[e + 1]``."""

    rows: Tensor
    inner: Tensor
    bounds: list[int]


@torch.no_grad()
def routed_inputs(decoder: Decoder, index: int, chunk: Chunk) -> RoutedInputs:
    """Returns the inputs of the experts of layer ``index``, each of the tokens that its router sends there."""
    x, experts = inputs_of(decoder, index, GATE_UP, chunk), decoder._plain_steps()[index].experts
    assert experts is not None
    route, routings, inner = experts.route(decoder.kernels), list[Routing](), list[Tensor]()

    def routed(logits: Tensor, each: int, normalised: bool) -> Routing:
        routings.append(route(logits, each, normalised))
        return routings[0]

    def seen(rows: Tensor) -> Tensor:
        inner.append(rows)
        return rows

    mixture(decoder.kernels, experts, x, before_down=seen, route=routed)
    return RoutedInputs(x.index_select(0, routings[0].order // experts.num_experts_per_tok), inner[0], routings[0].bounds.tolist())


@torch.no_grad()
def perplexity(decoder: Decoder, sequences: list[Tensor]) -> float:
    """Returns ``exp`` of the mean negative log-probability of every token except the first of each sequence, as computed by the decoder:
    with quantized weights if it is packed."""
    total, count = 0.0, 0
    for tokens in sequences:
        context = PackedContext(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
        hidden = decoder(tokens, torch.arange(len(tokens)), context)
        for rows in torch.arange(len(tokens) - 1).split(256):
            logprobs = decoder.kernels.logits_logprobs(decoder.logits(hidden[rows]), tokens[rows + 1])
            total -= float(logprobs.double().sum())
            count += len(rows)
    return float(torch.tensor(total / count, dtype=torch.float64).exp())
