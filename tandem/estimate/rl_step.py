"""Predicts a step of reinforcement learning on GPUs: rollout with its long tail, the update of weights, the switch, inference, training. Imports no torch.

- **Rollout.** All requests of a step are queued at once on engines that are played step by step (``serving.played``). The step waits for its longest
  completion: of N independent lengths with the quantile function Q that has the mean of Q(u^(1/N)) over u (``Lengths.mean_longest``).
- **Partial rollouts** draw at most a budget of tokens of a sample in a round (Kimi Team, 2025, section 2.6.2). On average a step begins as many samples as it
  ends, so a sample of o tokens is in ceil(o / budget) rounds, and each after the first computes what it has again, with the new weights.
- **Update of weights.** The ranks of a node write the parts that they own to the host's memory, other nodes read them over their network cards, and every
  engine's GPUs read theirs. **Switch**: what the trainer holds goes to the host and comes back, where it does not fit beside the engine.
- **Training** is a step of ``training.predict`` for each minibatch, of sequences whose length is the mean over tokens: that has the tokens and the
  operations of attention of the real ones. A pass without gradients is a third of the operations. Tandem's trainer computes less (``packed_samples``): what
  samples begin with in common once, and no logits of tokens that predict nothing, nor what is behind the attention of the last layer for them.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.packed_samples import Packing, Samples, packed, sharing_of
from tandem.estimate.prompt_beginnings import Prompts
from tandem.estimate.serving.engine_memory import predict_engine_memory
from tandem.estimate.serving.kv_cache import held_tokens
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.played import PlayedRequest, StepTable, play
from tandem.estimate.serving.speculation import Speculation
from tandem.estimate.serving.throughput import written_tokens
from tandem.estimate.time import ALL_PREDICT, Predicting, forward_products
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.step_time import StepTime
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError

MOST_SEQUENCES = 200_000
"""Completions of one engine in a step that are played."""
TAIL_SHARE = 0.9
"""The tail of a rollout is what follows the end of this share of its completions."""
WEIGHT_BYTES = 2
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RLStep:
    """A step: ``prompts`` x ``group`` completions on ``engines`` engines of ``engine``, and their training in ``training``, whose batch is set here.

    ``budget_tokens``: of partial rollouts, 0: off. ``rounds``: of rollout. ``passes``: without gradients, and ``trained``: how many models are trained, all
    counted as of the actor's size (old log-probabilities, reference, critic, reward model). ``minibatches`` and ``epochs``: of the update. ``draft_passes``:
    what an update of a draft head takes, in passes of the actor without gradients. ``micro_batch_tokens``: of a pass. ``held_bytes``: what the trainer holds
    on a GPU. ``is_ahead``: the samples of the next step are drawn while a step trains. ``speculation``: of the engines. ``alike``:
    what prompts begin with in common, and ``begun`` of ``packed_samples.Samples``; ``replays_routing``: the trainer sends tokens to the experts to which an
    engine sent them."""

    prompts: int
    group: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    training: TrainingLayout
    engine: ServingLayout
    engines: int
    budget_tokens: int = 0
    rounds: int = 1
    passes: float = 0.0
    trained: int = 1
    minibatches: int = 1
    epochs: int = 1
    draft_passes: float = 0.0
    micro_batch_tokens: int = 8192
    held_bytes: int = 0
    is_ahead: bool = False
    speculation: Speculation | None = None
    alike: Prompts | None = None
    begun: float = 0.0
    replays_routing: bool = False

    def check(self) -> None:
        """Raises ``UserError`` for what cannot be predicted."""
        if self.engines < 1:
            raise UserError(f"engines are {self.engines}; a rollout needs at least 1")
        if self.prompts * self.group // self.engines > MOST_SEQUENCES:
            raise UserError(f"{self.prompts * self.group:,} completions on {self.engines} engines are more than {MOST_SEQUENCES:,} on each; add engines")


@dataclass(frozen=True, slots=True)
class RLStepTime:
    """Seconds of a step. ``tail``: of ``rollout``, after 9 of 10 completions have ended. ``longest_tokens``: of the longest completion of a step, on average;
    ``tokens``: that are trained. ``is_ahead``: rollout runs beside the other phases but the update of weights."""

    rollout: float
    tail: float
    weight_update: float
    switch: float
    inference: float
    training: float
    longest_tokens: float
    tokens: float
    is_ahead: bool

    @property
    def seconds(self) -> float:
        trained = self.inference + self.training
        if self.is_ahead:
            return max(self.rollout, trained) + self.weight_update
        return self.rollout + self.weight_update + self.switch + trained


def predict_rl_step(shapes: ModelShapes, hardware: Hardware, step: RLStep) -> RLStepTime:
    """Returns the time of a step. Raises ``UserError`` for an engine that does not fit."""
    step.check()
    rollout, tail = _rollout(shapes, hardware, step)
    samples, prompts, outputs = step.prompts * step.group, step.prompt_lengths, step.output_lengths
    tokens = samples * (prompts.mean + outputs.mean)
    once, forward = _training_seconds(shapes, hardware, step, tokens)
    gpus = step.training.gpus
    fits = step.is_ahead or step.held_bytes + predict_engine_memory(shapes, step.engine, hardware).weights <= hardware.memory_bytes / 2
    return RLStepTime(
        rollout=step.rounds * rollout,
        tail=step.rounds * tail,
        weight_update=weight_update_seconds(shapes, hardware, step.engine, gpus, step.engines),
        # Both directions of the bus, one after the other.
        switch=0.0 if fits else 2 * step.held_bytes / hardware.host_bandwidth,
        inference=step.passes * forward,
        training=step.trained * step.epochs * step.minibatches * once + step.draft_passes * forward,
        longest_tokens=_longest(step),
        tokens=tokens,
        is_ahead=step.is_ahead,
    )


def weight_update_seconds(shapes: ModelShapes, hardware: Hardware, engine: ServingLayout, gpus: int, engines: int) -> float:
    """Returns the seconds until all engines have the weights of the trainer's ``gpus``: to the host's memory, in which the ranks of a node write in
    parallel; to other nodes, through all cards of a node; from there to every GPU of an engine, which reads its part."""
    size = WEIGHT_BYTES * parameter_count(shapes)
    written = size / min(gpus, hardware.gpus_per_node) / hardware.host_bandwidth
    nodes = -(-max(gpus, engines * engine.tensor) // hardware.gpus_per_node)
    sent = size / (hardware.gpus_per_node * hardware.network_bandwidth) if nodes > 1 else 0.0
    return written + sent + size / engine.tensor / hardware.host_bandwidth


def _longest(step: RLStep) -> float:
    """Returns the mean tokens of the longest completion of a round."""
    longest = step.output_lengths.mean_longest(step.prompts * step.group)
    return min(longest, float(step.budget_tokens)) if step.budget_tokens else longest


def _rollout(shapes: ModelShapes, hardware: Hardware, step: RLStep) -> tuple[float, float]:
    """Returns the seconds of a round on the engine that has the longest completion, and those after nine in ten of its completions have ended."""
    requests = _round_requests(step)
    outputs = sum(each.output_tokens for each in requests)
    square = sum(each.output_tokens**2 for each in requests)
    computed = sum(each.prompt_tokens for each in requests) / len(requests)
    written = written_tokens(outputs / len(requests), square * len(requests) / outputs**2)
    context = step.prompt_lengths.mean + written
    memory = predict_engine_memory(shapes, step.engine, hardware)
    most = max(1, int(min(step.engine.max_num_seqs, memory.cache_tokens / held_tokens(shapes, computed + written))))
    steps = StepTable(shapes, step.engine, hardware, max(2.0, float(min(most, len(requests)))), context, step.prompt_lengths.mean / 2, step.speculation)
    seconds = play(requests, steps, most, step.engine.max_num_batched_tokens)
    ends = sorted(each.finished_s for each in requests)
    return seconds, seconds - ends[min(len(ends) - 1, int(TAIL_SHARE * len(ends)))]


def _round_requests(step: RLStep) -> list[PlayedRequest]:
    """Returns the requests of one engine in a round, in an order that mixes lengths. The samples of a group share their prompt, which the first computes."""
    count = max(1, math.ceil(step.prompts * step.group / step.engines))
    shares = [(index + 0.5) / count for index in range(count)]
    lengths = [max(1, round(step.output_lengths.quantile(share))) for share in shares]
    # The longest of all engines, whose mean the midpoint of the last share is not.
    lengths[-1] = max(1, round(step.output_lengths.mean_longest(step.prompts * step.group)))
    # A stride that is coprime to the count visits all of them, and no order of lengths is left.
    stride = next(size for size in range(max(1, int(count * 0.6180339887)), 2 * count + 1) if math.gcd(size, count) == 1)
    prompt, budget, requests = float(round(step.prompt_lengths.mean)), step.budget_tokens, list[PlayedRequest]()
    for index in range(count):
        length, own = lengths[(index * stride) % count], prompt if index % step.group == 0 else 0.0
        if not budget:
            requests.append(PlayedRequest(0.0, own, length))
            continue
        # In a steady state each of the rounds of a sample is one of this round, of samples that began earlier.
        requests += [
            PlayedRequest(0.0, own if begun == 0 else prompt + begun, min(budget, length - begun)) for begun in range(0, length, budget)
        ]
    return requests


def _training_seconds(shapes: ModelShapes, hardware: Hardware, step: RLStep, tokens: float) -> tuple[float, float]:
    """Returns the seconds of an update of one minibatch, and of a pass without gradients over the whole batch."""
    prompts, outputs, layout = step.prompt_lengths, step.output_lengths, step.training
    # The mean over tokens of the length of their sequence: its square is that of a prompt and an output that are independent.
    square = prompts.moment(2) + 2 * prompts.mean * outputs.mean + outputs.moment(2)
    sequence = max(1, round(square / (prompts.mean + outputs.mean)))
    data = layout.parallel.data
    micro_batch = max(1, step.micro_batch_tokens // sequence)
    each = tokens / step.minibatches / sequence / data
    micro_batch = min(micro_batch, max(1, math.ceil(each - ROUNDING)))
    passes = max(1, math.ceil(each / micro_batch - ROUNDING))
    shaped = replace(layout, sequence=sequence, micro_batch=micro_batch, global_batch=data * micro_batch * passes)
    time = predict_step_time(shapes, shaped, hardware)
    # The passes are those of whole micro-batches; operations scale with the tokens that are there, what is once a step does not.
    once = time.optimizer + time.data_communication
    filled = tokens / step.minibatches / (shaped.global_batch * sequence)
    update, inferred = _shares_computed(shapes, step)
    sent = time.tensor_communication + time.expert_communication + time.context_communication
    forward = inferred.computed(time) / 3 + inferred.tokens * (sent / 2 + (time.bubble + time.pipeline_communication) / 3)
    trained = update.computed(time) + update.tokens * (time.seconds - once - time.products - time.attention - time.memory_bound)
    return once + filled * trained, step.minibatches * filled * forward


class _Share(NamedTuple):
    """What a pass of Tandem's trainer computes, as shares of what it would if each sequence were computed by itself, with every token in all of it."""

    tokens: float = 1.0
    products: float = 1.0
    attention: float = 1.0

    def computed(self, time: StepTime) -> float:
        """Returns the seconds of what ``time`` has on the GPUs in a forward and a backward pass."""
        return self.products * time.products + self.attention * time.attention + self.tokens * time.memory_bound


def _shares_computed(shapes: ModelShapes, step: RLStep) -> tuple[_Share, _Share]:
    """Returns the shares of an update and of a pass without gradients; those of a trainer of the literature are whole."""
    layout = step.training
    if layout.trainer is None:
        return _Share(), _Share()
    trainer = replace(layout.trainer, precision=layout.precision, micro_batch_tokens=step.micro_batch_tokens)
    sharing = sharing_of(shapes, trainer, layout.parallel, step.replays_routing)
    mean, square = step.prompt_lengths.mean, step.prompt_lengths.moment(2)
    prompts = Prompts(mean, square) if step.alike is None else step.alike.with_lengths(mean, square)

    def share(count: float, packing: Packing, ends_early: bool) -> _Share:
        samples = Samples(prompts, count, step.group, step.output_lengths.mean, step.output_lengths.moment(2), step.begun)
        made, whole = packed(samples, packing), packed(samples, Packing(packing.most_tokens))
        products = made.tokens * _forward_flops(shapes, made.predicting(ends_early)) / (whole.tokens * _forward_flops(shapes, ALL_PREDICT))
        return _Share(made.tokens / whole.tokens, products, made.tokens * made.context / (whole.tokens * whole.context))

    return (
        share(step.prompts / step.minibatches, sharing.update, sharing.update_ends_early),
        share(step.prompts, sharing.inference, sharing.inference_ends_early),
    )


def _forward_flops(shapes: ModelShapes, predicting: Predicting) -> float:
    """Returns the operations of the products of a forward pass, a token at a time."""
    return sum(times * product.flops for product, times in forward_products(shapes, 1, 1.0, shapes.language_head, predicting=predicting).items())
