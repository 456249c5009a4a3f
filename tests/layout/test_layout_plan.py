import json
from dataclasses import replace

import pytest
import transformers

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameter_count, parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, local_parameters, local_shapes, rule_for, shard_slices
from tandem.model.families import mixtral


def shapes(**changes: object) -> ModelShapes:
    values: dict[str, object] = dict(
        architecture="qwen3", vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, max_position_embeddings=64, tie_word_embeddings=True, qk_norm=True,
    )
    return ModelShapes(**{**values, **changes})  # type: ignore[arg-type]


def hugging_face(model_shapes: ModelShapes) -> transformers.PreTrainedModel:
    config = {
        "qwen3": transformers.Qwen3Config, "qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
    }[model_shapes.architecture](
        vocab_size=model_shapes.vocab_size, hidden_size=model_shapes.hidden_size, num_hidden_layers=model_shapes.num_hidden_layers,
        num_attention_heads=model_shapes.num_attention_heads, num_key_value_heads=model_shapes.num_key_value_heads,
        head_dim=model_shapes.head_dim, intermediate_size=model_shapes.intermediate_size,
        tie_word_embeddings=model_shapes.tie_word_embeddings,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "model_shapes",
    [
        shapes(),
        shapes(tie_word_embeddings=False),
        shapes(architecture="qwen2", qk_norm=False, attention_bias=True, head_dim=8),
        shapes(architecture="llama", qk_norm=False, num_key_value_heads=4),
        shapes(architecture="mistral", qk_norm=False, tie_word_embeddings=False),
    ],
    ids=["qwen3 tied", "qwen3 untied", "qwen2", "llama", "mistral"],
)
def test_names_and_shapes_of_all_parameters_are_those_of_transformers(model_shapes: ModelShapes) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in hugging_face(model_shapes).named_parameters()}
    assert dict(parameters(model_shapes)) == theirs
    assert parameter_count(model_shapes) == sum(p.numel() for p in hugging_face(model_shapes).parameters())


MIXTURE = ExpertShapes(4, 2, 24)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("experts", [None, MIXTURE, replace(MIXTURE, names=mixtral.NAMES)], ids=["dense", "standard names", "mixtral"])
def test_the_shards_of_every_parameter_cover_it_exactly_once(experts: ExpertShapes | None, size: int, deterministic: bool) -> None:
    whole = shapes(experts=experts)
    for name, shape in parameters(whole):
        pieces = [shard_slices(whole, name, shape, ShardSpec(rank, size, deterministic)) for rank in range(size)]
        rule = rule_for(name, experts and experts.names)
        axis = 0 if deterministic and rule.placement == "row" else rule.axis
        if axis is None or size == 1:
            assert all(piece == pieces[0] for piece in pieces)
            continue
        covered = [i for piece in pieces for i in range(piece[axis].start, piece[axis].stop)]
        assert covered == list(range(shape[axis]))


def test_a_size_that_does_not_divide_is_refused_and_a_vocabulary_leaves_the_last_rank_less() -> None:
    few = {"vocab_size": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 9, "hidden_size": 9}
    for changes, message in (({"num_attention_heads": 6}, "intermediate_size 64"), ({}, "num_attention_heads 4"), (few, "vocabulary of 2")):
        with pytest.raises(ValueError, match=message):
            local_shapes(shapes(**changes), ShardSpec(0, 3))
    parts = [shard_slices(shapes(), "lm_head.weight", (99, 32), ShardSpec(rank, 2))[0] for rank in range(2)]
    assert [p.stop - p.start for p in parts] == [50, 49]


def test_key_value_heads_that_are_fewer_than_ranks_stand_on_several() -> None:
    four = [shard_slices(shapes(), "model.layers.0.self_attn.k_proj.weight", (32, 32), ShardSpec(rank, 4))[0] for rank in range(4)]
    assert four == [slice(0, 16), slice(0, 16), slice(16, 32), slice(16, 32)]
    assert local_shapes(shapes(), ShardSpec(1, 4)).num_key_value_heads == 1


def test_a_rank_has_the_shapes_of_its_slices() -> None:
    for cut in (ShardSpec(0, 2), ShardSpec(1, 2, False)):
        for (name, local), (_, shape) in zip(local_parameters(shapes(), cut), parameters(shapes()), strict=True):
            assert local == tuple(len(range(n)[s]) for n, s in zip(shape, shard_slices(shapes(), name, shape, cut), strict=True))


def test_an_unknown_parameter_has_no_rule() -> None:
    with pytest.raises(KeyError, match=r"model\.extra"):
        rule_for("model.extra")
    with pytest.raises(KeyError, match=r"w1"):
        rule_for("model.layers.0.block_sparse_moe.experts.3.w1.weight", MIXTURE.names)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 0), ("num_key_value_heads", 3), ("head_dim", 5), ("layer_windows", (1,))])
def test_impossible_shapes_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        shapes(**{field: value})


def test_shapes_are_plain_data() -> None:
    import dataclasses

    assert json.loads(json.dumps(dataclasses.asdict(shapes())))["hidden_size"] == 32
