"""``tandem tokenize`` beside the tokenizer's own batch call, on one core: tokens a CPU second of each.

The text is the Python standard library's sources, the tokenizer a byte-level BPE trained on a part of them. Ours reads files,
tokenizes, and writes verified WebDataset shards, in one worker process; the peer has the texts in memory already and only calls
``tokenizers``' batch call on one thread and reads the ids. The two take turns; the best of the rounds counts.

    python benchmarks/tokenizing.py [--rounds 5] [--mib 12] [--out benchmarks/results]
"""

import argparse
import datetime
import json
import os
import resource
import sysconfig
import tempfile
import time
from pathlib import Path

from machine import HERE, machine, write_report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.data.tokenizing.documents import DocumentFormat
from tandem.data.tokenizing.tokenize import TokenizeSettings, tokenize


def texts_of(mebibytes: float) -> list[str]:
    """Sources of the standard library, ``mebibytes`` of them, in the order of their names."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or size > mebibytes * 2**20:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        size += path.stat().st_size
    return texts


def train_tokenizer(texts: list[str], folder: Path) -> Tokenizer:
    folder.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(texts[::8], trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return backend


def ours(source: Path, destination: Path, tokenizer: Path) -> tuple[int, float, float]:
    """(tokens, CPU seconds of this process and the worker, wall seconds)."""
    before, cpu, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time(), time.perf_counter()
    found = tokenize(TokenizeSettings(str(source), str(destination), str(tokenizer), DocumentFormat(suffixes=(".py",)), append_end=False, workers=1))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found.tokens, time.process_time() - cpu + children, time.perf_counter() - wall


def peer(backend: Tokenizer, texts: list[str]) -> tuple[int, float, float]:
    cpu, wall, tokens = time.process_time(), time.perf_counter(), 0
    for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
        tokens += len(encoding.ids)
    return tokens, time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    described = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = texts_of(options.mib)
        backend = train_tokenizer(texts, folder / "tokenizer")
        (folder / "source").mkdir()
        for i, text in enumerate(texts):
            (folder / "source" / f"{i:05d}.py").write_text(text, encoding="utf-8")
        measured = []
        for i in range(options.rounds):
            measured.append((ours(folder / "source", folder / f"tokens-{i}", folder / "tokenizer"), peer(backend, texts)))
    assert len({side[0] for pair in measured for side in pair}) == 1, "both sides must find the same tokens"
    tokens = measured[0][0][0]
    rows = []
    for what, clock in (("CPU second", 1), ("wall second, start of the worker included", 2)):
        mine, theirs = (tokens / min(pair[side][clock] for pair in measured) for side in (0, 1))
        rows.append(f"| {what} | {mine:,.0f} | {theirs:,.0f} | {mine / theirs:.2f} | {'0.85' if clock == 1 else ''} |")
    text = "\n".join(
        [
            "# Tokenizing beside the tokenizer's own batch call", "", f"{datetime.date.today()}. {described}", "",
            f"{len(texts)} documents, {sum(map(len, texts)) / 2**20:.1f} Mi characters, {tokens:,} tokens; best of {options.rounds}; one core a side.", "",
            "| tokens a | ours | tokenizers | ours / tokenizers | target |", "|---|---|---|---|---|", *rows,
        ]
    )
    print(text)
    print(f"wrote {write_report('tokenizing', text, options.out)}")


if __name__ == "__main__":
    main()
