"""Speculative decoding on and off: tokens per CPU second, acceptance, and that the tokens are the same.

    python benchmarks/speculation.py [--tokens 128] [--rounds 4] [--threads 1]

No trained pair of models is at hand, so one is made: the draft model is the first layer of the model, whose other eleven change what
passes through them by little (``--strength``: the scale of their outputs), as the later layers of a trained model do. The last norm is
scaled so that a drawn token has a log-probability of about -2, as in text; without that all tokens are nearly as likely. Prompt lookup is
measured on a prompt that repeats itself, greedily, which is its good case, and on a random one at temperature 1, its worst. Eight
sequences are beyond the number up to which an engine on a CPU guesses by default, and show why. All kinds take turns; the clock is CPU time.
For the same reason the layer of multi-token prediction is made of the model's first layer, over the embedding of the token alone, and the EAGLE-3 head is of
random weights: its drafts are wrong, which is what the switch by measured acceptance and cost is for.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import HERE, best_and_median, machine, write_ratios, write_report

from tandem.config.engine import SpeculativeConfig
from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.eagle3_draft import Eagle3Draft
from tandem.engine.spec_decode.state_proposer import DraftHead
from tandem.kernels import select
from tandem.layout.eagle3 import eagle3_shapes
from tandem.layout.shapes import ModelShapes, parameter_count
from tandem.model.decoder import Decoder
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import initialise_eagle3
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.multi_token import MultiTokenPredictor, layer_shapes

SHAPES = ModelShapes(
    architecture="qwen3", vocab_size=8192, hidden_size=512, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    intermediate_size=1536, max_position_embeddings=1024, tie_word_embeddings=True, qk_norm=True,
)
DRAFT_LAYERS = 1
KINDS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "draft": {"method": "draft", "model": "the first layers", "num_speculative_tokens": 4, "disable_by_batch_size": 64},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "disable_by_batch_size": 64},
    "mtp": {"method": "mtp", "num_speculative_tokens": 4},
    "eagle3, untrained": {"method": "eagle3", "model": "random weights", "num_speculative_tokens": 4},
}
Work = tuple[str, int, float, bool]
"""Its name, sequences, temperature, and whether the prompts repeat themselves."""
WORKS: list[Work] = [
    (name, sequences, temperature, repeats)
    for name, temperature, repeats in (("sampled", 1.0, False), ("repeating, greedy", 0.0, True))
    for sequences in (1, 4, 8)
]


SHARPNESS = 4.0
"""The scale of the last norm."""


def pair(strength: float) -> tuple[Decoder, Decoder]:
    """The model and its draft."""
    model = Decoder(SHAPES, select("auto"))
    initialise(model, 0)
    with torch.no_grad():
        for name, tensor in to_huggingface(model):
            if "layers." in name and int(name.split(".")[2]) >= DRAFT_LAYERS and ("o_proj" in name or "down_proj" in name):
                tensor.mul_(strength)
            elif "proj" in name or "embed" in name:
                tensor.mul_(3)
            elif name == "model.norm.weight":
                tensor.mul_(SHARPNESS)
    draft = Decoder(replace(SHAPES, num_hidden_layers=DRAFT_LAYERS), select("auto"))
    kept = {name for name, _ in to_huggingface(draft)}
    load_tensors(draft, [(name, tensor) for name, tensor in to_huggingface(model) if name in kept])
    return model, draft


def predictor(model: Decoder) -> MultiTokenPredictor:
    """A layer of multi-token prediction, made of the first layer of a packed ``model``."""
    whole, _ = pair(1.0)
    weights = dict(to_huggingface(whole))
    layer = Decoder(layer_shapes(SHAPES, shares_vocabulary=True), select("auto"))
    tensors = {name: weights[name] for name, _ in to_huggingface(layer) if name.startswith("model.layers.0.")}
    tensors |= {"model.embed_tokens.weight": torch.zeros(1, SHAPES.hidden_size), "model.norm.weight": weights["model.norm.weight"]}
    load_tensors(layer, tensors.items(), pack=True)
    ones, size = torch.ones(SHAPES.hidden_size), float(weights["model.embed_tokens.weight"].pow(2).mean().sqrt())
    projection = torch.cat((size * torch.eye(SHAPES.hidden_size), torch.zeros(SHAPES.hidden_size, SHAPES.hidden_size)), dim=1)
    return MultiTokenPredictor(layer, model, ones, ones, projection)


def eagle3(model: Decoder) -> Eagle3Draft:
    """An EAGLE-3 head of random weights for ``model``."""
    head = Eagle3Head(eagle3_shapes(SHAPES, SHAPES.vocab_size), select("auto"), embedding=model.embedded)
    initialise_eagle3(head, 0)
    head.pack()
    return Eagle3Draft(head, SHAPES.vocab_size)


def engine_of(kind: str, strength: float) -> Engine:
    model, small = pair(strength)
    given = KINDS[kind]
    draft: Decoder | DraftHead | None = None
    if given is not None and given["method"] != "ngram":
        draft = {"draft": lambda: small, "mtp": lambda: predictor(model), "eagle3": lambda: eagle3(model)}[given["method"]]()
    settings = EngineSettings(
        SHAPES.max_position_embeddings, 1024, max_num_seqs=16, max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    speculative = None if given is None else SpeculativeConfig(**given)
    return Engine(model, settings, speculative=speculative, draft=draft)


def run(engine: Engine, work: Work, tokens: int) -> tuple[float, float, float, list[list[int]]]:
    """CPU seconds of the decoding steps, acceptance, tokens a step, and what was drawn."""
    _, sequences, temperature, repeats = work
    before = engine.cumulative_stats().speculation
    for i in range(sequences):
        prompt = [(i + 31 * (j % 12 if repeats else j) ** 2) % SHAPES.vocab_size for j in range(48)]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=1), key=i)
    engine.step()
    began = time.process_time()
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        found.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
    taken = time.process_time() - began
    after = engine.cumulative_stats().speculation
    proposals, proposed, accepted = (getattr(after, n) - getattr(before, n) for n in ("proposals", "proposed", "accepted"))
    return taken, accepted / max(1, proposed), 1 + accepted / max(1, proposals), [found[str(i)] for i in range(sequences)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--strength", type=float, default=0.05)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    described = machine()
    options.work.mkdir(parents=True, exist_ok=True)
    engines = {kind: engine_of(kind, options.strength) for kind in KINDS}
    lines, promises = [], []
    for work in WORKS:
        rounds: dict[str, list[tuple[float, float, float, list[list[int]]]]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind, engine in engines.items():
                rounds[kind].append(run(engine, work, options.tokens))
                assert rounds[kind][-1][3] == rounds["off"][0][3], f"{kind} drew other tokens"
        seconds = {kind: best_and_median([r[0] for r in rounds[kind]]) for kind in KINDS}
        for kind in KINDS:
            _, acceptance, tokens_a_step, _ = rounds[kind][0]
            drawn = work[1] * (options.tokens - 1)
            ratios = [off / own for off, own in zip(seconds["off"], seconds[kind], strict=True)]
            cells = [work[0], f"{work[1]}", kind, *(f"{drawn / s:,.0f}" for s in seconds[kind]), *(f"{r:.2f}" for r in ratios)]
            cells += ["", ""] if kind == "off" else [f"{acceptance:.0%}", f"{tokens_a_step:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
            if kind in ("mtp", "eagle3, untrained"):
                what = f"speculation by {kind}, switched by what it gains, {work[0]}, {work[1]} sequence{'s' if work[1] > 1 else ''}, over none"
                promises.append({"what": what, "ratio": ratios[0], "median": ratios[1], "target": 0.98})
            if work[1] <= 4 and (kind, work[0]) in (("draft", "sampled"), ("ngram", "repeating, greedy")):
                what = f"speculation by {kind}, {work[0]}, {work[1]} sequence{'s' if work[1] > 1 else ''}, over none"
                promises.append({"what": what, "ratio": ratios[0], "median": ratios[1], "target": 1.0})
    about = (
        f"{parameter_count(SHAPES) / 1e6:.0f}M parameters, the draft model, and the layer of multi-token prediction, is the first "
        f"{DRAFT_LAYERS} of its {SHAPES.num_hidden_layers} layers; the "
        f"outputs of the others are scaled by {options.strength}. {options.tokens} tokens a sequence, up to 4 guesses, {options.threads} "
        f"thread; best / median of {options.rounds} interleaved rounds, CPU time of the steps after the prefill. All kinds drew the same tokens."
    )
    header = "| work | sequences | guesses | tokens / CPU s, best | median | ratio, best | median | acceptance | tokens a step and sequence |"
    text = "\n".join(["# Speculative decoding on and off", "", f"{described}\n\n{about}", "", header, "|---" * 9 + "|", *lines])
    print(text)
    print(f"wrote {write_report('speculation', text, options.out)}")
    write_ratios("speculation", promises, options.work)


if __name__ == "__main__":
    main()
