"""``tandem evaluate`` without a recipe: the perplexity of a text, and tasks of lm-eval."""

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.engine_options import implementation
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.engine.llm import LLM


def run_text(options: argparse.Namespace) -> int:
    """Runs ``--task perplexity`` or ``--task lm-eval:NAME[,NAME]``."""
    if options.overrides:
        raise UserError(f"'{options.overrides[0]}' sets a key of a recipe, and --task {options.task} has none; leave it out")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}; it must be at least 1")
    return _perplexity(options) if options.task == "perplexity" else _lm_eval(options)


def _opened(options: argparse.Namespace) -> "LLM":
    from tandem.engine.llm import LLM

    name, trust_remote_code = implementation(options)
    return LLM(options.model, verify=options.verify, model_impl=name, trust_remote_code=trust_remote_code)


def _perplexity(options: argparse.Namespace) -> int:
    from tandem.evaluation.perplexity import perplexity

    if options.data is None:
        raise UserError("--task perplexity needs a text: --data FILE.txt, or --data FILE.jsonl with one document per line")
    texts = read_texts(Path(options.data), options.text_key, options.limit)
    with _opened(options) as llm:
        result = perplexity(llm, texts, options.context, options.stride)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        print(f"perplexity {result.perplexity:.4f} (loss {result.loss:.6f}) on {result.tokens:,} tokens of {result.documents:,} documents")
        print(f"{result.bits_per_byte:.4f} bits per byte")
    return 0


def read_texts(path: Path, text_key: str, limit: int | None = None) -> list[str]:
    """Returns the documents of ``path``, or the first ``limit``: JSON lines (``.jsonl``, ``.ndjson``, both also with ``.gz``) and WebDataset shards
    hold several, any other file is one."""
    from tandem.data.tokenizing.documents import LINES, DocumentFormat, Part, check_whole, documents
    from tandem.data.webdataset import TARS
    from tandem.storage.files import StoredFile, open_storage

    if not path.is_file():
        raise UserError(f"'{path}' is not a file; --data names a text file, or JSON lines with one document each")
    holds_several = path.name.removesuffix(".gz").endswith(LINES) or path.name.endswith(TARS)
    form = DocumentFormat(text_key=text_key, suffixes=(".txt",) if holds_several or not path.suffix else (path.suffix,))
    form.check()
    storage, size = open_storage(str(path.parent)), path.stat().st_size
    check_whole(storage, [StoredFile(path.name, size)], form)
    texts = (document.text for document in documents(storage, Part(path.name, 0, size), form) if document.text)
    return list(itertools.islice(texts, limit))


def _lm_eval(options: argparse.Namespace) -> int:
    from tandem.evaluation.lm_eval import MISSING, is_installed, run_tasks

    names = [name for name in options.task.removeprefix("lm-eval:").split(",") if name]
    if not names:
        raise UserError("--task lm-eval: names no task; give one, for example --task lm-eval:arc_easy")
    if not is_installed():
        raise UserError(MISSING)
    folder = None if options.tasks_folder is None else Path(options.tasks_folder)
    if folder is not None and not folder.is_dir():
        raise UserError(f"--tasks-folder '{folder}' is not a folder; name one with lm-eval's YAML files")
    if options.few_shot is not None and options.few_shot < 0:
        raise UserError(f"--few-shot is {options.few_shot}; it must be at least 0")

    with _opened(options) as llm:
        scores = run_tasks(llm, names, folder, options.limit, options.few_shot)
    if options.json:
        print(json.dumps([asdict(score) for score in scores]))
        return 0
    for score in scores:
        error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
        print(f"{score.task} {score.metric} {score.value:.4f}{error}")
    return 0
