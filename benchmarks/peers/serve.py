"""The commands of the engine benchmark, the same for every side; each is one line, and every answer one line of JSON.

``generate CALL SEQUENCES PROMPT NEW TEMPERATURE``: that many prompts of PROMPT random tokens, NEW tokens each, in one call.
``samples CALL PROMPT N REQUESTS``: REQUESTS requests of one and the same prompt, each with N samples of one token.
``latency CALL DECODING PROMPT STEPS``: the seconds of STEPS steps in which DECODING sequences decode alone, then those of the
steps in which a prompt of PROMPT tokens is prefilled beside them.
``first CALL SEQUENCES PROMPT NEW``: that many streamed requests of PROMPT random tokens and NEW new ones, all sent at once: the
seconds from then to the first token of each.
``prompts CALL SEQUENCES PROMPT``: the prompts themselves.
``rate``: floating-point operations a second of torch's matrix product. Prompts are a function of CALL, so that every side
gets the same ones and none finds in its cache what another call has left. Standard library and ``torch`` only.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from clock import Stopwatch, cpu_seconds, family
from lines import answer, command

Generate = Callable[[list[list[int]], int, float], list[list[int]]]
"""(prompts, new tokens, temperature) -> the new tokens of each."""


class Stepper(Protocol):
    """An engine that is driven step by step. ``spoke``: whose tokens the last step returned, of those that stream."""

    spoke: set[str]

    def add(self, name: str, prompt: list[int], new: int, streams: bool = False) -> None: ...

    def step(self) -> set[str]:
        """One step; the names that ended with it."""
        ...

    def abort(self, names: list[str]) -> None: ...


def prompts(call: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random token ids."""
    return [random.Random(f"{call}/{length}/{i}").choices(range(vocabulary), k=length) for i in range(count)]


def peak_bytes() -> int:
    """The most memory that this process and its children held at once, each counted alone (0 where the system has no
    ``/proc``)."""
    total = 0
    for pid in family(os.getpid()):
        status = Path(f"/proc/{pid}/status")
        for line in status.read_text(encoding="utf-8").splitlines() if status.exists() else []:
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def matrix_rate(seconds: float = 0.5) -> dict[str, float]:
    """The best of a few products of two 1536 x 1536 matrices, in operations a wall second and a CPU second."""
    import torch

    a, best, end = torch.randn(1536, 1536), {"wall_s": float("inf"), "cpu_s": float("inf")}, time.perf_counter() + seconds
    rounds, watch = 0, Stopwatch()
    while rounds < 4 or time.perf_counter() < end:
        watch.start()
        a @ a
        took = watch.stop()
        best = {kind: min(best[kind], took[kind]) for kind in best} if rounds else best
        rounds += 1
    return {kind: 2 * 1536**3 / value for kind, value in best.items()}


def latency(stepper: Stepper, call: int, decoding: int, prompt: int, steps: int, vocabulary: int) -> dict[str, Any]:
    """Wall and CPU seconds of every step, without and with the prompt, and the prompt's time to its first token."""
    watch, names = Stopwatch(), [f"{call}-{i}" for i in range(decoding)]

    def timed() -> tuple[set[str], dict[str, float]]:
        watch.start()
        ended = stepper.step()
        return ended, watch.stop()

    # What decodes must not end before the prompt is done, whatever the size of its chunks.
    for name, tokens in zip(names, prompts(call, decoding, 32, vocabulary), strict=True):
        stepper.add(name, tokens, steps + 1024)
    for _ in range(8):
        stepper.step()
    alone = [timed()[1] for _ in range(steps)]
    stepper.add(f"{call}-prompt", prompts(call, 1, prompt, vocabulary)[0], 1)
    beside: list[dict[str, float]] = []
    while True:
        ended, took = timed()
        beside.append(took)
        if f"{call}-prompt" in ended:
            break
    stepper.abort(names)
    stepper.step()
    return {"alone": alone, "beside": beside}


def first_tokens(stepper: Stepper, call: int, sequences: int, prompt: int, new: int, vocabulary: int) -> dict[str, list[float]]:
    """Wall and CPU seconds from the sending of all requests to the first token of each, in the order of the requests."""
    asked = {f"{call}-{i}": tokens for i, tokens in enumerate(prompts(call, sequences, prompt, vocabulary))}
    watch, took = Stopwatch(), dict[str, dict[str, float]]()
    watch.start()
    for name, tokens in asked.items():
        stepper.add(name, tokens, new, streams=True)
    open_requests = set(asked)
    while open_requests:
        open_requests -= stepper.step()
        now = watch.stop()
        for name in stepper.spoke - took.keys():
            took[name] = now
    return {kind: [took[name][kind] for name in asked] for kind in ("wall_s", "cpu_s")}


def serve(
    generate: Generate, vocabulary: int, stepper: Stepper | None = None, samples: Callable[[list[int], int, int], None] | None = None,
    others: dict[str, Callable[[Sequence[str]], dict[str, Any]]] | None = None,
) -> None:
    """Answer commands until ``quit``. ``samples`` takes (prompt, samples a request, requests)."""
    watch = Stopwatch()
    answer(ready=True)
    while (words := command())[0] != "quit":
        name, given = words[0], words[1:]
        if name == "generate":
            call, count, length, new = map(int, given[:4])
            asked, temperature = prompts(call, count, length, vocabulary), float(given[4])
            watch.start()
            made = generate(asked, new, temperature)
            took = watch.stop()
            tokens = made if temperature == 0 else None
            total = sum(map(len, made))
            answer(tokens=total, token_ids=tokens, process_cpu_s=cpu_seconds(), peak_bytes=peak_bytes(), **took)
        elif name == "samples" and samples is not None:
            call, length, each, requests = map(int, given)
            asked = prompts(call, 1, length, vocabulary)
            watch.start()
            samples(asked[0], each, requests)
            answer(**watch.stop())
        elif name == "latency" and stepper is not None:
            call, decoding, length, steps = map(int, given)
            answer(**latency(stepper, call, decoding, length, steps, vocabulary))
        elif name == "first" and stepper is not None:
            call, count, length, new = map(int, given)
            answer(**first_tokens(stepper, call, count, length, new, vocabulary))
        elif name == "prompts":
            call, count, length = map(int, given)
            answer(prompts=prompts(call, count, length, vocabulary))
        elif name == "rate":
            answer(**matrix_rate())
        elif others and name in others:
            answer(**others[name](given))
        else:
            raise SystemExit(f"this side does not know the command '{name}'")
