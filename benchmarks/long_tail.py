"""How much of a rollout's long tail partial rollouts and the order of dispatch take away.

    python benchmarks/long_tail.py [--steps 40] [--samples 256] [--most 2048] [--budget 256] [--without measured]

Lengths are Pareto distributed (shape 1.2, from 64 tokens, cut at ``--most``), 8 samples a prompt. Every sample of a prompt has a part of its length in common
with the others (a Gaussian copula of correlation 0.7), so that the past of a prompt says something; each prompt was drawn once before.

*Simulated*: 8 engines, one H100 each, behind the dispatcher (``tandem.rl.rollout.dispatcher``) and the rounds of a run (``tandem.rl.rollout.partial``). Time is
a model, not a measurement: one step of decoding reads all weights and the keys and values of the batch, at 0.8 of the memory's bandwidth, or computes, at 0.6
of the peak, whichever takes longer (the roofline of Williams et al., 2009; 3.35 TB/s and 989.5 TFLOP/s in bf16: NVIDIA's datasheet of the H100 SXM), for
Qwen2.5-7B in bf16 (7.62e9 parameters, 28 layers, 4 heads of keys and values of 128). Tokens that a continued sample has already are computed again, at 0.6 of
the peak. Training, inference and the update of the weights are left out.

*Measured*: the engine on one thread of this CPU, with the same lengths over 4 and a model of random weights: tokens a CPU second of the synchronous rollout
and of partial ones, the speed by batch, and the bound that follows: every step as fast as its batch allows.
"""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from machine import machine, write_report
from options import parser as shared_parser
from start_model import recipe_with

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, Continuation
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.create_model import create_model
from tandem.rl.rollout.dispatcher import Dispatcher, GroupLoad
from tandem.rl.rollout.partial import cut_by_budget, groups_to_begin, taken, with_drawn
from tandem.types import FinishReason, ReplayBuffer, Sample, WeightVersion

GROUP, SHAPE, FROM, CORRELATION, ENGINES = 8, 1.2, 64, 0.7, 8
PARAMETERS, LAYERS, KV_WIDTH = 7.62e9, 28, 4 * 128
BANDWIDTH, PEAK, BANDWIDTH_SHARE, PEAK_SHARE = 3.35e12, 989.5e12, 0.8, 0.6
PROMPT_TOKENS = 128
NORMAL = statistics.NormalDist()


# -- lengths -----------------------------------------------------------------------------------------------------------


def lengths_of(prompt: int, drawn: int, most: int) -> list[int]:
    """Returns the lengths of the samples of ``prompt`` the ``drawn``-th time that it is drawn."""
    common = random.Random(f"prompt {prompt}").gauss(0, 1)
    own = random.Random(f"prompt {prompt} {drawn}")
    lengths = []
    for _ in range(GROUP):
        place = NORMAL.cdf(math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * own.gauss(0, 1))
        lengths.append(min(most, int(FROM * (1 - place) ** (-1 / SHAPE)) if place < 1 else most))
    return lengths


# -- the simulation ----------------------------------------------------------------------------------------------------


def decode_s(sequences: int, tokens: float) -> float:
    """Returns the seconds of one step of ``sequences`` sequences with ``tokens`` tokens in the cache, all together."""
    read = 2 * PARAMETERS + 2 * 2 * LAYERS * KV_WIDTH * tokens
    return max(read / (BANDWIDTH_SHARE * BANDWIDTH), 2 * PARAMETERS * sequences / (PEAK_SHARE * PEAK))


def prefill_s(tokens: float) -> float:
    return 2 * PARAMETERS * tokens / (PEAK_SHARE * PEAK)


class SimulatedEngine:
    """``clock``: seconds since the rollout began. ``running``: [group, tokens left, tokens in the cache] of each sequence."""

    def __init__(self) -> None:
        self.clock, self.running = 0.0, list[list[int]]()

    def begin(self, group: int, sequences: Sequence[tuple[int, int]]) -> None:
        """Begins the sequences of a group: tokens to draw, and tokens drawn before."""
        self.clock += prefill_s(PROMPT_TOKENS + sum(before for _, before in sequences))
        self.running += [[group, left, PROMPT_TOKENS + before] for left, before in sequences]

    def until_one_ends(self) -> set[int]:
        """Draws tokens until a sequence ends. Returns the groups that have no sequence left."""
        steps = min(sequence[1] for sequence in self.running)
        cached = sum(sequence[2] for sequence in self.running) + len(self.running) * steps / 2
        self.clock += steps * decode_s(len(self.running), cached)
        for sequence in self.running:
            sequence[1] -= steps
            sequence[2] += steps
        ended = {sequence[0] for sequence in self.running if not sequence[1]}
        self.running = [sequence for sequence in self.running if sequence[1]]
        return ended - {sequence[0] for sequence in self.running}


def rollout_s(groups: Sequence[Sequence[tuple[int, int]]], expected: Sequence[float], capacity: int) -> float:
    """Returns the seconds until all ``groups``, as for ``SimulatedEngine.begin``, are drawn. ``expected``: the tokens of the longest sequence of each."""
    loads = [GroupLoad(len(group), longest, len(group) * longest) for group, longest in zip(groups, expected, strict=True)]
    dispatcher, engines = Dispatcher(loads, ENGINES, capacity), [SimulatedEngine() for _ in range(ENGINES)]

    def hand_out(now: float) -> None:
        for number, engine in enumerate(engines):
            for group in dispatcher.take(number):
                engine.clock = engine.clock if engine.running else max(engine.clock, now)
                engine.begin(group, groups[group])

    hand_out(0.0)
    while not dispatcher.is_done:
        number = min((number for number, engine in enumerate(engines) if engine.running), key=lambda number: engines[number].clock)
        for group in engines[number].until_one_ends():
            dispatcher.finish(number, group)
        hand_out(engines[number].clock)
    return max(engine.clock for engine in engines)


def synchronous_s(steps: int, prompts: int, most: int, capacity: int, expect: Callable[[int], float]) -> float:
    """Returns the mean seconds of a step that draws all samples of its prompts. ``expect``: the expected longest sample of a prompt."""
    took = []
    for step in range(steps):
        chosen = range(step * prompts, (step + 1) * prompts)
        groups = [[(length, 0) for length in lengths_of(prompt, 1, most)] for prompt in chosen]
        took.append(rollout_s(groups, [expect(prompt) for prompt in chosen], capacity))
    return statistics.fmean(took)


def partial_s(steps: int, prompts: int, most: int, capacity: int, budget: int) -> tuple[float, float, float]:
    """Returns the mean seconds of a step with partial rollouts, the share of its tokens that older weights drew, and the groups in the replay buffer, after as
    many steps of warm-up as the longest sample has budgets."""
    buffer, took, old, waiting, warm_up = ReplayBuffer(), list[float](), list[bool](), list[int](), -(-most // budget)
    for step in range(warm_up + steps):
        seconds, in_step = 0.0, list[Sample]()
        while (wanted := prompts - len({sample.prompt_id for sample in in_step})) > 0:
            begun = groups_to_begin(buffer, wanted, (), None)
            fresh = [new_sample(step, buffer.started + number, index) for number in range(begun) for index in range(GROUP)]
            drawn, groups = list[Sample](), dict[str, list[tuple[int, int]]]()
            for sample in (*buffer.unfinished, *fresh):
                before, length = len(sample.token_ids), lengths_of(int(sample.prompt_id), 1, most)[sample.index]
                now = min(length, before + budget)
                groups.setdefault(sample.prompt_id, []).append((now - before, before))
                drawn.append(cut_by_budget(continued(sample, now, step, now == length), most + 1))
            seconds += rollout_s(list(groups.values()), [float(budget)] * len(groups), capacity)
            new, buffer = taken(with_drawn(buffer, drawn, buffer.started + begun), wanted)
            in_step += new
        if step >= warm_up:
            took.append(seconds)
            old += [version.step < step for sample in in_step for version in sample.sampled_weight_versions]
            waiting.append(len(buffer.groups))
    return statistics.fmean(took), statistics.fmean(old), statistics.fmean(waiting)


def new_sample(step: int, prompt: int, index: int) -> Sample:
    return Sample(f"{step}/{prompt}/{index}", str(prompt), index, (0,), (), (), (), (), FinishReason.LENGTH, "")


def continued(sample: Sample, length: int, step: int, is_done: bool) -> Sample:
    more = length - len(sample.token_ids)
    return replace(
        sample, token_ids=(0,) * length, logprobs=(0.0,) * length, sampling_logprobs=(0.0,) * length,
        weight_versions=(*sample.weight_versions, *(WeightVersion(0, step),) * more), finish_reason=FinishReason.STOP if is_done else FinishReason.LENGTH,
    )  # fmt: skip


def simulated(steps: int, samples: int, most: int, budget: int) -> list[str]:
    prompts = samples // GROUP
    lengths = [length for prompt in range(steps * prompts) for length in lengths_of(prompt, 1, most)]
    lines = [
        f"{ENGINES} simulated H100, {samples} samples a step ({prompts} prompts of {GROUP}), mean length {statistics.fmean(lengths):.0f}, {steps} steps.", "",
        "| sequences at once on an engine | dispatch | seconds of a rollout | against the synchronous one |", "|---|---|---|---|",
    ]
    for capacity in (samples // ENGINES, samples // ENGINES // 4):
        plain = synchronous_s(steps, prompts, most, capacity, lambda prompt: 0.0)
        past = synchronous_s(steps, prompts, most, capacity, lambda prompt: float(max(lengths_of(prompt, 0, most))))
        known = synchronous_s(steps, prompts, most, capacity, lambda prompt: float(max(lengths_of(prompt, 1, most))))
        seconds, old, waiting = partial_s(steps, prompts, most, capacity, budget)
        for name, took in (("synchronous", plain), ("longest first, by the past", past), ("longest first, lengths known", known)):
            lines.append(f"| {capacity} | {name} | {took:.2f} | {plain / took:.2f}x |")
        lines.append(f"| {capacity} | partial, {budget} tokens a round | {seconds:.2f} | {plain / seconds:.2f}x |")
    lines += [
        "",
        "An engine whose memory holds all of its samples takes one step of decoding in about the same time for 1 and 32 of them, so the longest sample "
        "alone decides, and no order on policy helps. The order counts where samples wait for room.", "",
        f"With partial rollouts {old:.0%} of a step's tokens were drawn by older weights, and {waiting:.0f} groups wait in the replay buffer.", "",
        "Targets: 1.9x with partial rollouts, 1.4x on policy.",
    ]
    return lines


# -- the measurement ---------------------------------------------------------------------------------------------------


def draw(llm: LLM, requests: Sequence[tuple[int, CompletionOutput | None]]) -> tuple[list[CompletionOutput], float]:
    """Draws each request, a length and what it continues. Returns the completions and CPU seconds."""
    began, engine, answers = time.process_time(), llm.engine, dict[str, CompletionOutput]()
    for number, (length, before) in enumerate(requests):
        continues = None if before is None else Continuation(before.token_ids, before.raw_logprobs, before.sampling_logprobs, before.weight_versions)
        engine.add_request(str(number), [5, 6, 7], SamplingParams(max_tokens=length, ignore_eos=True, seed=1), key=number, continues=continues)
    while len(answers) < len(requests):
        answers |= {output.request_id: output.outputs[0] for output in engine.step()}
    return [answers[str(number)] for number in range(len(requests))], time.process_time() - began


def measured(samples: int, most: int, budget: int) -> list[str]:
    torch.set_num_threads(1)
    lengths = [max(1, length // 4) for prompt in range(samples // GROUP) for length in lengths_of(prompt, 1, most)]
    budget, total = budget // 4, sum(lengths)
    with tempfile.TemporaryDirectory() as folder:
        create = recipe_with([f"model.create.max_position_embeddings={most // 4 + 64}"]).model.create
        assert create is not None
        create_model(create, 0, Path(folder) / "model")
        with LLM(Path(folder) / "model", max_num_seqs=samples, kv_cache_tokens=samples * (most // 4 + 64)) as llm:
            batches = [batch for batch in (1, 4, 16, 64, 256) if batch <= samples]
            draw(llm, [(8, None)] * batches[-1])
            step_s = {batch: draw(llm, [(64, None)] * batch)[1] / 64 for batch in batches}
            _, plain = draw(llm, [(length, None) for length in lengths])
            begun: list[CompletionOutput | None] = [None] * samples
            rounds, unfinished = list[float](), list(range(samples))
            while unfinished:
                drawn, took = draw(llm, [(min(lengths[place], tokens_of(begun[place]) + budget), begun[place]) for place in unfinished])
                rounds.append(took)
                for place, output in zip(unfinished, drawn, strict=True):
                    begun[place] = output
                unfinished = [place for place in unfinished if tokens_of(begun[place]) < lengths[place]]
    bound = sum(fastest(step_s, sum(length > step for length in lengths)) for step in range(max(lengths)))
    lines = ["", "| batch | tokens / CPU s |", "|---|---|", *(f"| {batch} | {batch / took:,.0f} |" for batch, took in step_s.items()), ""]
    lines += [
        f"Synchronous: {total} tokens in {plain:.2f} CPU s, {total / plain:,.0f} a second; the speed by batch allows {bound:.2f} s, of which "
        f"{bound / plain:.2f} is reached.",
        f"The same samples in {len(rounds)} rounds of {budget} tokens: {sum(rounds):.2f} CPU s. A run waits for one round a step.",
    ]
    return lines


def tokens_of(output: CompletionOutput | None) -> int:
    return 0 if output is None else len(output.token_ids)


def fastest(step_s: dict[int, float], batch: int) -> float:
    """Returns the seconds of one step of ``batch`` sequences, between the measured ones."""
    below, above = max(b for b in step_s if b <= max(batch, 1)), min((b for b in step_s if b >= batch), default=max(step_s))
    share = 0.0 if above == below else (batch - below) / (above - below)
    return step_s[below] + share * (step_s[above] - step_s[below])


def main() -> None:
    options_parser = shared_parser(__doc__ or "")
    for name, default in (("steps", 40), ("samples", 256), ("most", 2048), ("budget", 256)):
        options_parser.add_argument(f"--{name}", type=int, default=default)
    options_parser.add_argument("--without", choices=("simulated", "measured"), action="append", default=[])
    options = options_parser.parse_args()
    lines = ["# The long tail of a rollout", "", machine(), ""]
    if "simulated" not in options.without:
        lines += simulated(options.steps, options.samples, options.most, options.budget)
    if "measured" not in options.without:
        lines += measured(options.samples, options.most, options.budget)
    print("\n".join(lines))
    print(f"wrote {write_report('long-tail', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
