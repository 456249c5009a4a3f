"""Absurd files in the place of each file that a command reads: special files, bombs, damaged bytes."""

import json
import os
import random
import shlex
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from absurd import Outcome, run_forked

from tandem.config.model import NewModelConfig

TIB = 2**40
DEEP = 100_000
GZIP_BOMB = "gzip of 1 GiB of one line"

MOST_BYTES_OF_A_LINE = 5 * 2**30
"""The resident memory of a command that reads a line of 1 GiB: it is held as the file's bytes, as text and as a value before it is refused."""


class Place(NamedTuple):
    """A file of ``folder`` and a command that reads it. ``path``: of the file below the folder, which the case replaces. ``is_text``: any long text is
    valid and takes as long as its computation."""

    name: str
    path: str
    command: tuple[str, ...]
    is_text: bool = False


def _write(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)

    return make


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TIB)


def _header(length: int, header: object = None) -> Callable[[Path], None]:
    text = json.dumps(header or {}).encode()
    return _write(struct.pack("<Q", length if header is None else len(text)) + text + bytes(64))


def _bomb(levels: int = 9) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines).encode()


def _merge_bomb(levels: int = 9) -> bytes:
    lines = ["a0: &a0 {k: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}")
    return "\n".join(lines).encode()


def _gzip_bomb(path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    block = packer.compress(b'{"text": "')
    path.write_bytes(block + b"".join(packer.compress(b"x" * 2**20) for _ in range(1024)) + packer.flush())


SPECIAL: Mapping[str, Callable[[Path], None]] = {
    "empty": _write(b""),
    "folder": lambda path: path.mkdir(),
    "FIFO": lambda path: os.mkfifo(path),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to /dev/full": lambda path: path.symlink_to("/dev/full"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "sparse, 1 TiB": _sparse,
    "NUL bytes": _write(bytes(2**16)),
    "not UTF-8": _write(b"\xff\xfe\x00\xd8" * 100),
    "UTF-16": _write("{}\n".encode("utf-16")),
    "100,000 open brackets": _write(b"[" * DEEP),
    "100,000 nested lists": _write(b"[" * DEEP + b"]" * DEEP),
    "100,000 nested objects": _write(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "900 nested lists": _write(b'{"model_type": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "lone surrogates": _write(b'{"text": "a\\ud800", "prompt": "1\\udc00=", "answer": "\\ud800", "completion": "\\ud800", "messages": 1}\n' * 40),
    "lone surrogate in an answer": _write(b'{"text": "a", "prompt": "1=", "answer": "\\uDFFF", "completion": "\\ud800"}\n' * 40),
    "5,000 digits": _write(b'{"text": ' + b"9" * 5000 + b', "prompt": 1, "hidden_size": ' + b"9" * 5000 + b"}\n"),
    "400 digits": _write(b'{"model_type": "qwen3", "hidden_size": %s, "num_hidden_layers": %s, "r": %s}\n' % ((b"9" * 400,) * 3)),
    "infinite numbers": _write(b'{"text": 1e999, "prompt": "1=", "answer": 1e999, "lora_alpha": 1e999, "r": 1, "peft_type": "LORA"}\n' * 40),
    "null": _write(b"null"),
    "a text": _write(b'"x"'),
    "YAML bomb": _write(_bomb()),
    "YAML merge bomb": _write(_merge_bomb()),
    "YAML that contains itself": _write(b"a: &a [*a]\n"),
    "YAML keys that are lists": _write(b"? [a]\n: b\n"),
    "YAML date": _write(b"run: {seed: 2026-13-45}\n"),
    "one line of 2 MiB": _write(b'{"prompt": "' + b"1" * 2**21 + b'", "answer": "1", "text": "x"}\n'),
    "header of 2^63 bytes": _header(2**63),
    "header of 2^64 - 1 bytes": _header(2**64 - 1),
    "overlapping tensors": _header(0, {name: {"dtype": "F32", "shape": [8], "data_offsets": [at, at + 32]} for name, at in (("a", 0), ("b", 16))}),
    "tensor of 2^62 numbers": _header(0, {"a": {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 2**64]}}),
    GZIP_BOMB: _gzip_bomb,
}  # fmt: skip


def one_line_of_a_gibibyte(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"prompt": "')
        for _ in range(1024):
            file.write(b"1" * 2**20)
        file.write(b'", "answer": "1", "text": "x"}\n')


def make_files(folder: Path) -> None:
    # A process that forks without torch forks ten times as fast.
    from tandem.model.create_model import create_model

    model, data = folder / "model", folder / "data"
    create_model(
        NewModelConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64,
            max_position_embeddings=96, initializer_range=0.3,
        ), 0, model,
    )  # fmt: skip
    _shard(model, folder / "sharded")
    _adapter(folder / "adapter")
    data.mkdir()
    rows = [{"text": f"document {i}", "prompt": f"{i}=", "answer": str(i), "completion": str(i)} for i in range(60)]
    for name in ("rows.jsonl", "prompts.jsonl"):
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "one.txt").write_text("one document\n" * 20)
    (folder / "recipe.yaml").write_text(_recipe(folder))
    (folder / "schema.json").write_text('{"type": "integer"}')
    (folder / "grammar.lark").write_text("start: /[0-9]+/")
    (folder / "key.txt").write_text("secret\n")


def places_in(folder: Path) -> list[Place]:
    """Returns the places of the files that ``make_files`` made in ``folder``."""
    return [*places_of_data(folder), *places_of_models(folder)]


DRY_RUN = ("train", "recipe.yaml", "--dry-run")


def places_of_data(folder: Path) -> list[Place]:
    """Returns the places of recipes and of what is read beside them: prompts, rows, documents."""
    model = folder / "model"
    tokenize = ("tokenize", "data", "tokens", "--tokenizer", str(model), "--workers", "1")
    jsonl = ("--task={name: dataset, path: data/prompts.jsonl}", "--sft.corrupted_share=0")
    evaluate = ("evaluate", str(model), "--task", "perplexity", "--data")
    return [
        Place("recipe", "recipe.yaml", DRY_RUN),
        Place("prompts of a task", "data/prompts.jsonl", (*DRY_RUN, *jsonl)),
        Place("prompts of generate", "data/prompts.jsonl", ("generate", str(model), "--prompts", "data/prompts.jsonl", "--max-tokens", "1")),
        Place("rows of data", "data/rows.jsonl", tokenize),
        Place("rows of data, --skip-broken", "data/rows.jsonl", (*tokenize, "--skip-broken")),
        Place("examples", "data/rows.jsonl", (*tokenize, "--examples")),
        Place("examples, --skip-broken", "data/rows.jsonl", (*tokenize, "--examples", "--skip-broken")),
        Place("rows of data, compressed", "data/rows.jsonl.gz", tokenize),
        Place("documents in a tar", "data/rows.tar", tokenize),
        Place("document", "data/one.txt", tokenize),
        Place("document, --skip-broken", "data/one.txt", (*tokenize, "--skip-broken")),
        Place("text to train a tokenizer", "data/rows.jsonl", ("tokenize", "data", "tokens", "--tokenizer", "new", "--new-vocabulary", "300")),
        Place("text of a perplexity", "data/one.txt", (*evaluate, "data/one.txt"), is_text=True),
        Place("rows of a perplexity", "data/rows.jsonl", (*evaluate, "data/rows.jsonl")),
        Place("calibration text", "data/one.txt", ("quantize", str(model), "quantized", "--method", "rtn", "--calibration", "data/one.txt")),
    ]


def places_of_models(folder: Path) -> list[Place]:
    """Returns the places of models, of the registry and runs that hold them, and of what a request to one reads."""
    model = folder / "model"
    generate, sharded = (("generate", name, "--prompt", "1=", "--max-tokens", "2") for name in (str(model), "sharded"))
    model_files = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
    return [
        *(Place(name, f"model/{name}", generate) for name in model_files),
        Place("config.json of a recipe", "model/config.json", (*DRY_RUN, "--model.create=null", "--sft=null", f"--model.path={model}")),
        Place("tokenizer of a new model", "model/tokenizer.json", (*DRY_RUN, f"--model.create.tokenizer={model}")),
        Place("chat template", "model/chat_template.jinja", (*generate, "--chat")),
        Place("index of shards", "sharded/model.safetensors.index.json", sharded),
        Place("shard", "sharded/model-1.safetensors", sharded),
        Place("adapter_config.json", "adapter/adapter_config.json", (*generate, "--lora", "adapter")),
        Place("adapter_model.safetensors", "adapter/adapter_model.safetensors", (*generate, "--lora", "adapter")),
        Place("JSON schema", "schema.json", (*generate, "--json-schema", "schema.json")),
        Place("grammar", "grammar.lark", (*generate, "--grammar", "grammar.lark")),
        Place("registry", "registry/registry.sqlite", ("models", "list", "--registry", "registry")),
        Place("registry's folder", "registry", ("models", "list", "--registry", "registry")),
        Place("config.yaml of a run", "run/config.yaml", ("resume", "run")),
        Place("journal of a report", "run/journal.sqlite", ("report", "run")),
        Place("SRC of convert", "model/model.safetensors", ("convert", str(model), "converted")),
        Place("file of a key", "key.txt", ("serve", str(model), "--api-key", "@key.txt", "--port", "-1")),
    ]


def command_lines(model: str, data: str) -> dict[str, tuple[str, ...]]:
    """Returns a valid or nearly valid line of each command with options that take a value, by the command's name."""
    return {
        "generate": ("generate", model, "--prompt", "12=", "--max-tokens", "2"),
        "tokenize": ("tokenize", data, "tokens", "--tokenizer", model, "--workers", "1"),
        "tokenize ": ("tokenize", data, "tokens", "--tokenizer", "new", "--new-vocabulary", "300", "--workers", "1"),
        "evaluate": ("evaluate", model, "--task", "sort", "--prompts", "2", "--max-tokens", "4"),
        "evaluate ": ("evaluate", model, "--task", "perplexity", "--data", f"{data}/one.txt"),
        "quantize": ("quantize", model, "quantized", "--method", "rtn", "--calibration", f"{data}/one.txt", "--sequence-length", "8"),
        "convert": ("convert", model, "converted", "--to", "megatron"),
        "models list": ("models", "list"),
        "models show": ("models", "show", "a/1"),
        "replay": ("replay", model, "--step", "0"),
        "resume": ("resume", model),
        # The port ends it before it serves.
        "serve": ("serve", model, "--port", "-1"),
        "gateway": ("gateway", "--backends", "http://127.0.0.1:9", "--port", "-1"),
        "keys create": ("keys", "create", "--file", "keys.json", "--tenant", "a"),
        "keys list": ("keys", "list", "--file", "keys.json"),
        "up": ("up", "observability", "--emit"),
        "plan": tuple(shlex.split("plan --hidden 64 --layers 2 --heads 2 --vocab 256 --experts 2 --gpus 2 --dp 2 --seq 64 --global-batch 8")),
        "weights check": ("weights", "check", "--inline", "--threads", "1", "--model", model),
    }


def _recipe(folder: Path) -> str:
    return (
        "model:\n  create: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, intermediate_size: 32}\n"
        "task: {name: sort}\nsft: {steps: 2, warmup_steps: 1, batch_size: 2, max_accuracy: 1.0}\n"
        "rollout: {prompts_per_step: 2, max_tokens: 8}\nalgorithm: {group_size: 2}\n"
        f"evaluation: {{prompts: 4, final_prompts: 4}}\nrun: {{max_steps: 1, directory: {json.dumps(str(folder / 'runs'))}}}\nmachine: {{threads: 1}}\n"
    )


def _shard(model: Path, folder: Path) -> None:
    from safetensors.torch import load_file

    from tandem.model.huggingface.safetensors_file import write_file

    shutil.copytree(model, folder)
    tensors = sorted(load_file(model / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    shards = {"model-0.safetensors": tensors[::2], "model-1.safetensors": tensors[1::2]}
    for name, part in shards.items():
        write_file(folder / name, part)
    weight_map = {name: shard for shard, part in shards.items() for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _adapter(folder: Path) -> None:
    import torch

    from tandem.model.huggingface.safetensors_file import write_file

    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    write_file(folder / "adapter_model.safetensors", [(name.format("A"), torch.ones(2, 32)), (name.format("B"), torch.ones(32, 2))])


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Returns ``content`` with one random change: bits flipped, bytes removed, repeated, or replaced by what parsers stumble over."""
    at = draw.randrange(len(content) + 1)
    length = draw.randrange(1, 64)
    kind = draw.randrange(6)
    if kind == 0 and content:
        flipped = bytearray(content)
        for _ in range(draw.randrange(1, 9)):
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + content[at + length :]
    if kind == 3:
        return content[:at] + content[max(0, at - length) : at] * draw.randrange(1, 1000) + content[at:]
    odd = (
        b"\0", b"\xff", b"\\ud800", b"[" * 5000, b"{" * 5000, b"9" * 400, b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b'"', b"\n", b"\x1b[31m", b"&a *a",
        b"18446744073709551616",
    )  # fmt: skip
    put = odd[draw.randrange(len(odd))] if kind == 4 else draw.randbytes(length)
    return content[:at] + put + content[at + (length if draw.random() < 0.5 else 0) :]


class FileCase(NamedTuple):
    place: Place
    kind: str
    outcome: Outcome


def run_case(folder: Path, scratch: Path, place: Place, make: Callable[[Path], None], limit_s: float = 10.0) -> Outcome:
    """Runs the command of ``place`` in a copy of ``folder`` in which ``make`` has made its file."""
    copy = scratch / "files"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, symlinks=True)
    path = copy / place.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    command = tuple(str(part).replace(str(folder), str(copy)) for part in place.command)
    try:
        return run_forked(command, cwd=copy, limit_s=limit_s)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def special_cases(folder: Path, scratch: Path, places: list[Place], every: int = 1) -> Iterator[FileCase]:
    """Yields one in ``every`` of the pairs of a place and a kind of special file."""
    pairs = [(place, kind) for place in places for kind in SPECIAL if not (place.is_text and kind.startswith(("100,000", "one line")))]
    for place, kind in pairs[::every]:
        outcome = run_case(folder, scratch, place, SPECIAL[kind])
        # Where rows are read, gzip is unpacked.
        holds_line = kind == GZIP_BOMB and place.path.endswith(".jsonl")
        yield FileCase(place, kind, outcome._replace(most_bytes=MOST_BYTES_OF_A_LINE) if holds_line else outcome)


def damaged_cases(folder: Path, scratch: Path, places: list[Place], count: int, seed: int = 0) -> Iterator[FileCase]:
    """Yields ``count`` random changes of the file of each place that has one."""
    for place in places:
        path = folder / place.path
        if path.is_file():
            for number in range(count):
                content = damaged(path.read_bytes(), random.Random(f"{seed} {place.name} {number}"))
                yield FileCase(place, f"random change {number}", run_case(folder, scratch, place, _write(content)))


def defects(cases: Iterable[FileCase]) -> list[tuple[str, str, Outcome]]:
    """Returns place, kind and outcome of the ``cases`` that did not end in one line, in time and within their memory."""
    return [(case.place.name, case.kind, case.outcome) for case in cases if not case.outcome.is_good]
