"""Tokenize text into WebDataset shards, in as many processes as there are cores.

SOURCE has JSON lines (.jsonl, .ndjson, also with .gz), tables (.parquet, .arrow; pip install 'tandem-rl[data]'), WebDataset shards
(.tar, .tar.gz, .tgz) or files with one document each; it and DESTINATION are folders or URLs such as s3://bucket/prefix
(pip install 'tandem-rl[s3]'). A row of a table is like a JSON line. In a shard, KEY.txt is a document, or else KEY.json an object like a
JSON line; other members are skipped. Repeating the command resumes interrupted work; the shards have the same bytes for any number of
processes. --new-vocabulary first trains a tokenizer on the source and writes it to the folder of --tokenizer. --side selects the
documents for training, or those held out.

--examples reads JSON objects for supervised fine-tuning: a prompt with its completion, or a conversation ("messages", rendered with the
tokenizer's chat template). The shards then mark the learned tokens: the completion, or the turns of the assistant. --pairs reads preference
pairs: "prompt", "chosen" and "rejected", of texts or of messages; the tokens of the two answers are learned.

examples:
  tandem tokenize corpus/ tokens/ --tokenizer models/qwen3
  tandem tokenize corpus/ tokens/train --tokenizer tokens/tokenizer --new-vocabulary 8192 --side train
  tandem tokenize corpus/ tokens/held-out --tokenizer tokens/tokenizer --side held_out
  tandem tokenize s3://bucket/text s3://bucket/tokens --tokenizer models/qwen3 --workers 32
  tandem tokenize chats/ tokens/chats --tokenizer models/qwen3 --examples
  tandem tokenize questions/ tokens/questions --tokenizer models/qwen3 --examples --prompt-key question --completion-key answer
  tandem tokenize preferences/ tokens/pairs --tokenizer models/qwen3 --pairs
  tandem tokenize /usr/lib/python3.11 tokens/ --tokenizer models/small --suffix .py
"""

import argparse
import sys
import time
from pathlib import Path

from tandem.types import UserError

MOST_SHARD_MIB = 2**20
"""A shard is one file, verified as a whole whenever it is opened."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a folder or URL with text")
    parser.add_argument("destination", help="a folder or URL for the shards")
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face folder, or a model of the Hub (OWNER/NAME)")
    parser.add_argument("--text-key", default="text", help="the key of the text in a JSON object")
    parser.add_argument("--examples", action="store_true", help="JSON objects are examples for supervised fine-tuning, not texts")
    parser.add_argument("--pairs", action="store_true", help="JSON objects are preference pairs, for dpo and reward_model")
    parser.add_argument("--margin-key", default="", help="with --pairs: the key of a pair's margin, for reward_model (default: none)")
    parser.add_argument("--prompt-key", default="prompt", help="with --examples: the key of the prompt")
    parser.add_argument("--completion-key", default="completion", help="with --examples: the key of the completion")
    parser.add_argument("--suffix", action="append", help="suffix of documents; may be repeated (default: .txt and .md)")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="skip files by name, for example '*/tests/*'; may be repeated")
    parser.add_argument("--skip-broken", action="store_true", help="count and skip documents that cannot be read")
    parser.add_argument("--shard-mib", type=float, default=64.0, help="size of the source of one shard in MiB (default: 64)")
    parser.add_argument("--no-end", action="store_true", help="do not append an end-of-sequence token to documents")
    parser.add_argument("--new-vocabulary", type=int, metavar="TOKENS", help="first train a tokenizer with this many tokens")
    parser.add_argument("--side", choices=("all", "train", "held_out"), default="all", help="the documents to write (default: all)")
    parser.add_argument("--held-out-share", type=float, default=0.01, help="share of the documents that are held out (default: 0.01)")
    parser.add_argument("--workers", type=int, default=0, help="number of processes (default: one per core)")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tandem.data.tokenizing.documents import DocumentFormat
    from tandem.data.tokenizing.tokenize import tokenize
    from tandem.data.tokenizing.tokenize_plan import TokenizeSettings
    from tandem.data.tokenizing.train_tokenizer import train_tokenizer
    from tandem.model.model_source import find_model
    from tandem.storage.files import open_storage

    if not 0 < options.shard_mib <= MOST_SHARD_MIB:
        raise UserError(f"--shard-mib is {options.shard_mib}; it must be above 0, at most {MOST_SHARD_MIB}")
    suffixes = tuple(options.suffix or (() if options.examples or options.pairs else (".txt", ".md")))
    form = DocumentFormat(
        options.text_key, suffixes, tuple(options.exclude), options.skip_broken, options.examples, options.prompt_key, options.completion_key,
        options.pairs, options.margin_key,
    )  # fmt: skip
    tokenizer = options.tokenizer if options.new_vocabulary is not None else str(find_model(options.tokenizer, "tokenizer"))
    settings = TokenizeSettings(
        options.source, options.destination, tokenizer, form,
        unit_bytes=int(options.shard_mib * 2**20), append_end=not options.no_end, side=options.side,
        held_out_share=options.held_out_share, workers=options.workers,
    )
    settings.check()
    if options.new_vocabulary is not None:
        print(f"training a tokenizer with {options.new_vocabulary:,} tokens", flush=True)
        tokens = train_tokenizer(
            open_storage(options.source), settings.form, options.new_vocabulary, Path(options.tokenizer), progress=sys.stderr.isatty()
        )
        if tokens < options.new_vocabulary:
            print(f"the text yields only {tokens:,} tokens", flush=True)
    columns = (TextColumn("tokenizing"), BarColumn(), TextColumn("{task.percentage:.0f}%  {task.fields[note]}"), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=None, note="")

        def show(done: int, total: int, tokens: int) -> None:
            rate = tokens / max(time.monotonic() - began, 1e-3)
            bar.update(task, completed=done, total=total, note=f"{tokens:,} tokens, {rate:,.0f}/s")

        dataset = tokenize(settings, show)
    skipped = f" ({dataset.skipped:,} broken ones skipped)" if dataset.skipped else ""
    learned = f" ({dataset.learned:,} of them learned)" if dataset.has_masks else ""
    count, kind = dataset.documents, "examples" if dataset.has_masks else "documents"
    if dataset.pairs:
        count, kind = count // 2, "pairs"
    print(f"{count:,} {kind}{skipped}, {dataset.tokens:,} tokens{learned} in {len(dataset.shards)} shards: {options.destination}")
    return 0
