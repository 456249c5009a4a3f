"""What the engine benchmark measures: each function one part, as plain data that goes to the state file."""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from engine_models import flops, folder_of, gguf_of
from machine import HERE, Driven

VLLM = {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
"""In one process, without pinning its threads to cores that others may use."""
UNCHUNKED = 8192
FIRST = {"sequences": 64, "prompt": 512, "new": 16}
"""Requests that are sent at once, the tokens of their prompts, and those that each goes on to draw beside the prompts of the others."""
FIRST_BUDGET = 4096
"""Tokens a step of every side there."""
LLAMA_KINDS = {"int8": "Q8_0", "w4a8": "Q4_K_M"}
"""By our quantization llama.cpp's of as many bits, with inputs of 8 bits on both sides. Its head has 8 and 6 bits, ours only with ``+head``."""
Part = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Sequences of a call, prompt and new tokens of each, and counted rounds."""

    sequences: int = 64
    prompt: int = 32
    new: int = 128
    rounds: int = 3


@dataclass(frozen=True)
class Sides:
    """How each side is started: the interpreters by peer (those that are there), and what ours is told besides."""

    work: Path
    pythons: dict[str, str]
    vllm_settings: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, dict[str, Any]] = field(default_factory=lambda: {"tandem": {}})

    def tandem(self, model: str, threads: int, name: str = "tandem", **settings: Any) -> Driven:
        told = json.dumps({**self.ours[name], **settings})
        return self._start(name, [sys.executable, "tandem_engine.py", folder_of(model, self.work), str(threads), told], threads)

    def vllm(self, model: str, threads: int, **settings: Any) -> Driven:
        told = json.dumps({**self.vllm_settings, **settings})
        return self._start("vLLM", [self.pythons["vLLM"], "vllm_engine.py", folder_of(model, self.work), str(threads), told], threads, VLLM)

    def transformers(self, model: str, threads: int) -> Driven:
        command = [self.pythons["transformers"], "transformers_engine.py", folder_of(model, self.work), str(threads)]
        return self._start("transformers", command, threads)

    def llama(self, model: str, kind: str, threads: int, sequences: int) -> Driven:
        python = self.pythons["llama.cpp"]
        file = gguf_of(model, kind, self.work, python)
        return self._start(f"llama.cpp {kind}", [python, "llama_engine.py", file, str(threads), str(sequences)], threads)

    def peers(self, names: Sequence[str]) -> dict[str, Callable[..., Driven]]:
        """How to start those of ``names`` that are there."""
        known: dict[str, Callable[..., Driven]] = {"vLLM": self.vllm, "transformers": self.transformers}
        return {name: known[name] for name in names if name in self.pythons}

    def _start(self, name: str, command: list[Any], threads: int, extra: dict[str, str] | None = None) -> Driven:
        python, script, *given = command
        return Driven(name, [python, HERE / "peers" / script, *given], threads, self.work / f"engine-{name.replace(' ', '-')}.log", extra)


def throughput(sides: Sides, model: str, threads: int, load: Workload) -> Part:
    """One call of the whole workload, the same with one new token (the time to first token of all), and one sequence with one
    new token, on every side in turn; then whether greedy tokens agree, and the most memory each has held."""
    calls = count(1)
    with ExitStack() as stack:
        running = {name: stack.enter_context(sides.tandem(model, threads, name)) for name in sides.ours}
        for name, start in sides.peers(("vLLM", "transformers")).items():
            running[name] = stack.enter_context(start(model, threads))
        found: dict[str, dict[str, list[Part]]] = {name: {"all": [], "first": [], "alone": []} for name in running}
        rates: list[Part] = []
        for side in running.values():
            side.ask(f"generate {next(calls)} {load.sequences} {load.prompt} 2 1.0")
        for _ in range(load.rounds):
            rates.append(running["tandem"].ask("rate"))
            for kind, sequences, new in (("all", load.sequences, load.new), ("first", load.sequences, 1), ("alone", 1, 1)):
                call = next(calls)
                for name, side in running.items():
                    took = side.ask(f"generate {call} {sequences} {load.prompt} {new} 1.0")
                    assert took["tokens"] == sequences * new, (name, took)
                    found[name][kind].append(took)
        greedy = agreement(running, next(calls), min(8, load.sequences), load.prompt, min(load.new, 32))
        peak = {name: side.ask(f"generate {next(calls)} 1 {load.prompt} 1 1.0")["peak_bytes"] for name, side in running.items()}
    work, of_first = (flops(model, load.sequences, load.prompt, new) for new in (load.new, 1))
    return {"sides": found, "rate": rates, "greedy": greedy, "peak_bytes": peak, "flops": work, "flops_of_first": of_first}


def agreement(running: dict[str, Driven], call: int, sequences: int, prompt: int, new: int) -> Part:
    """How many greedy completions are those of ours, by side; for each that is not, how near a tie its first difference was
    (transformers' logit of our token less that of theirs, and the spread of its logits)."""
    made = {name: side.ask(f"generate {call} {sequences} {prompt} {new} 0") for name, side in running.items()}
    prompts = running["tandem"].ask(f"prompts {call} {sequences} {prompt}")["prompts"]
    found: Part = {"sequences": sequences, "new": new, "equal": {}, "first_differences": []}
    for name, answer in made.items():
        pairs = list(zip(prompts, made["tandem"]["token_ids"], answer["token_ids"], strict=True))
        found["equal"][name] = sum(ours == theirs for _, ours, theirs in pairs)
        for given, ours, theirs in pairs:
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                difference = {"side": name, "at": at}
                if "transformers" in running:
                    told = " ".join(map(str, [ours[at], theirs[at], *given, *ours[:at]]))
                    difference |= running["transformers"].ask(f"gap {told}")
                found["first_differences"].append(difference)
    found["distinct_tokens"] = statistics.mean(len(set(tokens)) for tokens in made["tandem"]["token_ids"])
    return found


def start(sides: Sides, model: str, threads: int, load: Workload) -> Part:
    """From the start of the process to the first token of one sequence, the file in the page cache (it was read before)."""
    folder_of(model, sides.work).joinpath("model.safetensors").read_bytes()
    starts: dict[str, Callable[..., Driven]] = {"tandem": sides.tandem, **sides.peers(("vLLM", "transformers"))}
    found: dict[str, list[Part]] = {name: [] for name in starts}
    for _ in range(load.rounds):
        for name, begin in starts.items():
            with begin(model, threads) as side:
                first = side.ask(f"generate 1 1 {load.prompt} 1 1.0")
                wall = side.start_s + first["wall_s"]
                found[name].append({"wall_s": wall, "cpu_s": first["process_cpu_s"], "peak_bytes": first["peak_bytes"]})
    return {"sides": found}


def llama(sides: Sides, model: str, threads: int, load: Workload) -> Part:
    """The workload at batch 1 and 16 beside llama.cpp on F32, Q8_0 and Q4_K_M."""
    calls = count(1)
    with ExitStack() as stack:
        running = {name: stack.enter_context(sides.tandem(model, threads, name)) for name in sides.ours}
        for kind in ("F32", *LLAMA_KINDS.values()):
            running[f"llama.cpp {kind}"] = stack.enter_context(sides.llama(model, kind, threads, 16))
        found: Part = {name: {"1": [], "16": []} for name in running}
        for side in running.values():
            side.ask(f"generate {next(calls)} 16 {load.prompt} 2 1.0")
        for _ in range(load.rounds):
            for batch in (1, 16):
                call = next(calls)
                for name, side in running.items():
                    found[name][str(batch)].append(side.ask(f"generate {call} {batch} {load.prompt} {load.new} 1.0"))
        call = next(calls)
        made = {name: side.ask(f"generate {call} 4 {load.prompt} {min(load.new, 16)} 0") for name, side in running.items()}
        equal = {n: sum(a == b for a, b in zip(made["tandem"]["token_ids"], m["token_ids"], strict=True)) for n, m in made.items()}
    return {"sides": found, "peak_bytes": {name: answer["peak_bytes"] for name, answer in made.items()}, "greedy_of_4": equal}


def prefix(sides: Sides, model: str, threads: int, load: Workload) -> Part:
    """A 512-token prompt with one sample, with 16 samples of one request, and 16 requests of the same prompt at once."""
    calls = count(1)
    starts: dict[str, Callable[..., Driven]] = {"tandem": sides.tandem, **sides.peers(("vLLM",))}
    with ExitStack() as stack:
        running = {name: stack.enter_context(begin(model, threads)) for name, begin in starts.items()}
        found: Part = {name: {"one": [], "samples": [], "requests": []} for name in running}
        for number in range(load.rounds + 1):
            for kind, each, requests in (("one", 1, 1), ("samples", 16, 1), ("requests", 1, 16)):
                call = next(calls)
                for name, side in running.items():
                    took = side.ask(f"samples {call} 512 {each} {requests}")
                    if number:
                        found[name][kind].append(took)
    return {"sides": found}


def first(sides: Sides, model: str, threads: int, load: Workload) -> Part:
    """Many prompts at once: the seconds to the first token of each, ours and vLLM's, with the same budget of tokens a step."""
    starts: dict[str, Callable[..., Driven]] = {"tandem": sides.tandem, **sides.peers(("vLLM",))}
    sequences, prompt, new = FIRST.values()
    with ExitStack() as stack:
        settings = {"max_num_batched_tokens": FIRST_BUDGET, "max_model_len": 1024}
        running = {name: stack.enter_context(begin(model, threads, **settings)) for name, begin in starts.items()}
        rounds: dict[str, list[Part]] = {name: [] for name in running}
        rates: list[Part] = []
        for side in running.values():
            side.ask(f"first 1 2 {prompt} 2")
        for call in range(2, load.rounds + 2):
            rates.append(running["tandem"].ask("rate"))
            for name, side in running.items():
                rounds[name].append(side.ask(f"first {call} {sequences} {prompt} {new}"))
    return {"sides": rounds, "rate": rates, "flops_of_prompt": flops(model, 1, prompt, 1)}


def chunked(sides: Sides, model: str, threads: int, load: Workload, budgets: Sequence[int]) -> Part:
    """A 4,096-token prompt beside 16 decoding sequences, for every budget of tokens a step, ours and vLLM's."""
    found: Part = {}
    starts: dict[str, Callable[..., Driven]] = {"tandem": sides.tandem, **sides.peers(("vLLM",))}
    for budget in (*budgets, UNCHUNKED):
        for name, begin in starts.items():
            with begin(model, threads, max_num_batched_tokens=budget, max_num_seqs=min(64, budget)) as side:
                rounds = [side.ask(f"latency {call} 16 4096 64") for call in range(1, load.rounds + 1)]
            found.setdefault(name, {})[str(budget)] = rounds
    return {"sides": found}
