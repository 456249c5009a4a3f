"""A real server of vLLM with weights that a test publishes, its processes and their memory. Tests that use it are skipped by name without its environment."""

import contextlib
import ctypes
import os
import random
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor
from whole_tensors import converted

from tandem.backends.environment import installed
from tandem.backends.vllm.arguments import environment, serve_arguments
from tandem.backends.vllm.engine import VllmEngine
from tandem.backends.vllm.server import VllmServer
from tandem.config.engine import EngineArgs
from tandem.config.lora import LoraConfig
from tandem.model.huggingface.model_folder import read_tensors
from tandem.rl.rollout.groups import InFlightGroups
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.text.tokenizer import Tokenizer
from tandem.types import Prompt, Sample, UserError, WeightVersion
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers


def is_installed() -> bool:
    try:
        return installed("vllm") is not None
    except UserError:
        return False


needs_vllm = pytest.mark.skipif(not is_installed(), reason="the vLLM sidecar has no environment here: tandem sidecar install vllm")
MAX_MODEL_LEN = 64
GREEDY = {
    "n": 1, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12, "budget_tokens": 0, "stop": [], "repetition_detection": None,
    "seed": 0, "purpose": "rollout",
}  # fmt: skip
SAMPLED = {**GREEDY, "n": 4, "temperature": 1.0}


@dataclass
class Engine:
    """A server for the model in ``folder`` and the weights that are published for it."""

    server: VllmServer
    writer: WeightWriter
    tokenizer: Tokenizer
    published: dict[str, Tensor] = field(default_factory=dict)

    def publish(self, tensors: Mapping[str, Tensor], version: WeightVersion) -> None:
        self.published = dict(tensors)
        self.writer.publish(converted(list(tensors.items())), version)

    def engine(self) -> VllmEngine:
        return VllmEngine(self.server, self.tokenizer, max_model_len=MAX_MODEL_LEN, vocab_size=99, most=64)

    def draw(self, prompts: Sequence[Prompt], settings: Mapping[str, Any], step: int = 0, unfinished: Sequence[Sample] = ()) -> list[Sample]:
        groups = InFlightGroups(self.engine())
        groups.add(step, prompts, settings, unfinished)
        return groups.draw("all", lambda done, total: None)

    def processes(self) -> dict[int, str]:
        """The command lines of vLLM's processes, by id."""
        assert self.server.process is not None
        return descendants(self.server.process.pid)


def descendants(pid: int) -> dict[int, str]:
    """Returns the command lines of a process and of all that it started, by id."""
    found = {}
    with contextlib.suppress(OSError):
        found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= descendants(int(child))
    return found


@contextlib.contextmanager
def running(
    model: Path, folder: Path, *, dtype: str = "float32", tensor_parallel_size: int = 1, returns_routing: bool = False, cache_bytes: int = 2**26,
    lora: LoraConfig | None = None,
) -> Iterator[Engine]:
    """Starts a server with dummy weights for ``model``; ``folder`` has its files."""
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors")) * 2 + 2**20
    buffers, store = WeightBuffers.create("test", size), folder / "store.sqlite"
    arguments = serve_arguments(
        EngineArgs(max_num_seqs=64, tensor_parallel_size=tensor_parallel_size), dtype=dtype, seed=0, max_model_len=MAX_MODEL_LEN, cache_bytes=cache_bytes,
        device="cpu", reads_weights=False, returns_routing=returns_routing, returns_times=True,
    )  # fmt: skip
    server = VllmServer(model, arguments, folder / "vllm", folder / "vllm.log", str(store), 2, environment("cpu", tensor_parallel_size), returns_routing, lora)
    writer = WeightWriter(buffers, EmbeddedStore(store), threads=1)
    try:
        server.start()
        yield Engine(server, writer, Tokenizer.from_folder(model))
    finally:
        server.close()
        buffers.close()


def brought(engine: Engine, model: Path, step: int, seed: int) -> dict[str, Tensor]:
    """Publishes weights and brings them to vLLM."""
    tensors = perturbed(dict(read_tensors(model)), seed)
    engine.publish(tensors, WeightVersion(1, step))
    assert engine.server.update(WeightVersion(1, step)).rereads == ()
    return tensors


def digest_of(tensor: Tensor) -> str:
    plain = (tensor + 0.0).contiguous()
    return xxhash.xxh3_128_hexdigest((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))


def prompts(count: int, vocab: int, longest: int = 20, seed: int = 0) -> list[Prompt]:
    """``count`` prompts of random ids of different lengths."""
    draw = random.Random(seed)
    return [Prompt(f"p{i}", "", tuple(draw.randrange(3, vocab) for _ in range(draw.randint(2, longest))), task="test") for i in range(count)]


def perturbed(tensors: Mapping[str, Tensor], seed: int, scale: float = 0.05) -> dict[str, Tensor]:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: (tensor + scale * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype) for name, tensor in tensors.items()}


def flip_in_memory(pids: Sequence[int], values: Sequence[float], dtype: str = "f") -> int:
    """Flips the lowest bit of the first of ``values``, which stand one after the other, wherever the processes hold them in private memory. Returns the number
    of places."""
    wanted, places = struct.pack(f"<{len(values)}{dtype}", *values), 0
    for pid in pids:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for line in maps:
                # Anonymous memory. A write to the mapping of a segment would give the process a copy of the page, which no later version changes.
                match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s", line)
                if match is None:
                    continue
                start, end = (int(part, 16) for part in match.groups())
                try:
                    memory.seek(start)
                    data = memory.read(end - start)
                except (OSError, ValueError):
                    continue
                at = data.find(wanted)
                while at >= 0:
                    memory.seek(start + at)
                    memory.write(bytes([data[at] ^ 1]))
                    places += 1
                    at = data.find(wanted, at + 1)
    return places


def engine_core(engine: Engine) -> int:
    """Returns the process that computes."""
    (pid,) = [pid for pid, line in engine.processes().items() if "EngineCore" in line]
    return pid


def alive(pids: Sequence[int]) -> list[int]:
    """Returns those of ``pids`` that run."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found
