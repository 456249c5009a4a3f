"""Calibration text, and the inputs of a layer's linear layers for it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Routing
from tandem.kernels.kv_dtype import stored_dtype
from tandem.model.attention import rotations
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.layer_pass import LayerBatch, run_layer
from tandem.model.layer_weights import LayerWeights
from tandem.model.moe import mixture
from tandem.runtime.machine.available_memory import total_bytes
from tandem.text.long_text import ENCODING_BYTES_PER_BYTE
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError
from tandem.types.input_file import read_input

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


class _Reached(Exception):
    """Ends the forward pass of a layer at the matrix whose inputs are wanted."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


@torch.no_grad()
def inputs_of(decoder: Decoder, index: int, weight: Tensor, chunk: Chunk) -> Tensor:
    """Returns the inputs [T, K] of the matrix with the parameter ``weight`` in layer ``index``, which may be one of its shared experts."""
    return _read_by(decoder, _step(decoder, index), weight, chunk)


@torch.no_grad()
def mlp_inputs_of(decoder: Decoder, index: int, chunk: Chunk) -> Tensor:
    """Returns what the MLP or the mixture of layer ``index`` reads [T, H]."""
    first = torch.empty(0)
    return _read_by(decoder, _step(decoder, index)._replace(gate_up=first), first, chunk)


@torch.no_grad()
def after_layer(decoder: Decoder, index: int, chunk: Chunk) -> Chunk:
    """Returns ``chunk`` behind layer ``index``."""
    x, residual = run_layer(_batch(decoder, chunk, decoder.kernels.linear), _step(decoder, index), None, chunk.residual)
    return chunk._replace(residual=residual + x)


def _read_by(decoder: Decoder, step: LayerWeights, weight: Tensor, chunk: Chunk) -> Tensor:
    def linear(x: Tensor, other: Any, bias: Tensor | None) -> Tensor:
        if other is weight:
            raise _Reached(x)
        return decoder.kernels.linear(x, other, bias)

    try:
        # Experts are left out, which shared ones do not wait for.
        run_layer(_batch(decoder, chunk, linear), step._replace(experts=None), None, chunk.residual)
    except _Reached as reached:
        return reached.inputs
    raise AssertionError("the layer has no product with this matrix")


def _step(decoder: Decoder, index: int) -> LayerWeights:
    return decoder._plain_steps()[index]


def _batch(decoder: Decoder, chunk: Chunk, linear: Callable[[Tensor, Any, Tensor | None], Tensor]) -> LayerBatch:
    rotated = rotations(chunk.positions, decoder.rotary_tables, decoder.rotary_order)
    kept = stored_dtype(decoder.kv_cache_dtype, decoder.dtype)
    return LayerBatch(decoder.kernels, linear, rotated, chunk.context, kept, decoder._collectives, None, None, None, None, False)


class RoutedInputs(NamedTuple):
    """What the experts of a layer read: ``rows[R, H]`` and, of ``down``, ``inner[R, F]``, those of expert e from ``bounds[e]`` to ``bounds[e + 1]``."""

    rows: Tensor
    inner: Tensor
    bounds: list[int]


@torch.no_grad()
def routed_inputs(decoder: Decoder, index: int, chunk: Chunk) -> RoutedInputs:
    """Returns the inputs of the experts of layer ``index``, each of the tokens that its router sends there."""
    x, experts = mlp_inputs_of(decoder, index, chunk), _step(decoder, index).experts
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
