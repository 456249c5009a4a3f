"""An update that knows what has changed packs that alone, with the bits of packing everything."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.engine.core import weight_updates
from tandem.engine.executor import rank_weights
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels import select
from tandem.kernels.mixed import in_precision
from tandem.layout.panels import place_in_panels
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import whole_offsets
from tandem.model.changed_weights import load_changes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_folder import load_tensors
from tandem.model.quantization.scheme import scheme_named
from tandem.model.weight_digests import packed_tensors
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import RunError, WeightSource, WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.delta import DeltaMemory, DeltaWriter, publish_reference
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers

# 100 and 40 rows: a last panel of 36 and of 40, neither a multiple of the kernels' lanes.
SHAPES = ModelShapes("qwen2", 100, 40, 2, 4, 2, 10, 72, 64, tie_word_embeddings=True, attention_bias=True, qk_norm=True, post_norms=True)
FROM_ONE = replace(SHAPES, architecture="gemma2", norms_from_one=True)


def decoder_of(tensors: dict[str, Tensor], kernels: Any, dtype: torch.dtype, tied: bool, quantization: str) -> Decoder:

    made = Decoder(replace(SHAPES, tie_word_embeddings=tied), kernels, dtype=dtype)
    made.quantization = None if quantization == "none" else scheme_named(quantization)
    load_tensors(made, tensors.items(), pack=True)
    return made


def random_tensors(tied: bool, dtype: torch.dtype) -> dict[str, Tensor]:


    draw = torch.Generator().manual_seed(3)
    shapes = replace(SHAPES, tie_word_embeddings=tied)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in parameters(shapes)}


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "precision", "quantization"), [
    (torch.float32, "fp32", "none"), (torch.float32, "fp32", "int8"), (torch.float32, "bf16", "none"), (torch.float32, "fp8", "none"),
    (torch.bfloat16, "fp32", "none"),
])  # fmt: skip
def test_what_has_changed_has_the_bits_of_packing_everything(kernels: str, tied: bool, dtype: torch.dtype, precision: Any, quantization: str) -> None:
    if kernels == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the C++ kernels compute in fp32")
    chosen: Any = in_precision(select(kernels, dtype), precision, torch.device("cpu"))  # type: ignore[arg-type]
    tensors, draw = random_tensors(tied, dtype), torch.Generator().manual_seed(4)
    held = decoder_of(tensors, chosen, dtype, tied, quantization)
    for turn in range(3):
        changes: dict[str, Tensor | None] = {}
        for number, name in enumerate(tensors):
            if (number + turn) % 3 == 0:
                continue
            flat = tensors[name] = tensors[name].clone()
            where = (torch.rand(flat.numel(), generator=draw) < 0.1).nonzero().flatten()
            if (number + turn) % 7 == 0:
                flat.copy_(torch.randn(flat.shape, generator=draw).to(dtype))
                changes[name] = None
            else:
                flat.view(-1)[where] = torch.randn(len(where), generator=draw).to(dtype)
                changes[name] = where
        assert load_changes(held, tensors, changes)
        whole = dict(packed_tensors(decoder_of(tensors, chosen, dtype, tied, quantization)))
        found = dict(packed_tensors(held))
        assert found.keys() == whole.keys()
        assert [name for name in whole if not torch.equal(found[name].view(torch.uint8), whole[name].view(torch.uint8))] == []


def test_a_norm_that_multiplies_with_one_more_than_its_weight_is_computed_with_as_it_is_after_a_change() -> None:
    kernels, draw = select("cpu"), torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in parameters(FROM_ONE)}
    held = Decoder(FROM_ONE, kernels)
    load_tensors(held, tensors.items(), pack=True)
    names = ["model.norm.weight", *(f"model.layers.1.{norm}.weight" for norm in (*FROM_ONE.layer_norms, "self_attn.q_norm", "self_attn.k_norm"))]
    for name in names:
        tensors[name] = tensors[name] + 0.5
        assert load_changes(held, tensors, {name: None})
        whole = Decoder(FROM_ONE, kernels)
        load_tensors(whole, tensors.items(), pack=True)
        tokens, context = torch.arange(7), PackedContext(torch.tensor([0, 7], dtype=torch.int32), 7)
        assert torch.equal(held(tokens, tokens, context), whole(tokens, tokens, context)), name


def test_matrices_without_a_change_are_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = select("reference")
    tensors = random_tensors(True, torch.float32)
    held = decoder_of(tensors, kernels, torch.float32, True, "none")
    packed = list[tuple[int, ...]]()
    pack = type(kernels).pack

    def counted(self: Any, weight: Tensor) -> Any:
        packed.append(tuple(weight.shape))
        return pack(self, weight)

    monkeypatch.setattr(type(kernels), "pack", counted)
    before = held.packed
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name] + 1.0
    assert load_changes(held, tensors, {name: None}) and packed == [(40, 72)] and held.packed[0] is not before[0]
    before = held.packed
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[7] = 5.0
    assert load_changes(held, tensors, {name: torch.tensor([7])}) and packed == [(40, 72)] and held.packed[0] is before[0]


class Trainer:
    """Publishes versions of ``tensors`` with element-wise deltas, in the pod of the engine."""

    def __init__(self, folder: Path) -> None:
        pod = "test" + uuid.uuid4().hex[:8]
        self.buffers, self.source = WeightBuffers.create(pod, 1 << 20), WeightSource(str(folder / "store.sqlite"))
        self.store = EmbeddedStore(Path(self.source.store))
        self.writer = WeightWriter(self.buffers, self.store, threads=1)
        memory = DeltaMemory(lambda number, size_bytes: Segment.create(pod, f"delta-{number}", size_bytes))
        self.deltas = DeltaWriter(self.buffers.segments, memory, 1, lambda step: False)
        self.delta: Segment | None = None

    def publish(self, tensors: dict[str, Tensor], step: int) -> WeightVersion:
        shards = [WeightShard(name, tuple(t.shape), whole_offsets(tuple(t.shape)), t.dtype, lambda t=t: t) for name, t in tensors.items()]
        written = self.deltas.write(self.writer.publish(place_shards(alone().world, shards), WeightVersion(1, step)))
        self.delta = None if written is None else written[1]
        publish_reference(self.store, None if written is None else written[0])
        return WeightVersion(1, step)

    def close(self) -> None:
        self.deltas.close()
        self.writer.close()
        self.buffers.close()
        self.store.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.close()


def change(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    draw, changed = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        where = torch.rand(tensor.shape, generator=draw) < 0.01
        changed[name] = torch.where(where, torch.randn(tensor.shape, generator=draw).to(tensor.dtype), tensor)
    return changed


@pytest.mark.parametrize("elements", [True, False], ids=["elements, as on a GPU", "matrices"])
def test_an_engine_changes_what_a_delta_names_and_packs_everything_where_it_must(
    make_folder: Any, make_llm: Any, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, elements: bool
) -> None:
    monkeypatch.setattr(rank_weights, "changes_elements", lambda decoder: elements)
    llm, twin, whole = make_llm(), make_llm(), list[int]()
    load = weight_updates.load_tensors
    monkeypatch.setattr(weight_updates, "load_tensors", lambda *given, **named: (whole.append(1), load(*given, **named)))
    tensors = load_file(make_folder() / "model.safetensors")

    def update(step: int) -> int:
        """Returns how often everything was packed. The twin is always given everything."""
        whole.clear()
        version = trainer.publish(tensors, step)
        llm.update_weights_from(trainer.source, version)
        packed = len(whole)
        twin.engine.update_weights(tensors.items(), version)
        assert llm.engine.held_digests() == twin.engine.held_digests()
        return packed

    assert update(1) == 1
    for step in (2, 3, 4):
        tensors = change(tensors, step)
        assert update(step) == 0, "it follows from the version before"
    tensors = change(tensors, 5)
    trainer.publish(tensors, 5)
    tensors = change(tensors, 6)
    assert update(6) == 0, "tensors of a version that follows from one that it missed are copied whole, and packed where they have changed"
    tensors = change(tensors, 7)
    # Its private copy is damaged, which nothing but the digest of what comes of the delta can tell.
    reader = llm.engine._published._weights._reader
    reader._staging[200] ^= 4
    assert update(7) == 0 and "is read whole: the elements before the update are not those that the delta begins with" in caplog.text
    llm.engine.sleep(level=2)
    tensors = change(tensors, 8)
    assert update(8) == 1, "it had no weights"
    llm.engine.wake_up()
    twin.engine.update_weights(tensors.items(), WeightVersion(1, 8))
    llm.engine.update_weights(change(tensors, 99).items(), WeightVersion(1, 9))
    tensors = change(tensors, 10)
    assert update(10) == 1, "it was given others in between"


def test_an_error_in_the_middle_of_a_change_leaves_no_mixture_and_the_next_update_gives_everything(
    make_folder: Any, make_llm: Any, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_weights, "changes_elements", lambda decoder: True)
    llm, twin = make_llm(), make_llm()
    tensors = load_file(make_folder() / "model.safetensors")
    llm.update_weights_from(trainer.source, trainer.publish(tensors, 1))
    put, left = type(llm.engine.decoder.kernels).pack_elements, [3]

    def fails(self: Any, *given: Any) -> bool:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no memory for the positions")
        return put(self, *given)

    tensors = change(tensors, 2)
    version = trainer.publish(tensors, 2)
    monkeypatch.setattr(type(llm.engine.decoder.kernels), "pack_elements", fails)
    with pytest.raises(MemoryError):
        llm.update_weights_from(trainer.source, version)
    assert left == [0], "two matrices had their new elements"
    with pytest.raises(RunError, match="no complete set of weights since an update failed"):
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2))
    monkeypatch.undo()
    for step in (2, 3):
        version = trainer.publish(tensors, step)
        llm.update_weights_from(trainer.source, version)
        twin.engine.update_weights(tensors.items(), version)
        assert llm.engine.held_digests() == twin.engine.held_digests()
        tensors = change(tensors, 3)
    prompts = [{"prompt_token_ids": [5, 6]}]
    texts = [each.generate(prompts, SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids for each in (llm, twin)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 65, 100, 128, 150])
def test_elements_are_where_packing_puts_them(rows: int) -> None:
    """``pack`` of the C++ kernels is the truth: its result has the number of each element in that element's place."""
    columns = 7
    packed = select("cpu").pack(torch.arange(float(rows * columns)).view(rows, columns))
    flat = torch.arange(rows * columns)
    assert torch.equal(packed.data.view(-1)[place_in_panels(flat // columns, flat % columns, (rows, columns))], flat.float())
    assert place_in_panels(rows - 1, 3, (rows, columns)) == int((packed.data.view(-1) == (rows - 1) * columns + 3).nonzero()[-1])
