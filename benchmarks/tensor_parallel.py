"""Two tensor-parallel ranks beside one process with as many threads, on the same engine and the same work.

The three take turns and the best of the rounds counts: output tokens a second, and the milliseconds of one decode step. Random
weights; greedy; prompts of 32 tokens. On one machine two ranks only pay where threads do not scale; the table says what the
exchanges cost.

    python benchmarks/tensor_parallel.py [--rounds 3] [--tokens 48] [--out benchmarks/results]
"""

import argparse
import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from machine import machine, write_report

from tandem import LLM, SamplingParams
from tandem.kernels import select
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise

SHAPES = {
    "3.7M": ModelShapes("qwen3", 8192, 192, 6, 6, 2, 32, 512, 512, True, qk_norm=True),
    "84M": ModelShapes("qwen3", 32000, 768, 10, 12, 4, 64, 2048, 512, True, qk_norm=True),
}
BATCHES = (1, 16, 64)


def main() -> None:
    """Write one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each sequence")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    torch.set_num_threads(2)
    lines = ["# Two tensor-parallel ranks beside two threads", "", machine(), "", __doc__.split("\n\n")[1], ""]
    lines += ["| model | sequences | engine | tokens/s | step ms | of two threads |", "| --- | --- | --- | --- | --- | --- |"]
    for name, shapes in SHAPES.items():
        with TemporaryDirectory() as work, ExitStack() as stack:
            decoder = Decoder(shapes, select("cpu"))
            initialise(decoder, 0)
            folder = Path(work) / "model"
            save_model(decoder, folder)
            print(f"{name}: {parameter_count(shapes)} parameters", flush=True)
            settings = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "enable_prefix_caching": False}
            engines = {"two threads": stack.enter_context(closing(LLM(folder, **settings)))}
            for title, deterministic in (("two ranks, deterministic", True), ("two ranks, partial sums", False)):
                ranks = LLM(folder, tensor_parallel_size=2, deterministic=deterministic, **settings)
                engines[title] = stack.enter_context(closing(ranks))
            for batch in BATCHES:
                prompts = [{"prompt_token_ids": torch.randint(0, 8192, (32,)).tolist()} for _ in range(batch)]
                params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
                best = dict.fromkeys(engines, float("inf"))
                for _ in range(options.rounds):
                    for title, llm in engines.items():
                        # A rank has one thread of its own; the same process with two would disturb the other.
                        torch.set_num_threads(2 if title == "two threads" else 1)
                        began = time.perf_counter()
                        llm.generate(prompts, params, use_tqdm=False)
                        best[title] = min(best[title], time.perf_counter() - began)
                for title, seconds in best.items():
                    rate, step = batch * options.tokens / seconds, 1000 * seconds / options.tokens
                    lines.append(f"| {name} | {batch} | {title} | {rate:.0f} | {step:.2f} | {best['two threads'] / seconds:.2f} |")
                    print(lines[-1], flush=True)
    print(f"wrote {write_report('tensor-parallel', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
