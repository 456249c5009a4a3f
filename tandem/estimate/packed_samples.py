"""What the samples of a step are in the micro-batches of Tandem's trainer, which can compute what sequences begin with in common once. Imports no torch.

Known before a run are the prompts of its first step, with all that they begin with in common. How much completions do is known of a run that has updated its
weights (``begun_share``).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.prompt_beginnings import Prompts, met
from tandem.estimate.time import ForwardPass, Predicting
from tandem.layout.equal_beginnings import MOST_DISTINCT, computes_beginnings_once
from tandem.layout.shapes import ModelShapes
from tandem.types.kv_cache import KVCacheDtype


@dataclass(frozen=True, slots=True)
class Samples:
    """``count`` prompts with a ``group`` of completions each, of ``completion`` tokens on average, whose squares have the mean ``completion_square``.
    ``begun``: the share of the completions' tokens with which an earlier completion of the group begins too. ``is_scored``: the last token is read as well,
    and what follows it is all that is predicted."""

    prompts: Prompts
    count: float
    group: int
    completion: float
    completion_square: float
    begun: float = 0.0
    is_scored: bool = False

    @property
    def read(self) -> float:
        """Tokens of a completion that go through the network: nothing is predicted after the last one."""
        return self.completion if self.is_scored else max(0.0, self.completion - 1)

    @property
    def whole(self) -> float:
        """Tokens that go through the network where every sequence is computed by itself."""
        return self.count * self.group * (self.prompts.mean + self.read)


class Packing(NamedTuple):
    """How samples come into micro-batches of at most ``most_tokens`` on ``ranks`` data-parallel ranks (``trainer.packing.pack_shares``). ``shares``: equal
    beginnings are computed once. ``keeps_groups``: samples of a prompt are packed together, ``counts_once``: as if their prompt were there once."""

    most_tokens: int
    ranks: int = 1
    shares: bool = False
    keeps_groups: bool = True
    counts_once: bool = False


class Packed(NamedTuple):
    """``tokens`` that go through a network, and the ``context`` of half of which they attend to on average, as the tokens of whole sequences of that
    length do. ``predict``: how many of them predict a token, and ``targets``: the tokens that are predicted."""

    tokens: float
    context: float
    predict: float
    targets: float

    def predicting(self, ends_early: bool) -> Predicting:
        """Returns the same as shares of the tokens. ``ends_early``: the last layer has the others in its attention alone."""
        return Predicting(self.targets / self.tokens, self.predict / self.tokens if ends_early else 1.0)


class Sharing(NamedTuple):
    """How Tandem's trainer computes a step of a model: the ``update`` of its weights, and the passes without gradient, ``inference``. ``update_ends_early``,
    ``inference_ends_early``: the last layer computes nothing behind its attention for tokens that predict nothing. ``forward``: of an update, where its forward
    pass computes equal beginnings once and its backward pass every token (``None``: both compute the same)."""

    update: Packing
    inference: Packing
    update_ends_early: bool
    inference_ends_early: bool
    forward: Packing | None = None

    def forward_of(self, samples: Samples) -> ForwardPass | None:
        """Returns what the forward pass of an update of ``samples`` computes where it is less than the backward pass does."""
        if self.forward is None:
            return None
        whole, once = packed(samples, self.update), packed(samples, self.forward)
        if once.tokens > MOST_DISTINCT * whole.tokens:
            return None
        # The head reads a row for each token that is predicted.
        return ForwardPass(once.tokens, once.context, once.predicting(self.update_ends_early))


def sharing_of(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, replays_routing: bool = False, kv_cache_dtype: KVCacheDtype | None = None
) -> Sharing:
    """Returns how a step of ``shapes`` is computed, as ``trainer.logprobs`` and ``model.decoder.Decoder.wanting`` decide. ``replays_routing``: of experts.
    ``kv_cache_dtype``: the engine's, where the C++ kernels compute an update (``None``: other kernels do)."""
    own = trainer.backend == "tandem" and shapes.transformers is None
    has_independent_rows = own and trainer.precision != "fp8"
    shares = (
        has_independent_rows and trainer.dtype != "float64" and parallel.context == 1 and not replays_routing
        and not (shapes.experts is not None and (trainer.router_balance_loss or trainer.router_bias_rate))
    )  # fmt: skip
    once, most, ranks = trainer.share_prompts, trainer.micro_batch_tokens, parallel.data
    has_all_rows = parallel.tensor == parallel.context == 1
    return Sharing(
        Packing(most, ranks, once, once, once), Packing(most, ranks, once or shares, once or shares, once),
        has_independent_rows and has_all_rows, has_independent_rows and has_all_rows and parallel.pipeline == 1,
        Packing(most, ranks, shares=True, keeps_groups=False)
        if kv_cache_dtype is not None and not replays_routing and computes_beginnings_once(shapes, trainer, parallel, kv_cache_dtype) else None,
    )  # fmt: skip


def packed(samples: Samples, packing: Packing) -> Packed:
    """Returns what ``samples`` are in the micro-batches of one pass over them, where all have their mean length."""
    prompts, total = samples.prompts, samples.count * samples.group
    prompt, read, squares = prompts.mean, samples.read, _read_square(samples)
    targets = total * (1.0 if samples.is_scored else samples.completion)
    if not packing.shares:
        tokens = samples.whole
        attended = total * (prompts.square + 2 * prompt * read + squares)
        return Packed(tokens, attended / tokens, targets, targets)
    copies, together, batches = _copies(samples, packing)
    repeated, own = prompts.repeated(together), total * (1 - samples.begun)
    tokens = copies * prompt - batches * repeated.tokens + own * read
    attended = copies * prompts.square - batches * repeated.attended + own * 2 * prompt * read + total * squares * (1 - samples.begun**2)
    return Packed(tokens, attended / tokens, targets if samples.is_scored else copies + own * read, targets)


def begun_share(samples: Samples, packing: Packing, computed_once: float) -> float:
    """Returns ``Samples.begun`` of a run that has not computed the share ``computed_once`` of the tokens of its samples, because another one in the
    micro-batch begins with them (``perf/shared_prompt_share``): what the prompts do not explain."""
    completions = samples.count * samples.group * samples.read
    if not packing.shares or not completions:
        return 0.0
    return min(1.0, max(0.0, (packed(samples, packing).tokens - (1 - computed_once) * samples.whole) / completions))


def _read_square(samples: Samples) -> float:
    """Returns the mean square of the tokens of a completion that are read."""
    return samples.completion_square if samples.is_scored else max(0.0, samples.completion_square - 2 * samples.completion + 1)


def _copies(samples: Samples, packing: Packing) -> tuple[float, float, float]:
    """Returns how often prompts are computed for their groups, over all of ``samples``, how many prompts are together in a micro-batch, and the number of
    micro-batches."""
    prompt, read, group, ranks = samples.prompts.mean, samples.read, samples.group, packing.ranks
    if ranks == 1 and samples.whole <= packing.most_tokens:
        return samples.count, samples.count, 1.0
    if not packing.keeps_groups:
        # Micro-batches of sequences by length: as good as drawn.
        total = samples.count * group
        drawn = min(total / ranks, max(1.0, packing.most_tokens // (prompt + read)))
        together = samples.count * met(total, group, drawn)
        return total / drawn * together, together, total / drawn
    once = prompt if packing.counts_once else 0.0
    each = max(1.0, prompt + read - once)
    # A unit is at most half of a rank's share, so that shares stay even.
    most = packing.most_tokens if ranks == 1 else min(packing.most_tokens, math.ceil(samples.count * (once + group * each) / (2 * ranks)))
    in_unit = max(1, min(group, int((most - once) // each)))
    if in_unit < group:
        units = samples.count * math.ceil(group / in_unit)
        return units, 1.0, units
    together = max(1.0, min(samples.count / ranks, packing.most_tokens // (once + group * each)))
    return samples.count, together, samples.count / together
