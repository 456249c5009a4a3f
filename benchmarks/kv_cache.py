"""What a KV cache of fewer bits costs: bytes of a token, the log-probabilities of the sort recipe's warm model, its greedy tokens, and speed.

The model scores the completions of demonstrations with keys and values rounded as the cache rounds them, which has the bits of
decoding over that cache. "perplexity" is that of the completion tokens, "|change|" the mean and the largest change of a token's
log-probability in nats against a whole cache, and "KL" the mean k3 estimate of it: the mismatch that a trainer would see that did
not round its own keys and values. Ours does, and the column behind it is what remains. "greedy" is the share of answers whose greedy tokens
are all those of a whole cache. "held" is what an engine's cache takes for a token, measured, and "decode" its tokens a second: 8
sequences of 1,500 tokens in a random model of 4 layers with 8 heads of 128 over 2 key-value heads, the fastest of its last steps in three
rounds, in turns.

    python benchmarks/kv_cache.py [--demonstrations 512] [--work FOLDER] [--out benchmarks/results]
"""

import os
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from machine import machine, write_report
from options import parser
from start_model import recipe_with, warm_model
from torch import Tensor

from tandem.config.model import NewModelConfig
from tandem.engine.kv_cache.cache_tensors import block_bytes
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.kernels import select
from tandem.model.attention import PackedContext
from tandem.model.create_model import create_model
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model
from tandem.pod.prompts import prompt_source
from tandem.text.tokenizer import Tokenizer
from tandem.types.kv_cache import BLOCK_TOKENS, KV_CACHE_DTYPES, KVCacheDtype

Example = tuple[list[int], list[int]]
SEQUENCES, CONTEXT, DECODED, ROUNDS = 8, 1500, 32, 3


def completion_logprobs(model: Decoder, examples: list[Example]) -> Tensor:
    """The log-probabilities (nats) of all completion tokens, one example after the other."""
    tokens, positions, bounds, rows, targets = [], [], [0], [], []
    for prompt, completion in examples:
        whole = prompt + completion
        rows += range(bounds[-1] + len(prompt) - 1, bounds[-1] + len(whole) - 1)
        targets += completion
        tokens += whole
        positions += range(len(whole))
        bounds.append(len(tokens))
    longest = max(len(prompt) + len(completion) for prompt, completion in examples)
    with torch.no_grad():
        context = PackedContext(torch.tensor(bounds, dtype=torch.int32), longest)
        hidden = model(torch.tensor(tokens), torch.tensor(positions), context)[torch.tensor(rows)]
        return model.kernels.token_logprobs(hidden, model.head_weight, torch.tensor(targets), 1.0).raw.double()


def remaining(folder: Path, model: Decoder, examples: list[Example], name: KVCacheDtype) -> float:
    """The largest difference between the log-probabilities that an engine drew its tokens with and the rounding model's."""
    llm = LLM(folder, kv_cache_dtype=name)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in examples]
    answers = llm.generate(prompts, SamplingParams(max_tokens=24, seed=1), use_tqdm=False)
    drawn = [answer.outputs[0] for answer in answers]
    scored = completion_logprobs(model, [(prompt, list(own.token_ids)) for (prompt, _), own in zip(examples, drawn, strict=True)])
    return float((scored - torch.tensor([p for own in drawn for p in own.raw_logprobs], dtype=torch.float64)).abs().max())


def greedy(folder: Path, examples: list[Example], name: KVCacheDtype) -> list[tuple[int, ...]]:
    """The greedy tokens after each prompt."""
    with LLM(folder, kv_cache_dtype=name) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt, _ in examples]
        return [tuple(answer.outputs[0].token_ids) for answer in llm.generate(asked, SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)]


def held_and_speed(folder: Path, name: KVCacheDtype) -> tuple[int, float]:
    """The bytes that the cache of an engine has for a token, and the tokens a second that it decodes beside long contexts."""
    draw = torch.Generator().manual_seed(0)
    with LLM(folder, load_format="dummy", kv_cache_dtype=name, kv_cache_tokens=1 << 14, max_num_seqs=SEQUENCES, enable_prefix_caching=False) as llm:
        engine, params, seconds = llm.engine, SamplingParams(max_tokens=DECODED, temperature=0, ignore_eos=True), []
        prompts = torch.randint(3, engine.decoder.shapes.vocab_size, (SEQUENCES, CONTEXT), generator=draw).tolist()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests:
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        # The steps before these compute prompts too.
        return block_bytes(engine._runner.caches) // BLOCK_TOKENS, SEQUENCES / min(seconds[-DECODED // 2 :])


def long_model(folder: Path) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    create_model(NewModelConfig("llama", max_position_embeddings=2048, **sizes), 0, folder)
    return folder


def table(folder: Path, long: Path, examples: list[Example]) -> list[str]:
    model = load_model(folder, select("cpu"))
    whole = completion_logprobs(model, examples)
    lines = [
        "| cache | bytes a token | of fp32 | perplexity | mean abs change | largest | KL | rollout against trainer, largest | greedy | held | decode |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    full = kv_bytes_per_token(model.shapes, "float32")
    likeliest = greedy(folder, examples, "auto")
    # In turns, so that what else the machine does hits all of them.
    rounds = [{name: held_and_speed(long, name) for name in KV_CACHE_DTYPES} for _ in range(ROUNDS)]
    for name in KV_CACHE_DTYPES:
        model.kv_cache_dtype = name
        found = completion_logprobs(model, examples)
        change = found - whole
        taken = kv_bytes_per_token(model.shapes, "float32", name)
        left = remaining(folder, model, examples[:64], name)
        same = sum(a == b for a, b in zip(greedy(folder, examples, name), likeliest, strict=True)) / len(likeliest)
        held, decoded = rounds[0][name][0], max(measured[name][1] for measured in rounds)
        lines.append(
            f"| {'float32' if name == 'auto' else name} | {taken} | {taken / full:.2f} | {(-found.mean()).exp():.5f} "
            f"| {change.abs().mean():.1e} | {change.abs().max():.1e} | {(change.exp() - 1 - change).mean():.1e} | {left:g} "
            f"| {100 * same:.1f}% | {held:,} B | {decoded:.1f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    made = parser(__doc__, work="the warm model is")
    made.add_argument("--demonstrations", type=int, default=512, help="how many are scored")
    options = made.parse_args()
    torch.set_num_threads(1)
    folder = warm_model(options.work)
    recipe = recipe_with()
    with closing(prompt_source(recipe, folder)) as source:
        shown = source.demonstrations(12345, 0.0, Tokenizer.from_folder(folder).eos_token_ids[0])
        examples = [(list(d.prompt_token_ids), list(d.completion_token_ids)) for d in islice(shown, options.demonstrations)]
    with TemporaryDirectory() as made_here:
        lines = table(folder, long_model(Path(made_here) / "long"), examples)
    text = ["# KV cache", "", machine(), "", *__doc__.split("\n\n")[1:2], "", *lines]
    print(f"wrote {write_report('kv-cache', chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()
