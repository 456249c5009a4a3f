"""Complete prompts with a model.

MODEL is a Hugging Face folder (of a run: runs/NAME/model), a model of the Hugging Face Hub (OWNER/NAME), or the address of a
folder in object storage (s3://bucket/folder); the last two are cached on the local disk. A prompt is continued as given, or
with --chat rendered with the tokenizer's chat template.

Prompts come from --prompt, from the lines of a --prompts file, or from standard input. In a .jsonl file each line is an object
with "prompt", "prompt_token_ids" or "messages".

examples:
  tandem generate runs/sort/model --prompt "86433=" --temperature 0
  tandem generate runs/sort/model --prompt "9441=" --n 4
  cat prompts.txt | tandem generate runs/sort/model          one prompt per line
  tandem generate runs/sort/model --prompts prompts.jsonl --output answers.jsonl
  tandem generate runs/sort/model --prompt "..." --json      with token ids and log-probabilities
  tandem generate runs/sort/model --prompt "..." --regex "[0-9]+"
  tandem generate s3://models/qwen3 --prompt "..." --json-schema answer.schema.json
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tandem.cli.engine_options import add_engine_options, engine_args, template_text
from tandem.runtime.machine.available_memory import total_bytes
from tandem.text.surrogates import has_lone_surrogate
from tandem.types import UserError
from tandem.types.input_file import read_input

if TYPE_CHECKING:
    from tandem.engine.llm import LLM
    from tandem.engine.llm_inputs import PromptInput
    from tandem.engine.lora.request import LoRARequest
    from tandem.engine.processing.outputs import RequestOutput
    from tandem.engine.sample.sampling_params import SamplingParams

BYTES_PER_BYTE = 8
"""Memory for each byte of a file of prompts, at least: its text, its lines and its prompts, with up to 4 bytes a character."""
DEFAULT_TOKENS = 64
LEFT_OUT = ("seed", "skip_tokenizer_init", "enable_lora", "max_loras", "max_lora_rank", "runner", "convert", "pooler_config", "hf_overrides")
"""What the command's other options decide."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder, a model of the Hub (OWNER/NAME), or a folder in object storage (s3://...)")
    given = parser.add_argument_group("prompts and output")
    given.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    given.add_argument("--prompts", metavar="FILE", help="a file with one prompt per line, or JSON lines if it ends in .jsonl; - is standard input")
    given.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    given.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    given.add_argument("--chat-template", metavar="FILE", help="a chat template in Jinja, or its text, instead of the tokenizer's own")
    given.add_argument("--output", metavar="FILE", help="write the completions to this file, one JSON object each")
    given.add_argument("--json", action="store_true", help="print the completions as one JSON object each")
    drawn = parser.add_argument_group("sampling")
    drawn.description = "The defaults are those of the model's generation_config.json, else the ones that are shown."
    drawn.add_argument("--max-tokens", type=int, help="maximum number of new tokens (default: 64); 0 scores the prompt")
    drawn.add_argument("--min-tokens", type=int, default=0)
    drawn.add_argument("--temperature", type=float, help="0 is greedy (default: 1)")
    drawn.add_argument("--top-k", type=int, help="draw from the K most likely tokens (default: 0, all)")
    drawn.add_argument("--top-p", type=float, help="draw from the most likely tokens with this share of the probability (default: 1, all)")
    drawn.add_argument("--min-p", type=float, help="draw from the tokens with this share of the largest probability (default: 0, all)")
    drawn.add_argument("--presence-penalty", type=float, default=0.0)
    drawn.add_argument("--frequency-penalty", type=float, default=0.0)
    drawn.add_argument("--repetition-penalty", type=float, help="divide the logits of tokens that occurred before (default: 1, off)")
    drawn.add_argument("--stop", action="append", default=[], help="a text that ends a completion; may be repeated")
    drawn.add_argument("--bad-word", action="append", default=[], help="a text that is never generated; may be repeated")
    drawn.add_argument("--n", type=int, default=1, help="number of completions per prompt")
    drawn.add_argument("--seed", type=int, default=0)
    drawn.add_argument("--logprobs", type=int, metavar="N", help="the N most likely tokens at each position, with --json")
    drawn.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for the prompt's tokens")
    form = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="a JSON schema")
    form.add_argument("--regex", help="a regular expression")
    form.add_argument("--choice", action="append", metavar="TEXT", help="one of the texts that are allowed; may be repeated")
    form.add_argument("--grammar", metavar="FILE", help="a grammar in Lark's syntax or GBNF")
    drawn.add_argument("--lora", metavar="FOLDER", help="a LoRA adapter in the format of PEFT")
    add_engine_options(parser, LEFT_OUT)


def run(options: argparse.Namespace) -> int:
    if options.system is not None and not options.chat:
        raise UserError("--system needs --chat; it is the system message of the chat template")
    asked = _prompts(options)
    # A wrong value is refused before the model is loaded.
    _params(options, {})
    from tandem.engine.llm import LLM

    adapter, rank = _adapter(options.lora)
    lora = {} if adapter is None else {"enable_lora": True, "max_lora_rank": rank}
    args = engine_args(options, model=options.model, seed=options.seed, runner="generate", **lora)
    with LLM.from_engine_args(args) as llm, _writer(options) as out:
        params = _params(options, llm.sampling_defaults)
        inputs = [_input(llm, entry, options) for entry in asked]
        with _progress() as on_progress:
            outputs = llm.generate(inputs, params, use_tqdm=False, on_progress=on_progress, lora_request=adapter)
        for entry, output in zip(asked, outputs, strict=True):
            for line in _lines(entry, output, options, is_single=len(asked) == options.n == 1):
                print(line, file=out)
    return 0


def _adapter(folder: str | None) -> "tuple[LoRARequest | None, int]":
    """Returns the adapter in ``folder`` and its rank; ``None`` and 1 without a folder."""
    if folder is None:
        return None, 1
    from tandem.engine.lora.request import LoRARequest
    from tandem.model.huggingface.peft_folder import rank_of
    from tandem.model.model_source import find_model

    path = str(find_model(folder, "adapter"))
    return LoRARequest(folder, 1, path), rank_of(path)


def _params(options: argparse.Namespace, defaults: Mapping[str, float | int]) -> "SamplingParams":
    """Returns the sampling parameters: those given, else the model's ``defaults``, else the command's."""
    from tandem.engine.sample.sampling_params import SamplingParams
    from tandem.engine.structured_output.params import StructuredOutputsParams

    wanted = {
        "json": None if options.json_schema is None else _read(options.json_schema),
        "regex": options.regex,
        "choice": options.choice,
        "grammar": None if options.grammar is None else _read(options.grammar),
    }
    names = (
        "n", "temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop", "seed", "logprobs", "prompt_logprobs",
        "presence_penalty", "frequency_penalty", "repetition_penalty",
    )  # fmt: skip
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return SamplingParams(
        **{"max_tokens": DEFAULT_TOKENS, **defaults, **given},
        bad_words=options.bad_word,
        structured_outputs=StructuredOutputsParams(**wanted) if any(v is not None for v in wanted.values()) else None,
    )


def _prompts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns each prompt as an object with ``prompt``, ``prompt_token_ids`` or ``messages``."""
    if options.prompt is not None:
        if options.prompts is not None:
            raise UserError("--prompt and --prompts exclude each other; give one of them")
        return [{"prompt": prompt} for prompt in options.prompt]
    if options.prompts is None or options.prompts == "-":
        if sys.stdin.isatty():
            raise UserError("no prompt; give --prompt TEXT or pipe lines into standard input")
        name, lines = "standard input", list(sys.stdin)
    else:
        name, lines = f"'{options.prompts}'", _read(options.prompts).splitlines()
    numbered = [(number, line.rstrip("\n")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{name} contains no prompt; give --prompt TEXT, or one prompt per line")
    if options.prompts is None or not options.prompts.endswith(".jsonl"):
        return [{"prompt": line} for _, line in numbered]
    return [_parse(line, f"{options.prompts}:{number}") for number, line in numbered]


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    kinds = {"prompt": str, "prompt_token_ids": list, "messages": list}
    if not isinstance(entry, dict) or sum(isinstance(entry.get(name), kind) for name, kind in kinds.items()) != 1:
        raise UserError(f"{where}: a line is an object with one of prompt (a text), prompt_token_ids and messages (lists)")
    if "prompt_token_ids" in entry and not (
        isinstance(tokens := entry["prompt_token_ids"], list) and all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    ):
        raise UserError(f"{where}: prompt_token_ids has an invalid token id; give whole numbers")
    if "messages" in entry and not (isinstance(said := entry["messages"], list) and all(isinstance(message, dict) for message in said)):
        raise UserError(f"{where}: every message must be an object with role and content")
    if has_lone_surrogate(line, entry):
        raise UserError(f"{where}: a text contains half of a surrogate pair, which is not a character; correct the text")
    return entry


def _input(llm: "LLM", entry: dict[str, Any], options: argparse.Namespace) -> "PromptInput":
    """Returns the engine's input: the prompt as given, or through the chat template."""
    messages = entry.get("messages")
    if messages is None and options.chat and "prompt" in entry:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        messages = [*system, {"role": "user", "content": entry["prompt"]}]
    if messages is not None:
        return llm.chat_prompt(messages, template=None if options.chat_template is None else template_text(options.chat_template))
    return {name: entry[name] for name in ("prompt", "prompt_token_ids") if name in entry}


def _lines(entry: dict[str, Any], output: "RequestOutput", options: argparse.Namespace, is_single: bool) -> Iterator[str]:
    """Yields a line of output for each completion."""
    asked: dict[str, Any] = {name: entry[name] for name in ("prompt", "prompt_token_ids", "messages", "id") if name in entry}
    for completion in output.outputs:
        if options.json or options.output is not None:
            scores: dict[str, Any] = {} if output.prompt_logprobs is None else {"prompt_logprobs": output.prompt_logprobs}
            row = {**asked, **dataclasses.asdict(completion), **scores}
            yield json.dumps(row, ensure_ascii=False, default=dataclasses.asdict)
        else:
            yield completion.text if is_single else f"{entry.get('prompt', '')}{completion.text}"


@contextlib.contextmanager
def _writer(options: argparse.Namespace) -> Iterator[TextIO]:
    """Yields the stream for completions. A file receives all of them or is left as it was; a device or FIFO is written as it is."""
    if options.output is None:
        yield sys.stdout
        return
    final = Path(options.output)
    if not final.name or final.is_dir():
        raise UserError(f"--output is '{options.output}', which is not the name of a file; name the file to write")
    if final.exists() and not final.is_file():
        with final.open("w", encoding="utf-8") as out:
            yield out
        return
    fresh = final.with_name(f".{final.name}.tmp")
    with fresh.open("w", encoding="utf-8") as out:
        try:
            yield out
        except BaseException:
            fresh.unlink()
            raise
    fresh.replace(final)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yields the update function of a progress bar, or ``None`` if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=None)
        yield lambda done, asked: bar.update(task, completed=done, total=asked)


def _read(path: str) -> str:
    try:
        return read_input(path, total_bytes() // BYTES_PER_BYTE, "split it: all of it is held").decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"'{path}' does not exist; name a file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from None
