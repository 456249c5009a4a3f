"""What penalties, masks and log-probabilities cost: our engine beside transformers' ``generate`` with its own processors.

    python benchmarks/request_features.py [--rounds 4] [--sequences 32] [--tokens 48]

A random Qwen3 of 3.7M parameters (hidden 256, 4 layers) over a byte-level vocabulary of 2,048, sampled at temperature 1, one
thread, CPU seconds. Both sides get the same prompts and make the same number of tokens (the regular expression matches endless
text), take turns in one process, and the best round counts. transformers has no structured output: its mask comes from the same
llguidance through a processor, once a row and step.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import ROOT, machine, write_report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.engine.structured_output.manager import GrammarCursor, StructuredOutputManager
from tandem.engine.structured_output.params import StructuredOutputsParams
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise

PROMPT_TOKENS = 32
FORM = StructuredOutputsParams(regex="([a-z]{1,8} )*")
OURS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "three penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "5 bad words": {"bad_words": ["the", "for", "in", "self", "return"]},
    "5 log-probabilities": {"logprobs": 5},
    "regular expression": {"structured_outputs": FORM, "logit_bias": {2: -100.0}},
}
THEIRS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "three penalties": {"repetition_penalty": 1.2},
    "5 bad words": {},
    "5 log-probabilities": {"output_scores": True, "return_dict_in_generate": True},
    "regular expression": {},
}
"""transformers has no presence and frequency penalties: its first is measured against our three."""


def make_model(folder: Path) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<pad>", "<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train([str(path) for path in sorted((ROOT / "tandem").rglob("*.py"))], trainer)
    tokens = folder / "tokenizer"
    tokens.mkdir()
    backend.save(str(tokens / "tokenizer.json"))
    (tokens / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    decoder = Decoder(ModelShapes("qwen3", 2048, 256, 4, 8, 4, 32, 768, 1024, True, qk_norm=True), select("reference"))
    initialise(decoder, 0)
    save_model(decoder, folder / "model", tokens)


class MaskProcessor(transformers.LogitsProcessor):
    """llguidance's masks for ``generate``."""

    def __init__(self, llm: LLM, rows: int) -> None:
        start = StructuredOutputManager(llm.get_tokenizer(), 2048).compile(FORM)
        self.cursors = [GrammarCursor(start) for _ in range(rows)]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(len(scores), 64, dtype=torch.int32)
        for cursor, row, ids in zip(self.cursors, words, input_ids[:, PROMPT_TOKENS:].tolist(), strict=True):
            cursor.fill(ids, row)
        allowed = ((words.unsqueeze(2) >> torch.arange(32)) & 1).bool().flatten(1)
        return scores.masked_fill(~allowed, float("-inf"))


def cpu_seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = machine()
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        folder = Path(scratch) / "model"
        llm = LLM(folder, max_num_seqs=options.sequences, enable_prefix_caching=False)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        prompts = torch.randint(3, 2048, (options.sequences, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
        asked = [{"prompt_token_ids": row.tolist()} for row in prompts]
        words = [llm.get_tokenizer().encode(word) for word in OURS["5 bad words"]["bad_words"]]

        def ours(name: str) -> float:
            params = SamplingParams(seed=0, max_tokens=options.tokens, ignore_eos=True, **OURS[name])
            return cpu_seconds(lambda: llm.generate(asked, params))

        def theirs(name: str) -> float:
            processors = [MaskProcessor(llm, options.sequences)] if name == "regular expression" else []
            given = dict(THEIRS[name], bad_words_ids=words) if name == "5 bad words" else THEIRS[name]
            with torch.inference_mode():
                return cpu_seconds(
                    lambda: peer.generate(
                        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, min_new_tokens=options.tokens,
                        max_new_tokens=options.tokens, pad_token_id=0, eos_token_id=2, top_k=0, logits_processor=processors, **given,
                    )
                )  # fmt: skip

        best: dict[str, list[float]] = {name: [float("inf")] * 2 for name in OURS}
        for _ in range(options.rounds + 1):
            for name, times in best.items():
                times[:] = [min(times[0], ours(name)), min(times[1], theirs(name))]
    count = options.sequences * options.tokens
    lines = [
        "# What a request may ask for, and what it costs", "", f"{began} One thread; {options.sequences} sequences of {PROMPT_TOKENS} + "
        f"{options.tokens} tokens; tokens a CPU second, best of {options.rounds + 1} rounds that take turns.", "",
        "| asked for | Tandem | of Tandem's plain speed | transformers | ratio |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, (own, other) in best.items():
        share = best["nothing"][0] / own
        lines.append(f"| {name} | {count / own:,.0f} | {share:.0%} | {count / other:,.0f} | {other / own:.2f} |")
    text = "\n".join(lines)
    print(text)
    write_report("request-features", text, options.out)


if __name__ == "__main__":
    main()
