"""Speculative decoding on and off: tokens per CPU second, acceptance, and that the tokens are the same.

    python benchmarks/speculation.py [--tokens 96] [--rounds 5] [--threads 1]

The model, its draft model and its layer of multi-token prediction are made and the EAGLE-3 head is trained (``speculation_models``; its first run takes a few
minutes more). Prompt lookup is measured on a prompt that repeats itself, greedily, which is its good case, and on what is drawn at temperature 1, where it is
often wrong. Every kind has the default switch: draft tokens are fed where the measured time of steps says that they pay (``spec_decode.draft_switch``), and
never with more than 16 sequences on a CPU. An engine that guesses and one that does not take turns, and the ratio is the median of those of each turn, so that
other work on the machine does not decide; the clock is CPU time. The first turn is shown apart: it has the trials of an engine that knows nothing yet.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import HERE, machine, write_ratios, write_report
from speculation_models import DRAFT_LAYERS, HEAD, SHAPES, pair, predictor, trained_head

from tandem.config.engine import SpeculativeConfig
from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.eagle3_draft import load_eagle3_draft
from tandem.engine.spec_decode.state_proposer import DraftHead
from tandem.layout.parameters import parameter_count
from tandem.model.decoder import Decoder

KINDS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "draft": {"method": "draft", "model": "the first layers"},
    "mtp": {"method": "mtp"},
    "eagle3": {"method": "eagle3", "model": "the trained head"},
}
DRAFT_TOKENS = 3
Work = tuple[str, int, float, bool]
"""Its name, sequences, temperature, and whether the prompts repeat themselves."""
WORKS: list[Work] = [
    (name, sequences, temperature, repeats)
    for name, temperature, repeats in (("sampled", 1.0, False), ("repeating, greedy", 0.0, True))
    for sequences in (1, 4, 8, 16, 64)
]
TARGET = 0.98


def engine_of(kind: str | None, strength: float, folders: tuple[Path, Path]) -> Engine:
    # One model for all engines: two equal ones in other pages differ by up to a tenth.
    model, small = pair(strength)
    settings = EngineSettings(SHAPES.max_position_embeddings, 1024, max_num_seqs=64, max_num_batched_tokens=4096, enable_prefix_caching=False)
    if kind is None:
        return Engine(model, settings)
    if not model.is_packed:
        model.pack()
    made: dict[str, Callable[[], Decoder | DraftHead | None]] = {
        "ngram": lambda: None, "draft": lambda: small, "mtp": lambda: predictor(model), "eagle3": lambda: load_eagle3_draft(folders[1], folders[0], model),
    }
    return Engine(model, settings, speculative=SpeculativeConfig(num_speculative_tokens=DRAFT_TOKENS, **KINDS[kind]), draft=made[kind]())


def run(engine: Engine, work: Work, tokens: int) -> tuple[float, float, float, list[list[int]]]:
    """CPU seconds of the decoding steps, acceptance, tokens a step, and what was drawn."""
    _, sequences, temperature, repeats = work
    before = engine.cumulative_stats().speculation
    for i in range(sequences):
        prompt = [(i + 31 * (j % 12 if repeats else j) ** 2) % SHAPES.vocab_size for j in range(48)]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=1), key=i)
    engine.step()
    began = time.process_time()
    drawn: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        drawn.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
    taken = time.process_time() - began
    after = engine.cumulative_stats().speculation
    proposals, proposed, accepted = (getattr(after, n) - getattr(before, n) for n in ("proposals", "proposed", "accepted"))
    return taken, accepted / max(1, proposed), 1 + accepted / max(1, proposals), [drawn[str(i)] for i in range(sequences)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--strength", type=float, default=0.05)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    described = machine()
    options.work.mkdir(parents=True, exist_ok=True)
    folders = trained_head(options.work, options.strength, options.threads)
    off = engine_of(None, options.strength, folders)
    engines = {kind: engine_of(kind, options.strength, folders) for kind in KINDS}
    lines, promises = [], []
    for work in [each for each in WORKS if each[1] in options.sequences]:
        turns: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in KINDS}
        for turn in range(options.rounds + 1):
            for kind, engine in engines.items():
                # The one that is measured first changes from turn to turn.
                pairs = [(name, run(each, work, options.tokens)) for name, each in ((("off", off), (kind, engine))[:: 1 if turn % 2 else -1])]
                (off_s, _, _, expected), (own_s, acceptance, length, tokens) = (dict(pairs)[name] for name in ("off", kind))
                assert tokens == expected, f"{kind} drew other tokens"
                turns[kind].append((off_s, own_s, acceptance, length))
        drawn = work[1] * (options.tokens - 1)
        for kind, measured in turns.items():
            first, *others = [off_s / own_s for off_s, own_s, _, _ in measured]
            ratio = statistics.median(others)
            speeds = [drawn / statistics.median(each[place] for each in measured[1:]) for place in (0, 1)]
            acceptance, length = (statistics.median(each[place] for each in measured[1:]) for place in (2, 3))
            fed = ["no drafts", ""] if length == 1.0 and acceptance == 0.0 else [f"{acceptance:.0%}", f"{length:.2f}"]
            cells = [work[0], f"{work[1]}", kind, *(f"{speed:,.0f}" for speed in speeds), f"**{ratio:.2f}**", f"{min(others):.2f} to {max(others):.2f}"]
            lines.append("| " + " | ".join([*cells, f"{first:.2f}", *fed]) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
            what = f"speculation by {kind}, switched by what it gains, {work[0]}, {work[1]} sequence{'s' if work[1] > 1 else ''}, over none"
            promises.append({"what": what, "ratio": max(others), "median": ratio, "target": TARGET})
    about = (
        f"{parameter_count(SHAPES) / 1e6:.0f}M parameters; the draft model, and the layer of multi-token prediction, is the first {DRAFT_LAYERS} of its "
        f"{SHAPES.num_hidden_layers} layers, and the outputs of the others are scaled by {options.strength}. The EAGLE-3 head was trained by "
        f"`algorithm.name: draft` for {HEAD['run']['max_steps']} steps on what the model draws. {options.tokens} tokens a sequence, up to {DRAFT_TOKENS} draft "
        f"tokens a step, {options.threads} thread; medians of {options.rounds} turns, CPU time of the steps after the prefill. All kinds drew the same tokens. "
        f"{sum(each['median'] >= TARGET for each in promises)} of {len(promises)} medians are at least {TARGET}."
    )
    header = "| work | sequences | drafts | off, tokens / CPU s | on | on / off | of each turn | first turn | acceptance | acceptance length |"
    text = "\n".join(["# Speculative decoding on and off", "", f"{described}\n\n{about}", "", header, "|---" * 10 + "|", *lines])
    print(text)
    print(f"wrote {write_report('speculation', text, options.out)}")
    write_ratios("speculation", promises, options.work)


if __name__ == "__main__":
    main()
