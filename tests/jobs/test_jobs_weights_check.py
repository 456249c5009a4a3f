"""``tandem weights check``: what is moved is compared with files that the safetensors library reads, and each kind of damage is found and named."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from tandem import SamplingParams
from tandem.cli.main import main
from tandem.engine.core import published_weights
from tandem.engine.engine import Engine
from tandem.jobs.weights_check import compare
from tandem.jobs.weights_check import pair as pair_module
from tandem.jobs.weights_check.layouts import LayoutPair, recipe_of_pair
from tandem.jobs.weights_check.table import ROLLOUTS, TRAINERS, pairs_of, why_not_held
from tandem.layout.shapes import ModelShapes
from tandem.pod.rollout_worker import RolloutWorker
from tandem.types import PartEntry, TensorEntry, UserError, WeightManifest, WeightVersion
from tandem.weight_transfer.manifest import make_manifest
from tandem.weight_transfer.register import WeightWriter

MODEL = """
model:
  create: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16, intermediate_size: 64,
    max_position_embeddings: 48}
task: {name: sort}
sft: {}
"""


def check(folder: Path, *given: str, model: str = MODEL, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Runs the command in this process; returns its status and the row of its pair. ``folder/kept`` has the folders of the pair."""
    recipe = folder / "model.yaml"
    recipe.write_text(model)
    status = main(["weights", "check", "--model", str(recipe), "--threads", "1", "--keep", str(folder / "kept"), "--json", *given])
    out, error = capsys.readouterr()
    assert out, error
    return status, json.loads(out)


def digest(tensor: torch.Tensor) -> str:
    return str(xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """What engines were found to hold: the updated one after each version, then those that read the folders."""
    told, own = list[Mapping[str, str]](), Engine.held_digests

    def tell(engine: Engine) -> list[dict[str, str]]:
        told.extend(own(engine))
        return own(engine)

    monkeypatch.setattr(Engine, "held_digests", tell)
    return told


def test_two_versions_reach_an_engine_that_quantizes_and_sleeps_as_the_files_say(
    digests: list[Mapping[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, row = check(tmp_path, "--inline", "--rollout", "quantization=int8", "--sleep", "2", capsys=capsys)
    assert status == 0 and row["result"] == "ok" and row["found"] == [] and row["sleep"] == 2
    start, trained = (load_file(tmp_path / f"kept/pair-0/{name}/model.safetensors") for name in ("start", "model-1"))
    assert row["tensors"] == len(start) and row["bytes"] == sum(tensor.nbytes for tensor in start.values())
    assert "lm_head.weight" not in start and all(not torch.equal(start[name], trained[name]) for name in start)
    for weights, engine in zip((start, trained), digests[:2], strict=True):
        assert engine["embed_tokens"] == digest(weights["model.embed_tokens.weight"]) and engine["norm.weight"] == digest(weights["model.norm.weight"])
        for layer in range(2):
            at = f"model.layers.{layer}"
            rows = torch.cat([weights[f"{at}.self_attn.{matrix}_proj.weight"] for matrix in "qkv"])
            # Symmetric int8: a row's largest magnitude becomes 127.
            assert engine[f"layers.{layer}.qkv.scales"] == digest(rows.abs().amax(1) / 127.0)
            assert engine[f"layers.{layer}.q_norm.weight"] == digest(weights[f"{at}.self_attn.q_norm.weight"])
    assert all(digests[0][name] != digests[1][name] for name in digests[0])


def test_an_engine_that_computes_with_the_published_panels_holds_what_the_files_say(
    digests: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, own = list[WeightManifest](), pair_module.check_published

    def tell(manifest: WeightManifest, *rest: Any) -> Any:
        published.append(manifest)
        return own(manifest, *rest)

    monkeypatch.setattr(pair_module, "check_published", tell)
    status, row = check(tmp_path, "--inline", "--rollout", "weights=shared", "--sleep", "0", capsys=capsys)
    assert (status, row["found"], row["digests"]) == (0, [], 2 * len(digests[0]))
    assert len(published) == 2
    for folder, manifest in zip(("start", "model-1"), published, strict=True):
        weights = load_file(tmp_path / f"kept/pair-0/{folder}/model.safetensors")
        # Of 64 rows each panel is its rows' numbers, column by column.
        entry = next(entry for entry in manifest.tensors if entry.name == "model.layers.0.mlp.gate_proj.weight")
        assert entry.layout == "panels" and [part.digest for part in entry.parts] == [digest(weights[entry.name].t())]


def test_shared_weights_of_tensor_parallel_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights=shared and tensor_parallel_size 2"):
        recipe_of_pair(LayoutPair("", "tensor_parallel_size=2,weights=shared"), tmp_path, 0)


def test_an_adapter_reaches_an_engine_that_has_slept_as_the_files_of_peft_say(
    digests: list[Mapping[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, row = check(tmp_path, "--inline", "--trainer", "lora.rank=4", "--sleep", "2", capsys=capsys)
    assert (status, row["found"]) == (0, [])
    start = load_file(tmp_path / "kept/pair-0/start/model.safetensors")
    for version, engine in enumerate(digests[:2]):
        adapter = load_file(tmp_path / f"kept/pair-0/lora-{version}/adapter/adapter_model.safetensors")
        assert row["tensors"] == len(adapter) == 2 * 2 * 7
        assert engine["embed_tokens"] == digest(start["model.embed_tokens.weight"])
        for layer in range(2):
            for at, name in ((f"layers.{layer}.o_proj", "self_attn.o_proj"), (f"layers.{layer}.down_proj", "mlp.down_proj")):
                for side in "AB":
                    wanted = adapter[f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"]
                    assert engine[f"{at}.adapter.lora_{side}"] == digest(wanted) and wanted.any() == (side == "A" or version == 1)


def skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose second update leaves out one tensor."""
    own, name, first = published_weights.replace_weights, "model.layers.0.self_attn.o_proj.weight", dict[str, torch.Tensor]()

    def replaced(components: Any, tensors: Any, version: WeightVersion, *rest: Any) -> Any:
        left_out = [(each, first.setdefault(each, tensor.clone()) if each == name else tensor) for each, tensor in tensors]
        return own(components, left_out, version, *rest)

    monkeypatch.setattr(published_weights, "replace_weights", replaced)


def flips(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the last norm, in the engine's own memory, after the second update."""
    own = RolloutWorker.update_weight

    def update(worker: RolloutWorker, meta: Any, *rest: Any) -> Any:
        reply = own(worker, meta, *rest)
        if meta["version"][1] == 1:
            worker._engine().engine.decoder.norm.weight.data.view(torch.int32)[3] ^= 1
        return reply

    monkeypatch.setattr(RolloutWorker, "update_weight", update)


def keeps_old_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head that is not packed again after the second update of the embedding."""
    own, heads = RolloutWorker.update_weight, list[Any]()

    def update(worker: RolloutWorker, meta: Any, *rest: Any) -> Any:
        reply = own(worker, meta, *rest)
        decoder = worker._engine().engine.decoder
        heads.append(decoder._packed_head)
        decoder._packed_head = heads[0]
        return reply

    monkeypatch.setattr(RolloutWorker, "update_weight", update)


def does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes the version of the second update and none of its tensors."""
    own = published_weights.replace_weights

    def replaced(components: Any, tensors: Any, version: WeightVersion, *rest: Any) -> Any:
        if version != WeightVersion(1, 1):
            return own(components, tensors, version, *rest)
        components.scheduler.kv_cache.weight_version = version
        return {}

    monkeypatch.setattr(published_weights, "replace_weights", replaced)


def publishes_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that publishes the values that one tensor had when it was published first."""
    own, first = WeightWriter.publish, dict[str, torch.Tensor]()

    def publish(writer: WeightWriter, weights: Any, *rest: Any, **options: Any) -> Any:
        place = next(i for i, part in enumerate(weights.own) if part.shard.name == "model.layers.1.mlp.up_proj.weight")
        part = weights.own[place]
        kept = first.setdefault("up", part.shard.read().clone())
        parts = list(weights.own)
        parts[place] = part._replace(shard=part.shard._replace(read=lambda: kept))
        return own(writer, replace(weights, own=tuple(parts)), *rest, **options)

    monkeypatch.setattr(WeightWriter, "publish", publish)


HEAD = "'layers.2.head.data' (written by trainer rank 0) in engine 0, rank 0 is stale"
UNCHANGED = "version 2 changed no digest in engine 0, rank 0, although the weights changed"
UP = "'model.layers.1.mlp.up_proj.weight' (written by trainer rank 0) as published is stale"
FAULTS = [
    pytest.param(skips, ["'layers.0.output.data' (written by trainer rank 0) in engine 0, rank 0 is stale"], id="one tensor left out"),
    pytest.param(flips, ["'norm.weight' (written by trainer rank 0) in engine 0, rank 0 is different"], id="a bit in the engine", marks=pytest.mark.full),
    pytest.param(keeps_old_head, [HEAD, "tied"], id="a tied head", marks=pytest.mark.full),
    pytest.param(does_nothing, ["is stale", UNCHANGED], id="no update", marks=pytest.mark.full),
    pytest.param(publishes_a_copy, [UP, "'layers.1.gate_up.data' (written by"], id="a stale view", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("plant", "named"), FAULTS)
def test_a_fault_is_found_and_named_with_tensor_owner_and_engine_rank(
    plant: Callable[[pytest.MonkeyPatch], None], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    status, row = check(tmp_path, "--inline", capsys=capsys)
    assert status == 1 and row["result"] == "wrong"
    assert all(any(text in line for line in row["found"]) for text in named), row["found"]
    assert all("\n" not in line for line in row["found"])


def manifest_of(tensors: Mapping[str, torch.Tensor], halves: str = "") -> Any:
    """A manifest of ``tensors``, of rank 0, or for the tensor ``halves`` of ranks 0 and 1."""
    entries = []
    for at, (name, tensor) in enumerate(tensors.items()):
        zero, shape = (0,) * tensor.dim(), tuple(tensor.shape)
        parts: tuple[PartEntry, ...] = (PartEntry(0, zero, shape, digest(tensor)),)
        if name == halves:
            middle = shape[0] // 2
            parts = (PartEntry(0, zero, (middle, *shape[1:]), digest(tensor[:middle])), PartEntry(1, (middle, *zero[1:]), shape, digest(tensor[middle:])))
        entries.append(TensorEntry(name, "float32", shape, "s", at * 4096, tensor.nbytes, parts))
    return make_manifest(WeightVersion(1, 0), entries)


def test_what_was_published_is_compared_in_both_directions() -> None:
    draw = torch.Generator().manual_seed(0)
    folder = {name: torch.randn(4, 3, generator=draw) for name in ("a", "b", "c")}
    assert compare.check_published(manifest_of(folder, "b"), folder) == []
    changed = {**folder, "b": folder["b"].clone()}
    changed["b"][3, 1] += 1
    (found,) = compare.check_published(manifest_of(folder, "b"), changed, manifest_of(folder, "b"))
    assert (found.what, found.tensor, found.owners) == ("stale", "b", (1,)) and "[2, 0] to [4, 3]" in found.detail
    found, missing = compare.check_published(manifest_of({**folder, "d": folder["a"]}), {**folder, "e": folder["a"]})
    assert (found.what, found.tensor, missing.what, missing.tensor) == ("unexpected", "d", "missing", "e")
    (found,) = compare.check_published(manifest_of(folder), {**folder, "a": folder["a"].bfloat16()})
    assert found.what == "different" and "float32 [4, 3]" in found.detail and "bfloat16" in found.detail


def test_what_an_engine_holds_is_compared_in_both_directions() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
    manifest = manifest_of({name: torch.ones(4, 3) for name in names}, names[1])
    right = {"embed_tokens": "1", "layers.0.qkv.data": "2", "layers.1.head.data": "3", "norm.weight": "4"}

    def found(held: dict[str, str], before: dict[str, str]) -> list[tuple[str, str, tuple[int, ...], Any]]:
        every = compare.check_engine([[right, held]], [[right, right]], [[before, before]], manifest)
        return [(each.what, each.tensor, each.owners, each.engine) for each in every]

    assert found(right, {}) == []
    assert found({**right, "layers.0.qkv.data": "9"}, {}) == [("different", "layers.0.qkv.data", (0, 1), (0, 1))]
    assert found({**right, "layers.1.head.data": "9"}, {"layers.1.head.data": "9"}) == [("stale", "layers.1.head.data", (0,), (0, 1))]
    assert found({name: value for name, value in right.items() if name != "norm.weight"} | {"extra": "5"}, {}) == [
        ("missing", "norm.weight", (0,), (0, 1)), ("unexpected", "extra", (), (0, 1))
    ]  # fmt: skip
    assert compare.unchanged([[right, right]], [[right, {**right, "norm.weight": "0"}]]) == [(0, 0)]


@pytest.mark.parametrize(("names", "name", "behind"), [
    (("model.embed_tokens.weight", "lm_head.weight"), "lm_head.weight (packed)", "lm_head.weight"),
    (("model.embed_tokens.weight",), "lm_head.weight (packed)", "model.embed_tokens.weight"),
    (("model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
])  # fmt: skip
def test_what_vllm_holds_is_named_as_it_was_published(names: tuple[str, ...], name: str, behind: str) -> None:
    assert compare.behind_packed(name, names) == [behind]


def test_every_layout_of_the_table_is_a_recipe_and_what_does_not_fit_this_machine_is_told(tmp_path: Path) -> None:
    shapes = ModelShapes("qwen3", 100, 32, 2, 2, 2, 16, 64, 48, True, qk_norm=True)
    assert len(list(pairs_of(shapes))) == len(TRAINERS) * len(ROLLOUTS)
    for pair in (*pairs_of(shapes, rollout="", sleep=0), *pairs_of(shapes, trainer="")):
        assert why_not_held(recipe_of_pair(pair, tmp_path, 0), shapes) == "", pair
    with pytest.raises(UserError, match=r"'rollout.engine.quantization' is 'int8', and the engine quantizes as trainer.lora.quantization"):
        recipe_of_pair(LayoutPair("lora.rank=4,lora.quantization=nf4", "quantization=int8"), tmp_path, 0)
    big = replace(shapes, hidden_size=200_000, intermediate_size=800_000)
    assert "GiB of memory in 5 processes" in why_not_held(recipe_of_pair(LayoutPair("tensor=4"), tmp_path, 0), big)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--trainer", "tensors=2"), "--trainer has the unknown key 'tensors'"),
        (("--rollout", "tensor=2"), "--rollout has the unknown key 'tensor'"),
        (("--trainer", "tensor"), "--trainer has 'tensor'; write KEY=VALUE"),
        (("--trainer", "tensor=2,tensor=2"), "--trainer has 'tensor' twice"),
        (("--trainer", "zero=1"), "'parallel.zero' is 1"),
        (("--trainer", "dtype=float32", "--rollout", "dtype=bfloat16"), "dtype is float32 in --trainer and bfloat16 in --rollout"),
        (("--rollout", "quantization=int3"), "engine quantization is 'int3'"),
        (("--rollout", "tensor_parallel_size=2", "--sleep", "2"), "a tensor-parallel engine cannot sleep"),
        (("--rollout", "backend=vllm", "--sleep", "1"), "--sleep is 1 and backend 'vllm', which frees nothing"),
        (("--rollout", "backend=vllm"), "tandem sidecar install vllm"),
        (("--trainer", "tensor=2", "--inline"), "--inline is one process"),
        (("--keep", "."), "--keep is '.', which exists"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(
    given: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "model.yaml"
    recipe.write_text(MODEL)
    monkeypatch.setenv("TANDEM_SIDECARS", str(tmp_path / "none"))
    assert main(["weights", "check", "--model", str(recipe), *given]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and named in error


UNTIED = MODEL.replace("max_position", "tie_word_embeddings: false, max_position")
EXPERTS = MODEL.replace("hidden_size: 32", "architecture: qwen3_moe, num_experts: 4, hidden_size: 32")
HYBRID = EXPERTS.replace("qwen3_moe", "qwen3_next").replace("num_hidden_layers: 2", "num_hidden_layers: 4")


@pytest.mark.full
@pytest.mark.parametrize("model", [pytest.param(MODEL, id="tied"), pytest.param(UNTIED, id="untied"), pytest.param(EXPERTS, id="experts")])
@pytest.mark.parametrize("trainer", ["", "lora.rank=4", "lora.rank=4,lora.target_modules=[q_proj,v_proj]"])
def test_engines_that_were_updated_have_the_log_probabilities_of_transformers(
    model: str, trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    if model == EXPERTS and trainer == "lora.rank=4":
        trainer = "lora.rank=4,lora.target_modules=[o_proj]"
    prompt, drawn, own = [5, 9, 20, 41, 7], list[tuple[list[int], list[float]]](), RolloutWorker.weight_digests

    def told(worker: RolloutWorker, *arguments: Any) -> Any:
        assert worker.llm is not None
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
        (completion,) = worker.llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs
        assert completion.logprobs is not None
        ids = list(completion.token_ids)
        drawn.append((ids, [at[token].logprob for at, token in zip(completion.logprobs, ids, strict=True)]))
        return own(worker, *arguments)

    monkeypatch.setattr(RolloutWorker, "weight_digests", told)
    status, row = check(tmp_path, "--inline", "--trainer", trainer, model=model, capsys=capsys)
    assert status == 0, row["found"]
    pair = tmp_path / "kept" / "pair-0"
    folders = [pair / "lora-0/model-0", pair / "lora-1/model-1"] if trainer else [pair / "start", pair / "model-1"]
    assert drawn[0] != drawn[1]
    for folder, (ids, logprobs) in zip(folders, drawn[:2], strict=True):
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            wanted = torch.log_softmax(peer(torch.tensor([prompt + ids])).logits[0], -1)
        for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            assert logprob == pytest.approx(float(wanted[len(prompt) - 1 + at, token]), abs=5e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "trainer", "rollout", "sleep"),
    [
        pytest.param(MODEL, "tensor=2,pipeline=2", "tensor_parallel_size=2,quantization=int8,dtype=bfloat16", 0, id="tensor 2 x pipeline 2 to int8 on 2 ranks"),
        pytest.param(UNTIED, "data=2,zero=3", "workers=2", 2, id="ZeRO 3 to two engines that sleep"),
        pytest.param(EXPERTS, "data=2,expert=2,zero=1", "quantization=fp8", 1, id="experts on 2 ranks"),
        pytest.param(HYBRID, "tensor=2,pipeline=2", "tensor_parallel_size=2", 0, id="linear attention, tensor 2 x pipeline 2 to 2 ranks"),
        pytest.param(HYBRID, "data=2,expert=2,tensor=2", "workers=2", 0, id="linear attention, experts on 2 x 2 ranks to two engines"),
        pytest.param(MODEL, "tensor=2,lora.rank=4", "tensor_parallel_size=2", 0, id="an adapter, 2 ranks to 2"),
        pytest.param(MODEL, "lora.rank=4,lora.quantization=nf4", "tensor_parallel_size=2", 0, id="an adapter beside 4 bits on 2 ranks"),
    ],
)
def test_real_ranks_publish_what_real_engines_hold(
    model: str, trainer: str, rollout: str, sleep: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, row = check(tmp_path, "--trainer", trainer, "--rollout", rollout, "--sleep", str(sleep), model=model, capsys=capsys)
    assert (status, row["result"], row["found"]) == (0, "ok", [])
    start = tmp_path / "kept" / "pair-0" / "start" / "model.safetensors"
    if "lora" not in trainer:
        weights = load_file(start)
        assert row["tensors"] == len(weights) and row["bytes"] == sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.full
def test_all_goes_on_after_a_pair_that_is_refused_and_ends_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "model.yaml"
    recipe.write_text(MODEL)
    given = ["weights", "check", "--model", str(recipe), "--threads", "1", "--inline", "--all"]
    assert main([*given, "--trainer", ""]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["trainer", "rollout", "sleep", "tensors", "digests", "seconds"]
    assert lines[-1] == f"{len(ROLLOUTS)} pairs: {len(ROLLOUTS)} ok"
    assert main([*given, "--rollout", "", "--sleep", "0", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["trainer"] for row in rows] == list(TRAINERS)
    assert {row["result"] for row in rows if "=2" in row["trainer"]} == {"refused"} and rows[0]["result"] == "ok"
