"""CPU seconds of the parts of a rollout of 256 sequences, and the rollout beside that of another checkout.

    python benchmarks/rollout_parts.py [--before CHECKOUT] [--rounds 5]

The model, the prompts and the settings are those of ``rollout.py``, at one thread: fixed and natural lengths. A part's seconds are those of its own
functions, without the parts that it calls; a timer around each call adds about a microsecond to it. With ``--before`` the engine of another checkout
of the repository takes turns with this one, each in a process of its own.
"""

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from machine import HERE, ROOT, Driven, best_and_median, machine, write_report
from options import parser as shared_parser
from start_model import recipe_with, warm_model

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.core.scheduler import Scheduler
from tandem.engine.engine import Engine
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.executor.model_runner import ModelRunner
from tandem.engine.llm import LLM
from tandem.engine.processing.input_processor import InputProcessor
from tandem.engine.processing.output_processor import OutputProcessor
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels.cpu.decode_step import CpuDecodeProgram, CpuRowRecorder
from tandem.kernels.cpu.dense_program import CpuDenseProgram
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.model.decoder import Decoder
from tandem.pod.prompts import prompt_source

SEQUENCES, TOKENS = 256, 32
PARTS: dict[str, list[tuple[type, tuple[str, ...]]]] = {
    "decoding steps in one call": [(CpuDecodeProgram, ("run",))],
    "all layers of a step with prompts": [(CpuDenseProgram, ("run",))],
    "products of the layers": [(CpuKernels, ("linear_packed", "gated_mlp_packed"))],
    "attention": [(CpuKernels, ("paged_attention",))],
    "rotary embedding, keys and values to the cache": [(CpuKernels, ("rope_to_cache",))],
    "norms": [(CpuKernels, ("rms_norm", "add_rms_norm"))],
    "the decoder's Python and torch": [(Decoder, ("forward", "logits"))],
    "softmax, draws and log-probabilities": [(CpuKernels, ("sample_rows",))],
    "random numbers and Python around the draws": [(ModelRunner, ("_sample", "_next_uniforms"))],
    "recording, ends of sequences": [(ModelRunner, ("synchronize", "_record")), (CpuRowRecorder, ("record",)), (EngineCore, ("_stopped",))],
    "scheduler and block tables": [(Scheduler, ("schedule", "finish")), (InputBatch, ("update",))],
    "input of a step": [(ModelRunner, ("_prepare_inputs", "_select")), (InputBatch, ("join",))],
    "requests": [(Engine, ("add_request", "check_request")), (InputProcessor, ("request", "start")), (Scheduler, ("add_group",)), (LLM, ("generate",))],
    "outputs": [(OutputProcessor, ("finish", "take_outputs", "record_first_tokens")), (InputBatch, ("read_back",))],
    "rest of a step": [(EngineCore, ("step", "_finish")), (ModelRunner, ("execute_model",)), (Engine, ("step",))],
}


class Timers:
    """CPU seconds of the thread by part, each without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            try:
                return call(*given, **named)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


def parts_of(model: Path, prompts: list[list[int]], rounds: int) -> dict[str, dict[str, float]]:
    """By lengths the seconds of each part, of the round that took least."""
    timers, llm, calls = Timers(), LLM(model), 0
    for part, places in PARTS.items():
        for owner, names in places:
            for name in names:
                setattr(owner, name, timers.around(part, getattr(owner, name)))
    least: dict[str, dict[str, float]] = {}
    for number in range(rounds + 1):
        for lengths in ("fixed", "natural"):
            calls += 1
            timers.seconds.clear()
            params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=lengths == "fixed")
            llm.generate([{"prompt_token_ids": prompt, "cache_salt": str(calls)} for prompt in prompts], params, use_tqdm=False)
            took = dict(timers.seconds)
            if number and sum(took.values()) < sum(least.get(lengths, {"": float("inf")}).values()):
                least[lengths] = took
    return least


def beside(before: Path, model: Path, prompts: Path, work: Path, rounds: int) -> list[str]:
    """The lines of the table of both checkouts."""
    command = [sys.executable, HERE / "peers" / "tandem_generate.py", model, prompts, str(TOKENS), "1"]
    lines = []
    with (
        Driven("before", command, 1, work / "a.log", {"PYTHONPATH": str(before.resolve())}) as first,
        Driven("after", command, 1, work / "b.log", {"PYTHONPATH": str(ROOT)}) as second,
    ):
        took: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for lengths in ("fixed", "natural"):
                for side in (first, second):
                    seconds = side.ask(f"{lengths} {SEQUENCES}")["cpu_s"]
                    took[lengths, side.name] += [seconds] if number else []
    for lengths in ("fixed", "natural"):
        own, other = (best_and_median(took[lengths, name]) for name in ("after", "before"))
        cells = [lengths, *(f"{best * 1e3:.1f} / {median * 1e3:.1f}" for best, median in (other, own))]
        lines.append(f"| {' | '.join(cells)} | **{other[0] / own[0]:.2f}** / {other[1] / own[1]:.2f} |")
    return lines


def main() -> None:
    parser = shared_parser(__doc__ or "", work="the start model is")
    parser.add_argument("--before", type=Path, help="another checkout of the repository")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    described, model = machine(), warm_model(options.work)
    with closing(prompt_source(recipe_with(), model)) as source:
        prompts = [list(prompt.token_ids) for step in range(8) for prompt in source.for_step(step)][:SEQUENCES]
    lines = ["# Parts of a rollout of 256 sequences", "", described, "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    if options.before is not None:
        path = options.work / "prompts.json"
        path.write_text(json.dumps(prompts), encoding="utf-8")
        lines += ["| lengths | before, CPU ms best / median | after | before / after |", "|---|---|---|---|"]
        lines += [*beside(options.before, model, path, options.work, options.rounds), ""]
    least = parts_of(model, prompts, options.rounds)
    totals = {lengths: sum(took.values()) for lengths, took in least.items()}
    lines += ["| part | fixed lengths, CPU ms | share | natural lengths, CPU ms | share |", "|---|---|---|---|---|"]
    for part in PARTS:
        cells = [f"{least[lengths].get(part, 0.0) * 1e3:.1f} | {least[lengths].get(part, 0.0) / totals[lengths]:.0%}" for lengths in ("fixed", "natural")]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines.append(f"| all | {totals['fixed'] * 1e3:.1f} |  | {totals['natural'] * 1e3:.1f} |  |")
    text = "\n".join(lines)
    print(text)
    print(f"wrote {write_report('rollout-parts', text, options.out)}")


if __name__ == "__main__":
    main()
