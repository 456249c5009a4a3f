"""What the module of transformers costs (``model.implementation: transformers``): the engine and a training step beside Tandem's own network and plain
transformers, and whether bits depend on the batch.

    python benchmarks/transformers_module.py [--threads 1] [--rounds 5]

One model of 21 million parameters in fp32, shaped as Qwen3, with random weights; the three sides take turns in one process. Engine: 32 prompts of 64 tokens,
64 greedy tokens each; the peer is ``generate`` on the same batch, whose prompts have one length, so that it wastes nothing on padding. Training: forward and
backward of the mean cross-entropy of 8 sequences of 128 tokens; the peer computes a batch of the same tensors. Greedy tokens and losses of all sides are
compared first.

Bits: for each model type, a small random model with 2 threads; log-probabilities of a sequence alone, within a packed batch, and by the engine in chunks, must
be equal in every bit.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import best_and_median, machine, write_report
from options import parser as shared_parser
from torch import Tensor

from tandem.config.implementation import Implementation
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.model.attention import PackedContext
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model

SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS, PROMPT, NEW = 32, 64, 64
SEQUENCES, LENGTH = 8, 128
SIDES = {"tandem": Implementation("tandem"), "model_impl transformers": Implementation("transformers")}
BITS: dict[str, dict[str, Any]] = {
    "arcee": {}, "ernie4_5": {"head_dim": 64}, "exaone4": {"head_dim": 64, "sliding_window": 32, "sliding_window_pattern": 2}, "glm": {"head_dim": 64},
    "gpt2": {}, "gpt_neox": {},
    "helium": {"head_dim": 64}, "nemotron": {}, "olmo": {}, "persimmon": {}, "seed_oss": {"head_dim": 64}, "stablelm": {}, "starcoder2": {},
}  # fmt: skip
"""By ``model_type``: keys beside the sizes."""
SMALL = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 1000,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def save_random(model_type: str, folder: Path, **keys: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def packed_loss(decoder: Decoder, tokens: Tensor) -> Tensor:
    count, length = tokens.shape
    bounds = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    hidden = decoder(tokens.flatten(), torch.arange(length).repeat(count), PackedContext(bounds, length))
    rows = torch.arange(count * length).view(count, length)[:, :-1].flatten()
    return -decoder.token_logprobs(hidden, rows, tokens[:, 1:].flatten(), 1.0, count * length).raw.mean()


def peer_loss(peer: Any, tokens: Tensor) -> Tensor:
    logits = peer(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def timed(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the best and the median seconds of each side, which take turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: best_and_median(each) for name, each in seconds.items()}


def engine_rows(folder: Path, peer: Any, rounds: int) -> dict[str, tuple[float, float]]:
    prompts = torch.randint(3, SIZES["vocab_size"], (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))  # type: ignore[call-overload]
    inputs: Any = [{"prompt_token_ids": each} for each in prompts.tolist()]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    engines = {
        name: LLM(folder, model_impl=each.name, skip_tokenizer_init=True, max_model_len=PROMPT + NEW, enable_prefix_caching=False, max_num_seqs=PROMPTS)
        for name, each in SIDES.items()
    }
    sides: dict[str, Callable[[], list[list[int]]]] = {
        name: lambda llm=llm: [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]  # type: ignore[misc]
        for name, llm in engines.items()
    }
    sides["transformers generate"] = lambda: peer.generate(prompts, max_new_tokens=NEW, do_sample=False)[:, PROMPT:].tolist()
    with torch.no_grad():
        answers = [run() for run in sides.values()]
        equal = sum(a == b == c for a, b, c in zip(*answers, strict=True))
        if equal < PROMPTS - 1:
            sys.exit(f"only {equal} of {PROMPTS} completions are equal on all sides")
        measured = timed(sides, rounds)
    for llm in engines.values():
        llm.close()
    return measured


def training_rows(folder: Path, peer: Any, rounds: int) -> dict[str, tuple[float, float]]:
    tokens = torch.randint(3, SIZES["vocab_size"], (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))  # type: ignore[call-overload]
    decoders = {name: load_model(folder, select(), implemented_by=each) for name, each in SIDES.items()}

    def step(loss: Callable[[], Tensor], model: Any) -> float:
        model.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    sides: dict[str, Callable[[], float]] = {
        name: lambda decoder=decoder: step(lambda: packed_loss(decoder, tokens), decoder)  # type: ignore[misc]
        for name, decoder in decoders.items()
    }
    sides["transformers"] = lambda: step(lambda: peer_loss(peer, tokens), peer)
    losses = [run() for run in sides.values()]
    if max(losses) - min(losses) > 1e-4:
        sys.exit(f"the losses differ: {losses}")
    return timed(sides, rounds)


def bits_row(model_type: str, keys: dict[str, Any], folder: Path) -> str:
    """Returns a row on whether the bits of a model depend on the batch, with two threads."""
    save_random(model_type, folder, **{**SMALL, **keys})
    decoder = load_model(folder, select(), implemented_by=SIDES["model_impl transformers"])
    sequences = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (301, 2, 77, 150)]
    with torch.no_grad():
        bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(len(each)) for each in sequences])
        together = decoder.logits(decoder(torch.cat(sequences), positions, PackedContext(bounds, 301))).split([len(each) for each in sequences])
        alone = [
            decoder.logits(decoder(each, torch.arange(len(each)), PackedContext(torch.tensor([0, len(each)], dtype=torch.int32), len(each))))
            for each in sequences
        ]
        expected = [
            decoder.kernels.logits_logprobs(logits[:-1].contiguous(), each[1:]).tolist() for logits, each in zip(together, sequences, strict=True)
        ]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with LLM(folder, model_impl="transformers", skip_tokenizer_init=True, max_num_batched_tokens=100, max_num_seqs=3) as llm:
        outputs = llm.generate([{"prompt_token_ids": each.tolist()} for each in sequences], params, use_tqdm=False)
    engine = [[next(iter(each.values())).logprob for each in (output.prompt_logprobs or []) if each] for output in outputs]
    packed = all(a.equal(b) for a, b in zip(together, alone, strict=True))
    chunked = all(a == b for a, b in zip(expected, engine, strict=True))
    return f"| `{model_type}` | {'equal' if packed else 'differ'} | {'equal' if chunked else 'differ'} |"


def table(measured: dict[str, tuple[float, float]], tokens: int, what: str) -> list[str]:
    own = measured["tandem"][1]
    return [
        f"| {what} | {name} | {best:.3f} | {median:.3f} | {tokens / median:,.0f} | {own / median:.2f} | {list(measured.values())[-1][1] / median:.2f} |"
        for name, (best, median) in measured.items()
    ]


def main() -> None:
    parser = shared_parser(__doc__, threads=1)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    began = machine()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        peer = save_random("qwen3", folder, **SIZES)
        count = sum(parameter.numel() for parameter in peer.parameters())
        rows = table(engine_rows(folder, peer, given.rounds), PROMPTS * NEW, "engine")
        rows += table(training_rows(folder, peer, given.rounds), SEQUENCES * LENGTH, "training step")
        torch.set_num_threads(2)
        bits = [bits_row(name, keys, Path(place) / name) for name, keys in BITS.items()]
    text = f"""# The module of transformers in the place of Tandem's network

{began}

{count / 1e6:.0f} million parameters, shaped as Qwen3, fp32, {given.threads} thread(s), {given.rounds} rounds in which the sides take turns.
Engine: {PROMPTS} prompts of {PROMPT} tokens, {NEW} greedy tokens each; tokens are the drawn ones. Training step: forward and backward of {SEQUENCES} sequences
of {LENGTH} tokens. At least {PROMPTS - 1} of the {PROMPTS} completions, and the losses to 1e-4, are the same on all sides.

| work | side | best, s | median, s | tokens per second | times tandem's speed | times transformers' speed |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

## Bits

Log-probabilities in fp32 with 2 threads: of a sequence alone and in a packed batch, as the trainer computes them; and by the engine in chunks of at most
100 tokens of three sequences, against the packed batch.

| `model_type` | alone and packed | trainer and engine |
| --- | --- | --- |
{chr(10).join(bits)}
"""
    print(write_report("transformers-module", text, given.out))


if __name__ == "__main__":
    main()
