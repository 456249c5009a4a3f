"""Element-wise deltas of a model that is really trained in bf16: bytes on the wire, and what an update costs another pod and its engine, beside whole weights.

A process trains a Qwen3 on the bytes of this repository's documents: some steps of AdamW at 1e-3 in fp32, then steps at the measured learning rate on bf16
weights, each of which it publishes with a delta. This process receives every version five times, one after the other, by mirrors and decoders of their own:
whole, and copied by the engine; as a delta, which is also applied to the engine's copy; as a delta, and the engine computes with what the mirror has made of
it; and both of these staged before the engine's pause. What the engines hold is compared bit for bit.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from weight_update import shapes

from tandem import LLM
from tandem.kernels import select
from tandem.layout.shard_offsets import whole_offsets
from tandem.model.adopted import packed_layout
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.storage.files import open_storage
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightSource, WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.delta import Delta, DeltaMemory, DeltaWriter, publish_reference
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers
from tandem.weight_transfer.stored.storage_writer import StorageWriter
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource

CREDENTIAL = "a credential of the benchmark"
MODELS = {"4M": shapes(2000, 256, 4, 768, 4), "25M": shapes(8000, 512, 7, 1536, 8), "140M": replace(shapes(32000, 1024, 8, 2816, 16), rms_norm_eps=1e-6)}
WARM_STEPS, TOKENS = 12, 128
FULL_EVERY = 20
"""As ``pods.full_update_every``."""


def trained(name: str, learning_rate: float, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """Yields the weights by name after each step at ``learning_rate``, the first time before any."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = MODELS[name]
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    config = Qwen3Config(
        vocab_size=size.vocab_size, hidden_size=size.hidden_size, num_hidden_layers=size.num_hidden_layers, num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads, head_dim=size.head_dim, intermediate_size=size.intermediate_size, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    draw = torch.Generator().manual_seed(1)

    def step(optimizer: torch.optim.Optimizer) -> None:
        start = int(torch.randint(0, len(text) - TOKENS, (1,), generator=draw))
        tokens = torch.tensor(list(text[start : start + TOKENS]))[None]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    warm = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(WARM_STEPS):
        step(warm)
    del warm
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    while True:
        yield {parameter: tensor.detach() for parameter, tensor in model.named_parameters()}
        step(optimizer)


def delta_memory(pod: str) -> DeltaMemory:
    return DeltaMemory(lambda number, size_bytes: Segment.create(pod, f"delta-{number}", size_bytes))


def serve(name: str, folder: Path, learning_rate: float, dtype: str) -> None:
    """The trainer's pod: a version for each line on its standard input."""
    pod, store = "bench" + uuid.uuid4().hex[:8], EmbeddedStore(folder / "shared.sqlite")
    buffers = WeightBuffers.create(pod, segment_bytes(MODELS[name], dtype))
    writer, deltas = WeightWriter(buffers, store, 2), DeltaWriter(buffers.segments, delta_memory(pod), 2, lambda step: False)
    service = WeightService("first", buffers.segments, store, CREDENTIAL, ("tcp",))
    stored = StorageWriter(open_storage(str(folder / "stored"), create=True), buffers.segments, FULL_EVERY)
    before: dict[str, Tensor] = {}
    for number, (_, weights) in enumerate(zip(sys.stdin, trained(name, learning_rate, getattr(torch, dtype)), strict=False), 1):
        changed = sum(int((before[key] != value).sum()) for key, value in weights.items()) if before else 0
        before = {key: value.clone() for key, value in weights.items()}
        shards = [WeightShard(key, tuple(t.shape), whole_offsets(tuple(t.shape)), t.dtype, lambda t=t: t) for key, t in weights.items()]  # type: ignore[misc]
        layout = packed_layout(select("auto", getattr(torch, dtype)))
        manifest = writer.publish(place_shards(alone().world, shards, list(weights), engine_layout=layout), WeightVersion(1, number))
        began = time.perf_counter()
        written = deltas.write(manifest)
        seconds = time.perf_counter() - began
        if written is not None:
            service.serve_too(written[1])
        publish_reference(store, None if written is None else written[0])
        began = time.perf_counter()
        stored_bytes = stored.write(manifest, None if written is None else Delta(written[0], written[1].memory))
        stored_s = time.perf_counter() - began
        assert stored.wait(600)
        share, size_bytes = changed / sum(value.numel() for value in weights.values()), 0 if written is None else written[0].size_bytes
        facts = {"changed": share, "seconds": seconds, "bytes": size_bytes, "stored": stored_bytes, "stored_s": stored_s}
        print(json.dumps(facts), flush=True)


SIDES = {
    "whole": "whole", "deltas": "delta, copied", "shared": "delta, shared", "staged": "delta, copied, staged", "shared_staged": "delta, shared, staged",
}  # fmt: skip


class Receiver:
    """Another pod with an engine: its mirror, and an engine that takes what the mirror has brought, as one of ``SIDES``."""

    def __init__(self, name: str, folder: Path, dtype: str, side: str) -> None:
        store, pod = folder / f"pod-{side}.sqlite", "bench" + uuid.uuid4().hex[:8]
        self.side, self.shares = side, side.startswith("shared")
        self.mirror = WeightMirror(
            EmbeddedStore(folder / "shared.sqlite"), EmbeddedStore(store), lambda size: WeightBuffers.create(pod, size), self._open, threads=2,
            delta_memory=None if side == "whole" else delta_memory(pod),
        )  # fmt: skip
        model = folder / f"model-{side}"
        save_model(Decoder(MODELS[name], select("auto", getattr(torch, dtype)), dtype=getattr(torch, dtype)), model)
        self.llm = LLM(str(model), skip_tokenizer_init=True, load_format="dummy", dtype=dtype, max_num_seqs=4, max_model_len=256, kv_cache_tokens=1024)
        self.source = WeightSource(str(store), shares=self.shares)

    def _open(self, endpoint: Endpoint, offer: Offer) -> TcpSource:
        return TcpSource("pod first", offer.host, offer.port, CREDENTIAL)

    def take(self, number: int) -> dict[str, float]:
        """Seconds of each part, and the bytes from the other pod. The engine has no requests."""
        version, clock, engine = WeightVersion(1, number), time.perf_counter, self.llm.engine
        at = clock()
        got = self.mirror.bring(version, ("tcp",), Deadline(600.0))
        received, at = clock() - at, clock()
        if self.side.endswith("staged"):
            assert engine.stage_weights_from(self.source, version).result()
        staged, at = clock() - at, clock()
        self.llm.update_weights_from(self.source, version)
        pause = clock() - at
        assert got.whole == () and engine.shares_weights == self.shares
        return {"receive": received, "stage": staged, "pause": pause, "bytes": got.fetched.size_bytes + got.delta_bytes}


def elementwise(name: str, repeat: int, learning_rate: float, dtype: str) -> str:
    """The table. Medians of ``repeat`` versions, after two that warm the buffers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, folder, str(learning_rate), dtype]
        first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert first.stdin is not None and first.stdout is not None
        rows: dict[str, list[dict[str, float]]] = {"made": [], **{side: [] for side in SIDES}}
        receivers: dict[str, Receiver] = {}
        whole_bytes = 0
        for number in range(1, repeat + 4):
            first.stdin.write("next\n")
            first.stdin.flush()
            facts = json.loads(first.stdout.readline())
            receivers = receivers or {side: Receiver(name, Path(folder), dtype, side) for side in SIDES}
            found = {kind: receiver.take(number) for kind, receiver in receivers.items()}
            digests = [receiver.llm.engine.held_digests() for receiver in receivers.values()]
            assert all(each == digests[0] for each in digests), "what the engines compute with"
            print(number, facts, found, file=sys.stderr)
            whole_bytes = max(facts["stored"], whole_bytes)
            if number > 3:
                rows["made"].append(facts)
                for kind, each in found.items():
                    rows[kind].append(each)
        first.kill()
        first.wait()
        for receiver in receivers.values():
            receiver.llm.close()
            receiver.mirror.close()

    def median(kind: str, key: str) -> float:
        return statistics.median(each[key] for each in rows[kind])

    heads = [f"{name} parameters, {dtype}, learning rate {learning_rate:g}", *SIDES.values(), "shares"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    titles = {
        "bytes": "bytes on the wire", "receive": "the other pod receives and verifies, ms", "stage": "its engine stages them while it samples, ms",
        "pause": "its engine pauses, ms",
    }
    for key, title in titles.items():
        values = [median(side, key) * (1 if key == "bytes" else 1e3) for side in SIDES]
        shares = "" if key == "stage" else ", ".join(f"{value / values[0]:.1%}" for value in values[1:])
        lines.append(f"| {title} | {' | '.join(f'{value:,.0f}' if key == 'bytes' else f'{value:.2f}' for value in values)} | {shares} |")
    return "\n".join(lines) + (
        f"\n\n{median('made', 'changed'):.2%} of the elements changed in a step; the shim made the delta in {median('made', 'seconds') * 1e3:.0f} ms. "
        f"Medians of {repeat} versions. The file of a version in a storage has {median('made', 'stored'):,.0f} bytes, an anchor {whole_bytes:,}: "
        f"{median('made', 'stored') / whole_bytes:.2%}, and {((FULL_EVERY - 1) * median('made', 'stored') / whole_bytes + 1) / FULL_EVERY:.1%} with one anchor "
        f"in {FULL_EVERY}; the trainer's pod makes it in {median('made', 'stored_s') * 1e3:.1f} ms."
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    serve(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
