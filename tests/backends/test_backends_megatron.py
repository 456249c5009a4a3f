"""Megatron-Core as the trainer. Where its environment is missing (``tandem sidecar install megatron``), the proofs with it are skipped by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from meshes_of_steps import MODELS, Trained, assert_close, make_folder, train
from real_megatron import needs_megatron
from safetensors.torch import load_file

from tandem.backends.megatron.model_check import check_model, missing_block
from tandem.backends.megatron.parts import parts_of, parts_of_rank
from tandem.backends.megatron.passes import RowShape, as_rows
from tandem.config.load import apply_overrides, build, read_yaml
from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe, load_config
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.mesh import MeshShape
from tandem.layout.parameters import parameters
from tandem.layout.rotary import RopeScaling
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.megatron.layout import MegatronMesh, entries
from tandem.trainer.micro_batch import collate
from tandem.types import TrainSequence, UserError


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [MegatronMesh(), MegatronMesh(4), MegatronMesh(2, 2), MegatronMesh(1, 2, 2), MegatronMesh(2, 1, 2)], ids=str)
def test_parts_are_the_elements_that_megatrons_layout_puts_there(name: str, mesh: MegatronMesh) -> None:
    shapes = MODELS[name]
    if shapes.experts is None:
        mesh = replace(mesh, expert=1)
    weights = {parameter: torch.randn(shape) for parameter, shape in parameters(shapes)}
    covered = {parameter: torch.zeros(shape) for parameter, shape in parameters(shapes)}
    for rank in mesh.ranks():
        held = {e.name: e.join([weights[of] for of in e.names], rank.tensor, mesh.tensor).contiguous() for e in entries(shapes, mesh, rank, "local")}
        for part in parts_of(shapes, mesh, rank):
            view = held[part.parameter].view(-1)[part.first : part.first + part.offsets.numel].view(part.offsets.shape)
            assert torch.equal(view, weights[part.name][part.offsets.slices]), part
            covered[part.name][part.offsets.slices] += 1
    assert all(bool((count > 0).all()) for count in covered.values())


@pytest.mark.parametrize("name", ["deep", "deep_moe"])
def test_the_stages_of_an_interleaved_pipeline_have_every_layer_once(name: str) -> None:
    shapes, layers = MODELS[name], list[list[int]]()
    for rank in range(2):
        groups = {"tensor": SimpleNamespace(rank=0, size=1), "pipeline": SimpleNamespace(rank=rank, size=2), "expert": SimpleNamespace(rank=0, size=1)}
        parts = parts_of_rank(shapes, SimpleNamespace(groups=groups), 2)  # type: ignore[arg-type]
        # The first stage of rank 1 is the second of the model.
        assert {part.parameter.partition(".")[0]: int(part.name.split(".")[2]) for part in parts if ".layers." in part.name} == {"0": rank, "1": 2 + rank}
        layers.append(sorted({int(part.name.split(".")[2]) for part in parts if ".layers." in part.name}))
        ends = {part.parameter for part in parts if ".layers." not in part.name}
        assert ends == ({"0.embedding.word_embeddings.weight"} if rank == 0 else {"1.decoder.final_layernorm.weight", "1.output_layer.weight"})
    assert layers == [[0, 2], [1, 3]]


def test_sequences_of_a_packed_micro_batch_become_padded_rows() -> None:
    counted = {"a": ((5, 6, 7, 8), (0.0, 0.0, 1.0, 1.0)), "b": ((9, 3), (0.0, 1.0)), "c": ((1, 2, 4), (0.0, 1.0, 0.0))}
    rows = as_rows(collate([TrainSequence(name, tokens, 1, mask) for name, (tokens, mask) in counted.items()]), RowShape(4, 5))
    # The last token predicts nothing, nor do those after the last counted one.
    assert rows.tokens.tolist() == [[5, 6, 7, 0, 0], [9, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert rows.predicting.tolist() == [1, 2, 5, 10]


REFUSED = {
    "trainer.optimizer": "muon", "trainer.dtype": "bfloat16", "trainer.precision": "fp16", "trainer.recompute": "full", "trainer.share_prompts": "true",
    "trainer.offload": "cpu", "trainer.lora.rank": "4", "algorithm.name": "ppo", "residents.plan": "offload", "rollout.engine.kv_cache_dtype": "bfloat16",
}  # fmt: skip


TINY = Path(__file__).parents[1] / "pod" / "tiny.yaml"


def load_recipe(overrides: Sequence[str]) -> Recipe:
    return build(Recipe, apply_overrides(read_yaml(TINY), overrides))


@pytest.mark.parametrize("key", REFUSED)
def test_what_megatron_does_not_do_is_refused_in_one_line_before_any_work(key: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe([f"{key}={REFUSED[key]}", "trainer.backend=megatron"])
    assert "megatron" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "keys",
    [("parallel.data=2", "parallel.zero=2"), ("parallel.context=2",), ("parallel.pipeline=2", "parallel.schedule=gpipe")],
    ids=" ".join,
)
def test_meshes_that_megatron_does_not_have_here_are_refused(keys: tuple[str, ...]) -> None:
    load_recipe(keys)
    with pytest.raises(UserError, match="megatron"):
        load_recipe([*keys, "trainer.backend=megatron"])


def test_importance_sampling_is_on_where_the_network_in_bf16_is_another_than_the_engines() -> None:
    for backend, precision, cap in (("megatron", "bf16", 2.0), ("megatron", "fp32", None), ("deepspeed", "bf16", None), ("tandem", "bf16", None)):
        recipe = load_config(TINY, [f"--trainer.backend={backend}", f"--trainer.precision={precision}"])
        assert isinstance(recipe, Recipe) and recipe.algorithm.tis_cap == cap
    given = load_config(TINY, ["--trainer.backend=megatron", "--trainer.precision=bf16", "--algorithm.tis_cap=4.0"])
    assert isinstance(given, Recipe) and given.algorithm.tis_cap == 4.0 and given.algorithm.old_logprobs == "recompute"


def test_networks_that_are_not_built_are_named() -> None:
    shapes = MODELS["qwen3"]
    assert all(missing_block(known) is None for known in MODELS.values())
    assert missing_block(replace(shapes, rope_scaling=RopeScaling("linear", 2.0))) == "rope_scaling 'linear'"
    other = RopeScaling("llama3", 8.0, 1.0, 4.0, 4096)
    assert missing_block(replace(shapes, rope_scaling=other)) == "rope_scaling 'llama3' with other lengths than Llama 3.1's"
    assert missing_block(replace(shapes, layer_windows=(8, 4))) == "sliding windows of several sizes (4, 8)"
    assert missing_block(replace(shapes, value_head="token")) == "a value head"
    assert missing_block(replace(shapes, mlp_bias=True)) == "biases of o_proj or of the MLP"
    v2, v3 = MODELS["deepseek_v2"], MODELS["deepseek_v3"]
    assert missing_block(replace(v3, attention_bias=True)) == "biases of latent attention"
    assert missing_block(replace(v3, rotary_interleaved=False)) == "latent attention that rotates other components than neighbours together"
    assert missing_block(replace(v3, rope_scaling=RopeScaling("linear", 2.0))) == "latent attention with rope_scaling 'linear'"
    assert missing_block(replace(v3, rope_scaling=replace(v3.rope_scaling, mscale=0.0))) == "YaRN with mscale_all_dim and without mscale"
    assert "a factor of attention of its own" in (missing_block(replace(v3, rope_scaling=replace(v3.rope_scaling, attention_factor=1.1))) or "")
    for model, changes, words in (
        (v3, {"normalised": False}, "sigmoid gates that are not divided by their sum"),
        (MODELS["glm4_moe"], {"num_experts_per_tok": 1}, "a sigmoid gate of one expert, which Megatron-Core never divides"),
        (v3, {"num_experts_per_tok": 2}, "chosen by their two best experts, where Megatron-Core sums the 1 best"),
        # As the published DeepSeek-V2: 6 experts of 3 groups.
        (v2, {"num_experts_per_tok": 6}, "chosen by their best expert, where Megatron-Core sums the 2 best"),
    ):
        assert model.experts is not None
        assert (missing_block(replace(model, experts=replace(model.experts, **changes))) or "").endswith(words)
    with pytest.raises(UserError, match=r"^the model has a value head.*set trainer.backend to tandem$"):
        check_model(replace(shapes, value_head="token"), ParallelConfig())


def test_models_that_megatron_does_not_divide_evenly_are_refused() -> None:
    for parallel in (ParallelConfig(pipeline=3), ParallelConfig(tensor=3), ParallelConfig(data=2, expert=2)):
        with pytest.raises(UserError, match="choose a divisor"):
            check_model(MODELS["qwen3"], parallel)
    with pytest.raises(UserError, match="experts' intermediate_size evenly; choose a divisor of 25"):
        check_model(replace(MODELS["qwen3_moe"], experts=ExpertShapes(4, 2, 25)), ParallelConfig(tensor=2))
    with pytest.raises(UserError, match="sequence parallelism alone"):
        check_model(MODELS["qwen3_moe"], ParallelConfig(tensor=2, sequence_parallel=False))
    with pytest.raises(UserError, match=r"latent attention, which .* sequence parallelism alone"):
        check_model(MODELS["deepseek_v3"], ParallelConfig(tensor=2, sequence_parallel=False))
    with pytest.raises(UserError, match="shared experts' intermediate size evenly; choose a divisor of 25"):
        check_model(replace(MODELS["qwen3_moe"], experts=ExpertShapes(4, 2, 24, shared_intermediate_size=25)), ParallelConfig(tensor=2))
    # Four ranks of two key-value heads divide the rows of queries, keys and values.
    check_model(MODELS["qwen3"], ParallelConfig(tensor=4))
    with pytest.raises(UserError, match=r"8 with trainer.backend 'megatron', which divides the model's 20 rows of queries, keys and values evenly"):
        check_model(replace(MODELS["qwen3"], num_attention_heads=8, num_key_value_heads=1, head_dim=2), ParallelConfig(tensor=8))
    with pytest.raises(UserError, match=r"'parallel.virtual_stages' is 2 and parallel.pipeline 2 .* the model's 2 layers evenly over 4 stages"):
        check_model(MODELS["qwen3"], ParallelConfig(pipeline=2, schedule="interleaved", virtual_stages=2))
    check_model(MODELS["deep"], ParallelConfig(pipeline=2, schedule="interleaved", virtual_stages=2))
    check_model(MODELS["qwen3_moe"], ParallelConfig(tensor=2))
    check_model(MODELS["qwen3_moe"], ParallelConfig(data=2, expert=2, pipeline=2))


@needs_megatron
@pytest.mark.full
@pytest.mark.parametrize(
    "name, shape, zero, sequence_parallel",
    [
        ("qwen3", MeshShape(), 0, False), ("qwen3", MeshShape(data=2), 1, False), ("qwen3", MeshShape(tensor=2), 0, False),
        ("qwen3", MeshShape(tensor=2), 0, True), ("qwen3", MeshShape(pipeline=2), 0, False), ("qwen2", MeshShape(tensor=2, pipeline=2), 0, True),
        ("qwen3", MeshShape(data=2, tensor=2), 1, False), ("llama", MeshShape(pipeline=2), 0, False), ("mistral", MeshShape(tensor=2), 0, False),
        ("one_key_head", MeshShape(tensor=2), 0, True), ("one_key_head", MeshShape(tensor=4), 0, False),
        ("qwen3_moe", MeshShape(data=2, expert=2), 1, False), ("qwen3_moe", MeshShape(data=2, tensor=2, expert=2), 1, True),
        ("dense_first", MeshShape(data=2, expert=2, pipeline=2), 1, False),
        ("deepseek_v2", MeshShape(data=2, expert=2), 1, False), ("deepseek_v3", MeshShape(), 0, False),
        ("deepseek_v3", MeshShape(tensor=2, pipeline=2), 0, True),
        ("qwen2_moe", MeshShape(data=2, tensor=2, expert=2), 1, True), ("glm4_moe", MeshShape(tensor=2), 0, True), ("smollm3", MeshShape(pipeline=2), 0, False),
        ("phi3", MeshShape(tensor=2), 0, False),
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_weights_of_20_steps_equal_those_of_tandems_trainer(
    name: str, shape: MeshShape, zero: int, sequence_parallel: bool, sidecar: Path, tmp_path: Path, tandem_alone: "Alone"
) -> None:
    model, expected = tandem_alone(name)
    found = train(model, tmp_path / "run", "megatron", shape, zero, sidecar=sidecar, parallel={"sequence_parallel": sequence_parallel})
    folder = dict(read_tensors(model))
    assert found.before.keys() == folder.keys() and all(torch.equal(found.before[each], folder[each]) for each in folder), "bit for bit"
    assert_close(found, expected)
    # 1F1B (Narayanan et al., 2021): stage s of p has at most p - s micro-batches in flight.
    mesh_ranks = range(shape.world)
    assert found.in_flight == [shape.pipeline - rank // (shape.world // shape.pipeline) for rank in mesh_ranks]


@needs_megatron
@pytest.mark.full
@pytest.mark.parametrize("name, shape, zero", [("deep", MeshShape(pipeline=2), 0), ("deep_moe", MeshShape(data=2, expert=2, pipeline=2), 1)], ids=str)
def test_an_interleaved_pipeline_has_the_losses_and_weights_of_tandems_trainer(
    name: str, shape: MeshShape, zero: int, sidecar: Path, tmp_path: Path, tandem_alone: "Alone"
) -> None:
    model, expected = tandem_alone(name)
    stages = {"schedule": "interleaved", "virtual_stages": 2}
    found = train(model, tmp_path / "run", "megatron", shape, zero, sidecar=sidecar, parallel=stages)
    folder = load_file(model / "model.safetensors")
    assert found.before.keys() == folder.keys() and all(torch.equal(found.before[each], folder[each]) for each in folder), "bit for bit"
    assert_close(found, expected)
    # Narayanan et al., 2021: rank r of p with v stages has begun 2 (p - r - 1) + (v - 1) p forward passes of stages when its first backward pass begins.
    ranks = [rank // (shape.world // 2) for rank in range(shape.world)]
    assert found.in_flight == [2 * (2 - rank - 1) + 2 + 1 for rank in ranks]


CASES_OF_BF16 = [
    ("qwen3", MeshShape(data=2), 1), ("qwen3", MeshShape(tensor=2, pipeline=2), 0), ("qwen3_moe", MeshShape(data=2, expert=2), 1),
    # With all experts chosen: where some are, the residual stream in bf16 changes which.
    ("all_experts", MeshShape(tensor=2), 0),
]  # fmt: skip
OF_BF16 = 0.005
"""How far losses in bf16 may be from one another and from those in float64, in nats. A rounding to bf16 changes a value by up to 2^-9 of it, 0.002."""


@needs_megatron
@pytest.mark.full
@pytest.mark.parametrize("name, shape, zero", CASES_OF_BF16, ids=str)
def test_in_bf16_losses_are_those_of_tandems_trainer_and_of_float64_up_to_roundings_and_weights_are_fp32(
    name: str, shape: MeshShape, zero: int, sidecar: Path, tmp_path: Path, tandem_alone: "Alone"
) -> None:
    (model, in_bf16), (_, in_float64), (_, in_fp32) = (tandem_alone(name, **each) for each in ({"precision": "bf16"}, {"dtype": "float64"}, {}))
    settings = {"precision": "bf16"}
    found = train(model, tmp_path / "run", "megatron", shape, zero, sidecar=sidecar, trainer=settings, parallel={"sequence_parallel": shape.tensor > 1})
    folder = load_file(model / "model.safetensors")
    assert all(torch.equal(found.before[each], folder[each]) for each in folder), "fp32 weights, bit for bit"
    difference = lambda a, b, metric: max(abs(x[metric] - y[metric]) for x, y in zip(a.metrics, b.metrics, strict=True))
    for metric in ("actor/pg_loss", "kl", "actor/entropy"):
        assert difference(found, in_bf16, metric) < OF_BF16 and difference(found, in_float64, metric) < OF_BF16, metric
        assert difference(found, in_fp32, metric) > 1e-5, "computed in bf16"
    # Norms are sums over all parameters, up to 3.5 here.
    assert difference(found, in_float64, "actor/grad_norm") < 0.1
    for each, weight in found.after.items():
        # 20 updates of at most 1e-4 move a weight by 2e-3; those of bf16 weights near 0.1 would be rounded to steps of 5e-4.
        is_frozen = each.endswith("e_score_correction_bias")
        assert float((weight - in_float64.after[each]).abs().max()) < 1e-3 and not torch.equal(weight, weight.bfloat16().float()), each
        assert torch.equal(weight, found.before[each]) == is_frozen, each


class Alone:
    """Tandem's own trainer on one rank, once for each model and further settings of the trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, dict[tuple[str, ...], tuple[Path, Trained]]()

    def __call__(self, name: str, **trainer: str) -> tuple[Path, Trained]:
        key = (name, *trainer.values())
        if key not in self.made:
            model = self.folder / name
            if not model.exists():
                make_folder(model, name)
            self.made[key] = (model, train(model, self.folder / "-".join(("run", *key)), "tandem", MeshShape(), trainer=trainer))
        return self.made[key]


@pytest.fixture(scope="module")
def tandem_alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))
