"""The parts of the engine benchmark as Markdown, and the ratios beside the issue's targets."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bounds import least_s
from engine_parts import LLAMA_KINDS

Part = dict[str, Any]
Row = dict[str, Any]

THROUGHPUT = {"vLLM": {"sort": 3.0, "3.7M": 3.0, "84M": 1.6, "0.5B": 1.3}, "transformers": {"sort": 6.0, "3.7M": 6.0, "84M": 3.0, "0.5B": 3.0}}
"""Output tokens a second, ours over the peer's."""
FIRST_TOKEN, LLAMA = 2.0, {"1": 1.0, "16": 2.5}
PREFIX, LATENCY, PROMPT = 1.15, 2.0, 1.3
"""At most: samples over one prefill; the 99th percentile with over without a prefill; chunked over unchunked."""
START_S, MATRIX_SHARE = 4.5, 0.75
KINDS = ("cpu_s", "wall_s")


def best(rounds: Sequence[Part], kind: str) -> float:
    return min(float(took[kind]) for took in rounds)


def spread(rounds: Sequence[Part], kind: str) -> str:
    """How far the median lies above the best: what the machine's neighbours did."""
    return f"{statistics.median(float(took[kind]) for took in rounds) / best(rounds, kind) - 1:.0%}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *("| " + " | ".join(row) + " |" for row in rows), ""]


def kind_of(threads: int) -> str:
    """The seconds that count for a promise: CPU seconds on one thread, which neighbours disturb least, else wall seconds."""
    return "cpu_s" if threads == 1 else "wall_s"


def throughput(parts: dict[tuple[str, int], Part]) -> tuple[list[str], list[Row]]:
    rows, first, promises, greedy = [], [], [], []
    for (model, threads), part in parts.items():
        ours = part["sides"]["tandem"]
        least, least_first = ({kind: least_s(flops, part["rate"], kind) for kind in KINDS} for flops in (part["flops"], part.get("flops_of_first", math.nan)))
        for name, kinds in part["sides"].items():
            cells, shares = [model, str(threads), name], []
            for kind in KINDS:
                tokens = kinds["all"][0]["tokens"]
                ratio = best(kinds["all"], kind) / best(ours["all"], kind)
                cells += [f"{tokens / best(kinds['all'], kind):,.0f}", "" if name == "tandem" else f"**{ratio:.2f}**"]
                shares.append(f"{least[kind] / best(kinds['all'], kind):.0%}")
            target = THROUGHPUT.get(name, {}).get(model)
            rows.append([*cells, *shares, spread(kinds["all"], "wall_s"), "" if target is None else f"{target:g}", _gib(part["peak_bytes"][name])])
            if target is not None:
                kind = kind_of(threads)
                ratio = best(kinds["all"], kind) / best(ours["all"], kind)
                bound = best(kinds["all"], kind) / least[kind]
                promises.append(_promise(f"output tokens/s beside {name}, {model}, {_threads(threads)}", ratio, target, bound=bound))
            cells = [model, str(threads), name]
            for what in ("first", "alone"):
                for kind in KINDS:
                    cells += [f"{best(kinds[what], kind) * 1e3:.1f}"]
                    cells += ["" if name == "tandem" else f"**{best(kinds[what], kind) / best(ours[what], kind):.2f}**"]
            first.append(cells)
            if name == "vLLM":
                ratio = best(kinds["first"], kind_of(threads)) / best(ours["first"], kind_of(threads))
                bound = best(kinds["first"], kind_of(threads)) / least_first[kind_of(threads)]
                what = f"time to first token of all sequences beside vLLM, {model}, {_threads(threads)}"
                promises.append(_promise(what, ratio, FIRST_TOKEN, bound=bound))
        kind = kind_of(threads)
        share = least[kind] / best(ours["all"], kind)
        promises.append(_promise(f"share of the measured matrix rate, {model}, {_threads(threads)}", share, MATRIX_SHARE, bound=1.0))
        greedy.append(_greedy(model, threads, part["greedy"]))
    lines = [
        "## Output tokens a second", "",
        "Ratios are ours over the peer's; share: operations of the matrix products over the rate of torch's 1536 x 1536 product, "
        "measured in the same rounds; spread: how far the median round's wall time lies above the best.", "",
        *table(["model", "threads", "side", "tokens / CPU s", "ratio", "tokens / wall s", "ratio", "share (CPU)", "share (wall)", "spread",
                "target", "peak GiB"], rows),
        "Time to first token, ms: of all sequences submitted at once, and of one alone.", "",
        *table(["model", "threads", "side", "all, CPU", "ratio", "all, wall", "ratio", "one, CPU", "ratio", "one, wall", "ratio"], first),
        "Greedy completions:", "", *greedy, "",
    ]  # fmt: skip
    return lines, promises


def _greedy(model: str, threads: int, found: Part) -> str:
    equal = ", ".join(f"{name} {count} of {found['sequences']}" for name, count in found["equal"].items() if name != "tandem")
    text = f"- {model}, {_threads(threads)}: equal to ours: {equal}; {found['new']} tokens each, {found['distinct_tokens']:.0f} distinct ones."
    for difference in found["first_differences"]:
        gap = f", logit gap {difference['gap']:.1e} of a spread of {difference['spread']:.2f}" if "gap" in difference else ""
        text += f" First difference of {difference['side']} at token {difference['at']}{gap}."
    return text


def start(parts: dict[tuple[str, int], Part]) -> tuple[list[str], list[Row]]:
    rows, promises = [], []
    for (model, threads), part in parts.items():
        ours = part["sides"]["tandem"]
        for name, rounds in part["sides"].items():
            cells = [model, str(threads), name]
            for kind in KINDS:
                cells += [f"{best(rounds, kind):.2f}", "" if name == "tandem" else f"{best(rounds, kind) / best(ours, kind):.2f}"]
            rows.append([*cells, _gib(max(took["peak_bytes"] for took in rounds))])
        if model == "0.5B":
            what = f"seconds from start to first token, {model}, {_threads(threads)}, under"
            promises.append(_promise(what, best(ours, kind_of(threads)), START_S, at_most=True))
    lines = [
        "## Start to first token", "", "From the start of the process, the file in the page cache, seconds; no tokenizer on any side.", "",
        *table(["model", "threads", "side", "CPU s", "peer / ours", "wall s", "peer / ours", "peak GiB"], rows),
    ]  # fmt: skip
    return lines, promises


def llama(parts: dict[tuple[str, int], Part]) -> tuple[list[str], list[Row]]:
    rows, promises = [], []
    for (model, threads), part in parts.items():
        ours = [name for name in part["sides"] if not name.startswith("llama")]
        peers = {name: f"llama.cpp {LLAMA_KINDS.get(name.removeprefix('tandem ').removesuffix('+head'), 'Q8_0')}" for name in ours}
        for batch in ("1", "16"):
            for name, kinds in part["sides"].items():
                cells = [model, str(threads), batch, name]
                for kind in KINDS:
                    took = best(kinds[batch], kind)
                    ratios = " / ".join(f"{took / best(part['sides'][own][batch], kind):.2f}" for own in ours)
                    cells += [f"{kinds[batch][0]['tokens'] / took:,.1f}", ratios if name.startswith("llama") else ""]
                rows.append([*cells, f"{LLAMA[batch]:g}" if name in peers.values() else "", _gib(part["peak_bytes"][name])])
            for own in ours:
                kind = kind_of(threads)
                ratio = best(part["sides"][peers[own]][batch], kind) / best(part["sides"][own][batch], kind)
                promises.append(_promise(f"{own} beside {peers[own]}, batch {batch}, {model}, {_threads(threads)}", ratio, LLAMA[batch]))
    header = ["model", "threads", "batch", "side", "tokens / CPU s", f"ratio ({' / '.join(ours)})" if parts else "ratio"]
    lines = ["## Beside llama.cpp", "", *table([*header, "tokens / wall s", "ratio", "target", "peak GiB"], rows)]
    return lines, promises


def prefix(parts: dict[tuple[str, int], Part]) -> tuple[list[str], list[Row]]:
    rows, promises = [], []
    for (model, threads), part in parts.items():
        for name, kinds in part["sides"].items():
            cells = [model, str(threads), name]
            for kind in KINDS:
                one = best(kinds["one"], kind)
                cells += [f"{one * 1e3:.1f}", *(f"{best(kinds[what], kind) / one:.2f}" for what in ("samples", "requests"))]
            rows.append(cells)
            if name == "tandem":
                ratio = best(kinds["samples"], kind_of(threads)) / best(kinds["one"], kind_of(threads))
                what = f"16 samples of a 512-token prompt over one prefill, {model}, {_threads(threads)}, at most"
                promises.append(_promise(what, ratio, PREFIX, at_most=True))
    columns = ["one prefill, {} ms", "16 samples / one", "16 requests / one"]
    header = ["model", "threads", "side", *(column.format(kind) for kind in ("CPU", "wall") for column in columns)]
    lines = [
        "## Prefix cache", "", "To the first token of a 512-token prompt: one sample, 16 samples of one request, 16 requests at once.", "",
        *table(header, rows),
    ]  # fmt: skip
    return lines, promises


def first(parts: dict[tuple[str, int], Part]) -> tuple[list[str], list[Row]]:
    rows, promises = [], []
    measures: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.mean, "p99": lambda seconds: percentile(seconds, 0.99)}
    for (model, threads), part in parts.items():
        for name, rounds in part["sides"].items():
            cells = [model, str(threads), name]
            for kind in KINDS:
                for what, measure in measures.items():
                    took = [min(measure(each[kind]) for each in part["sides"][side]) for side in (name, "tandem")]
                    # Without anything but products, prompt i of N has its first token when i prompts are computed.
                    count = len(rounds[0][kind])
                    least = (count + 1) / 2 if what == "mean" else count
                    bound_s = least * least_s(part["flops_of_prompt"], part["rate"], kind)
                    ratio, bound = took[0] / took[1], took[0] / bound_s
                    cells += [f"{took[0] * 1e3:,.0f}", "" if name == "tandem" else f"**{ratio:.2f}** ({bound:.2f})"]
                    if name == "vLLM" and kind == kind_of(threads):
                        text = f"time to first token of {count} prompts at once, {what}, beside vLLM, {model}, {_threads(threads)}"
                        promises.append(_promise(text, ratio, FIRST_TOKEN, bound=bound))
            rows.append(cells)
    columns = [f"{what}, {kind} ms" for kind in ("CPU", "wall") for what in measures]
    lines = [
        "## First tokens of many prompts at once", "",
        "From the sending of all requests to the first token of each. Ratios: the peer's over ours (in brackets: over the products of the "
        "prompts alone, at the measured matrix rate).", "",
        *table(["model", "threads", "side", *(cell for column in columns for cell in (column, "ratio (bound)"))], rows),
    ]  # fmt: skip
    return lines, promises


def chunked(parts: dict[tuple[str, int], Part]) -> tuple[list[str], list[Row]]:
    rows, promises = [], []
    for (model, threads), part in parts.items():
        for name, budgets in part["sides"].items():
            whole = max(budgets, key=int)
            ratios = {}
            for budget, rounds in budgets.items():
                cells = [model, str(threads), name, "unchunked" if budget == whole else budget]
                for kind in KINDS:
                    alone, beside, first = (min(measure(r) for r in rounds) for measure in _latencies(kind))
                    unchunked = min(_latencies(kind)[2](r) for r in budgets[whole])
                    cells += [f"{alone * 1e3:.1f}", f"{beside * 1e3:.1f}", f"{beside / alone:.2f}", f"{first:.2f}", f"{first / unchunked:.2f}"]
                    if kind == kind_of(threads):
                        ratios[budget] = (beside / alone, first / unchunked)
                rows.append(cells)
            if name == "tandem":
                # The budget that comes nearest to both promises at once.
                chosen = min(ratios, key=lambda b: max(ratios[b][0] / LATENCY, ratios[b][1] / PROMPT))
                at = f"{model}, {_threads(threads)}, budget {chosen}, at most"
                whats = ("99th percentile between tokens beside a 4k prefill over that without", "the 4k prompt's first token, chunked over unchunked")
                for what, ratio, target in zip(whats, ratios[chosen], (LATENCY, PROMPT), strict=True):
                    promises.append(_promise(f"{what}, {at}", ratio, target, at_most=True))
    columns = ["p99 alone, {} ms", "p99 beside, {} ms", "ratio", "first token, {} s", "over unchunked"]
    header = ["model", "threads", "side", "budget", *(column.format(kind) for kind in ("CPU", "wall") for column in columns)]
    lines = [
        "## Chunked prefill", "",
        "A 4,096-token prompt beside 16 decoding sequences. Budget: tokens a step, of both kinds together; between tokens: the time of a "
        "step, in each of which every decoding sequence gets one token.", "",
        *table(header, rows),
    ]  # fmt: skip
    return lines, promises


def _latencies(kind: str) -> tuple[Callable[[Part], float], Callable[[Part], float], Callable[[Part], float]]:
    """(99th percentile alone, beside the prompt, the prompt's time to its first token) of one round."""
    return (
        lambda r: percentile([step[kind] for step in r["alone"]], 0.99),
        lambda r: percentile([step[kind] for step in r["beside"]], 0.99),
        lambda r: sum(step[kind] for step in r["beside"]),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _promise(what: str, ratio: float, target: float, at_most: bool = False, bound: float | None = None) -> Row:
    """``bound``: the ratio if our side took only its matrix products, at the measured rate; ``None``: nothing was measured that bounds it."""
    return {"what": what, "ratio": ratio, "target": target, "at_most": at_most, "bound": bound}


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


REPORTS = {"throughput": throughput, "start": start, "llama": llama, "prefix": prefix, "first": first, "chunked": chunked}
