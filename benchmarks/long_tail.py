"""How much of a rollout's long tail partial rollouts, the order of dispatch and drafts from the group's own answers take away.

    python benchmarks/long_tail.py [--steps 40] [--samples 256] [--most 2048] [--budget 256] [--run RUN] [--without measured]

Lengths are Pareto distributed (shape 1.2, from 64 tokens, cut at ``--most``), 8 samples a prompt. Every sample of a prompt has a part of its length in common
with the others (a Gaussian copula of correlation 0.7), so that the past of a prompt says something; each prompt was drawn once before.

*Simulated*: 8 engines, one H100 each, behind the dispatcher (``tandem.rl.rollout.dispatcher``) and the rounds of a run (``tandem.rl.rollout.partial``). Time is
a model, not a measurement: one step of decoding reads all weights and the keys and values of the batch, at 0.8 of the memory's bandwidth, or computes, at 0.6
of the peak, whichever takes longer (the roofline of Williams et al., 2009; 3.35 TB/s and 989.5 TFLOP/s in bf16: NVIDIA's datasheet of the H100 SXM), for
Qwen2.5-7B in bf16 (7.62e9 parameters, 28 layers, 4 heads of keys and values of 128). Tokens that a continued sample has already are computed again, at 0.6 of
the peak. Training, inference and the update of the weights are left out.

*Drafts* (``speculative_config: {method: suffix}``) need answers of a model that has learned something: with ``--run``, the folder of a run of reinforcement
learning, its model draws groups of its training prompts at temperature 1, in turns with and without drafts. What was accepted there, and the time of
proposing, enter the simulation: a sample draws as many tokens a step as it did in that run, with its siblings still running and after they have ended, and
a step verifies as many draft tokens more. Whether answers of 2,048 tokens of a large model resemble each other as much is not known from it.

*Measured*: the engine on one thread of this CPU, with the same lengths over 4 and a model of random weights: tokens a CPU second of the synchronous rollout
and of partial ones, the speed by batch, and the bound that follows: every step as fast as its batch allows.
"""

import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from machine import machine, write_report
from options import parser as shared_parser
from start_model import recipe_with

from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestOutput
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.create_model import create_model
from tandem.rl.rollout.dispatcher import Dispatcher, GroupLoad
from tandem.rl.rollout.partial import cut_by_budget, groups_to_begin, taken, with_drawn
from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason, Prompt, ReplayBuffer, Sample, WeightVersion

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


@dataclass(frozen=True, slots=True)
class Drafts:
    """A step of one sequence: tokens that it ``drawn``, tokens that it ``fed``, drafts included, and the seconds on the host to propose them."""

    drawn: float = 1.0
    fed: float = 1.0
    host_s: float = 0.0


NONE = {False: Drafts(), True: Drafts()}


def decode_s(fed: float, tokens: float) -> float:
    """Returns the seconds of one step that feeds ``fed`` tokens to sequences with ``tokens`` tokens in the cache, all together."""
    read = 2 * PARAMETERS + 2 * 2 * LAYERS * KV_WIDTH * tokens
    return max(read / (BANDWIDTH_SHARE * BANDWIDTH), 2 * PARAMETERS * fed / (PEAK_SHARE * PEAK))


def prefill_s(tokens: float) -> float:
    return 2 * PARAMETERS * tokens / (PEAK_SHARE * PEAK)


class SimulatedEngine:
    """``clock``: seconds since the rollout began. ``running``: [group, tokens left, tokens in the cache] of each sequence. ``drafts``: by whether a sequence is
    the last of its group."""

    def __init__(self, drafts: "dict[bool, Drafts]") -> None:
        self.clock, self.running, self.drafts = 0.0, list[list[float]](), drafts

    def begin(self, group: int, sequences: Sequence[tuple[int, int]]) -> None:
        """Begins the sequences of a group: tokens to draw, and tokens drawn before."""
        self.clock += prefill_s(PROMPT_TOKENS + sum(before for _, before in sequences))
        self.running += [[group, left, PROMPT_TOKENS + before] for left, before in sequences]

    def until_one_ends(self) -> set[int]:
        """Draws tokens until a sequence ends. Returns the groups that have no sequence left."""
        siblings = Counter(sequence[0] for sequence in self.running)
        of_each = [self.drafts[siblings[sequence[0]] == 1] for sequence in self.running]
        steps = min(math.ceil(sequence[1] / own.drawn) for sequence, own in zip(self.running, of_each, strict=True))
        cached = sum(sequence[2] + own.drawn * steps / 2 for sequence, own in zip(self.running, of_each, strict=True))
        self.clock += steps * (decode_s(sum(own.fed for own in of_each), cached) + sum(own.host_s for own in of_each))
        for sequence, own in zip(self.running, of_each, strict=True):
            drawn = min(steps * own.drawn, sequence[1])
            sequence[1] -= drawn
            sequence[2] += drawn
        ended = {int(sequence[0]) for sequence in self.running if sequence[1] < 1e-9}
        self.running = [sequence for sequence in self.running if sequence[1] >= 1e-9]
        return ended - {int(sequence[0]) for sequence in self.running}


def rollout_s(groups: Sequence[Sequence[tuple[int, int]]], expected: Sequence[float], capacity: int, drafts: dict[bool, Drafts] = NONE) -> float:
    """Returns the seconds until all ``groups``, as for ``SimulatedEngine.begin``, are drawn. ``expected``: the tokens of the longest sequence of each."""
    loads = [GroupLoad(len(group), longest, len(group) * longest) for group, longest in zip(groups, expected, strict=True)]
    dispatcher, engines = Dispatcher(loads, ENGINES, capacity), [SimulatedEngine(drafts) for _ in range(ENGINES)]

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


def synchronous_s(steps: int, prompts: int, most: int, capacity: int, expect: Callable[[int], float], drafts: dict[bool, Drafts] = NONE) -> float:
    """Returns the mean seconds of a step that draws all samples of its prompts. ``expect``: the expected longest sample of a prompt."""
    took = []
    for step in range(steps):
        chosen = range(step * prompts, (step + 1) * prompts)
        groups = [[(length, 0) for length in lengths_of(prompt, 1, most)] for prompt in chosen]
        took.append(rollout_s(groups, [expect(prompt) for prompt in chosen], capacity, drafts))
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


def simulated(steps: int, samples: int, most: int, budget: int, drafts: dict[bool, Drafts] | None) -> list[str]:
    prompts = samples // GROUP
    lengths = [length for prompt in range(steps * prompts) for length in lengths_of(prompt, 1, most)]
    lines = [
        f"{ENGINES} simulated H100, {samples} samples a step ({prompts} prompts of {GROUP}), mean length {statistics.fmean(lengths):.0f}, {steps} steps.", "",
        "| sequences at once on an engine | dispatch | seconds of a rollout | against the synchronous one |", "|---|---|---|---|",
    ]
    for capacity in (samples // ENGINES, samples // ENGINES // 4):
        plain = synchronous_s(steps, prompts, most, capacity, lambda prompt: 0.0)
        by_past = lambda prompt: float(max(lengths_of(prompt, 0, most)))
        past = synchronous_s(steps, prompts, most, capacity, by_past)
        known = synchronous_s(steps, prompts, most, capacity, lambda prompt: float(max(lengths_of(prompt, 1, most))))
        seconds, old, waiting = partial_s(steps, prompts, most, capacity, budget)
        rows = [("synchronous", plain), ("longest first, by the past", past), ("longest first, lengths known", known)]
        if drafts is not None:
            rows.append(("drafts of the group", synchronous_s(steps, prompts, most, capacity, lambda prompt: 0.0, drafts)))
            rows.append(("longest first, by the past, and drafts of the group", synchronous_s(steps, prompts, most, capacity, by_past, drafts)))
        for name, took in rows:
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


# -- drafts ------------------------------------------------------------------------------------------------------------


SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}


def groups_drawn(llm: LLM, prompts: Sequence[Prompt], most: int, watch: Callable[[], None] = lambda: None) -> tuple[list[list[int]], float]:
    """Draws ``GROUP`` samples of each prompt at temperature 1. Returns their tokens and CPU seconds; calls ``watch`` after each step."""
    began, engine, answers = time.process_time(), llm.engine, dict[str, RequestOutput]()
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt.id, prompt.token_ids, SamplingParams(n=GROUP, max_tokens=most, seed=1), key=number)
    while engine.has_unfinished_requests:
        answers |= {output.request_id: output for output in engine.step()}
        watch()
    return [list(sample.token_ids) for prompt in prompts for sample in answers[prompt.id].outputs], time.process_time() - began


class AcceptanceMeter:
    """What a group's samples draw and feed in a step, by whether one of them alone is left."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self._running = llm.engine, GROUP
        self._before = (0, 0, 0)
        self.counts = {False: [0, 0, 0], True: [0, 0, 0]}
        """Steps of a sequence, draft tokens that it was fed, and those that were accepted."""

    def begin_group(self) -> None:
        """Notes that the next step begins a group."""
        self._running = GROUP

    def __call__(self) -> None:
        stats = self._engine.cumulative_stats()
        rows, now = self._running, (stats.drawn_tokens, stats.speculation.proposed, stats.speculation.accepted)
        drawn, proposed, accepted = (new - old for new, old in zip(now, self._before, strict=True))
        if drawn and rows:
            count = self.counts[rows == 1]
            for place, value in enumerate((drawn - accepted, proposed, accepted)):
                count[place] += value
        self._before, self._running = now, self._engine.stats().num_requests_running

    def drafts(self, host_s: float) -> dict[bool, Drafts]:
        result = {alone: Drafts(1 + accepted / steps, 1 + proposed / steps, host_s) for alone, (steps, proposed, accepted) in self.counts.items() if steps}
        return {False: result[False], True: result.get(True, result[False])}


def measured_drafts(run: Path, prompts: int, rounds: int) -> tuple[list[str], dict[bool, Drafts]]:
    """Draws groups of the first ``prompts`` prompts of ``run`` with its start model, all at once and in turns with and without drafts, and one after the other
    for what is accepted. Returns lines for the report and what enters the simulation."""
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    folder, most = run / "sft" / "model", int(recipe["rollout"]["max_tokens"])
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        drawn = {sample.prompt_id: sample.prompt_token_ids for step in journal.journalled_steps() for sample in journal.samples(step) or ()}
    chosen = [Prompt(name, "", tokens) for name, tokens in list(drawn.items())[:prompts]]
    sizes = {"max_num_seqs": prompts * GROUP, "kv_cache_tokens": prompts * GROUP * (most + 64)}
    seconds: dict[str, list[float]] = {"off": [], "suffix": []}
    with LLM(folder, **sizes) as plain, LLM(folder, speculative_config={"method": "suffix"}, **sizes) as drafted:
        for _ in range(rounds):
            expected, took = groups_drawn(plain, chosen, most)
            seconds["off"].append(took)
            # The answers of earlier rounds are the same tokens, which no run has; each round begins without them.
            drafted.engine._runner.proposer.indices.clear()
            tokens, took = groups_drawn(drafted, chosen, most)
            seconds["suffix"].append(took)
            assert tokens == expected, "drafts changed a token"
        speculation = drafted.engine.cumulative_stats().speculation
    with LLM(folder, speculative_config={**SUFFIX, "disable_by_batch_size": GROUP, "adaptive": False}, **sizes) as alone:
        meter, proposer = AcceptanceMeter(alone), alone.engine._runner.proposer
        clock, calls, propose = [0.0], [0], proposer.propose

        def timed(sequences: list[Any], counts: list[int]) -> list[list[int]]:
            began = time.process_time()
            drafts = propose(sequences, counts)
            clock[0] += time.process_time() - began
            calls[0] += len(sequences)
            return drafts

        proposer.propose = timed
        host_s = []
        for prompt in chosen:
            clock[0], calls[0] = 0.0, 0
            meter.begin_group()
            groups_drawn(alone, [prompt], most, meter)
            host_s.append(clock[0] / max(calls[0], 1))
    # The machine is shared: the fastest group has the least of others in it.
    drafts = meter.drafts(min(host_s))
    lengths = [len(tokens) for tokens in expected]
    lines = [
        "## Drafts of the group, measured", "",
        f"The start model of a run of recipe {run.name}: {len(chosen)} prompts, {GROUP} samples of each at temperature 1, mean length "
        f"{statistics.fmean(lengths):.0f}, longest {max(lengths)}. The same tokens with and without drafts.", "",
        "| one group at a time, up to 8 draft tokens | steps of a sequence | draft tokens a step | accepted | tokens a step |", "|---|---|---|---|---|",
    ]
    for is_alone, (steps, proposed, accepted) in meter.counts.items():
        name = "one sample left" if is_alone else "siblings running"
        share = f"{accepted / proposed:.0%}" if proposed else "-"
        lines.append(f"| {name} | {steps} | {proposed / max(steps, 1):.2f} | {share} | {1 + accepted / max(steps, 1):.2f} |")
    best, median = (f(seconds["off"]) / f(seconds["suffix"]) for f in (min, statistics.median))
    lines += [
        "", f"Proposing took {1e6 * drafts[False].host_s:.0f} us of CPU time for a sequence and step, with its share of the index (the fastest group).", "",
        f"All {prompts * GROUP} samples at once, drafts where the measured time of steps says that they pay: {best:.2f}x the speed without (best of {rounds}; "
        f"median {median:.2f}x), in CPU seconds of one thread; {speculation.accepted} of {speculation.proposed} draft tokens accepted.", "",
    ]
    return lines, drafts


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
    options_parser.add_argument("--run", type=Path, help="the folder of a run, whose model measures drafts")
    options_parser.add_argument("--prompts", type=int, default=16)
    options_parser.add_argument("--rounds", type=int, default=3)
    options_parser.add_argument("--without", choices=("simulated", "measured"), action="append", default=[])
    options = options_parser.parse_args()
    lines, drafts = ["# The long tail of a rollout", "", machine(), ""], None
    if options.run is not None:
        torch.set_num_threads(1)
        measured_lines, drafts = measured_drafts(options.run, options.prompts, options.rounds)
        lines += measured_lines
    if "simulated" not in options.without:
        lines += ["## Simulated", "", *simulated(options.steps, options.samples, options.most, options.budget, drafts)]
    if "measured" not in options.without:
        lines += ["", "## Measured, random weights"]
        lines += measured(options.samples, options.most, options.budget)
    print("\n".join(lines))
    print(f"wrote {write_report('long-tail', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
