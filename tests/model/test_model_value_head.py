"""Values, their gradients and the folders of models with a value head are those of transformers; every other command refuses them in one line."""

import json

import pytest
import torch
from torch import Tensor

from tandem.kernels import select
from tandem.layout.parameters import parameter_count
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_folder import (
    load_model,
    load_tensors,
    read_shapes,
    read_tensors,
    save_model,
    to_huggingface,
    unfilled_model,
)
from tandem.model.value_folder import make_value_folder, new_head
from tandem.types import UserError

EXPERTS = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "mixtral": {"num_local_experts": 8},
}
LENGTHS = (60, 1, 37)
OURS = {"model.norm.weight": "norm.weight", "model.embed_tokens.weight": "embed_tokens"}


@pytest.fixture(scope="module")
def peer_value_model():
    """``peer_value_model(model_type, head, labels=1, **config)`` returns a transformers model with a value head in which no parameter has a special
    value."""
    import transformers

    transformers.logging.set_verbosity_error()
    small = {
        "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    classes = {"sequence": transformers.AutoModelForSequenceClassification, "token": transformers.AutoModelForTokenClassification}

    def make(model_type, head, labels=1, **config):
        torch.manual_seed(0)
        model = classes[head].from_config(transformers.AutoConfig.for_model(model_type, **{**small, **config}, num_labels=labels)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
        return model

    return make


def packed_values(decoder: Decoder, sequences: list[Tensor], rows: Tensor) -> Tensor:
    lengths = [len(s) for s in sequences]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    hidden = decoder(torch.cat(sequences), torch.cat([torch.arange(n) for n in lengths]), PackedContext(bounds, max(lengths)))
    return decoder.values(hidden, rows, sum(lengths))


@pytest.mark.parametrize(("family", "head"), [*((family, "sequence") for family in FAMILIES), ("llama", "token"), ("qwen3", "token")])
def test_values_are_those_of_transformers_and_the_folder_returns_to_it(family, head, peer_value_model, tmp_path) -> None:
    peer = peer_value_model(family, head, **FAMILIES[family])
    peer.save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs", select("auto"), heads="any")
    assert parameter_count(decoder.shapes) == sum(p.numel() for p in decoder.parameters()) == sum(p.numel() for p in peer.parameters())
    sequences = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    with torch.no_grad():
        theirs = [peer(s.unsqueeze(0)).logits[0] for s in sequences]
    if head == "sequence":
        wanted, rows = torch.cat([values.view(1) for values in theirs]), torch.tensor(LENGTHS).cumsum(0) - 1
    else:
        wanted, rows = torch.cat([values[:, 0] for values in theirs]), torch.arange(sum(LENGTHS))
    assert wanted.std() > 0.15
    assert (packed_values(decoder, sequences, rows) - wanted).abs().max() < 1e-5

    save_model(decoder, tmp_path / "ours", pad_token_id=0)
    returned = type(peer).from_pretrained(tmp_path / "ours")
    assert returned.config.num_labels == 1
    assert all(torch.equal(tensor, peer.state_dict()[name]) for name, tensor in returned.state_dict().items())
    assert read_shapes(tmp_path / "ours", "any") == decoder.shapes


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_gradients_of_values_are_those_of_transformers(head, peer_value_model, tmp_path) -> None:
    peer = peer_value_model("qwen3", head, head_dim=16).double()
    peer.save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs", select("reference"), dtype=torch.float64, heads="any")
    sequence = torch.randint(3, 61, (40,), generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([39]) if head == "sequence" else torch.arange(40)
    packed_values(decoder, [sequence], rows).square().sum().backward()
    peer(sequence.unsqueeze(0)).logits.square().sum().backward()
    for name in ("score.weight", *OURS):
        theirs, ours = peer.get_parameter(name).grad, decoder.get_parameter(OURS.get(name, name)).grad
        assert theirs.norm() > 0.1
        assert (ours - theirs).norm() / theirs.norm() < 1e-6, "transformers computes norms and rotations in fp32"


def test_a_value_does_not_depend_on_the_batch(kernels, peer_value_model, tmp_path) -> None:
    peer_value_model("qwen3", "token", head_dim=16).save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs", kernels, heads="any")
    sequences = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    with torch.no_grad():
        together = packed_values(decoder, sequences, torch.arange(sum(LENGTHS))).split(LENGTHS)
        for sequence, values in zip(sequences, together, strict=True):
            assert torch.equal(packed_values(decoder, [sequence], torch.arange(len(sequence))), values)
            last = torch.tensor([len(sequence) - 1])
            assert torch.equal(packed_values(decoder, [sequence], last), values[-1:])


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_a_language_model_gets_a_head_without_a_copy_of_its_weights(head, peer_model, tmp_path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    peer = peer_model("qwen3", head_dim=16)
    peer.save_pretrained(tmp_path / "language", max_shard_size="40KB")
    made = make_value_folder(tmp_path / "language", head, 7, tmp_path / "run" / "models" / "value")
    assert sum(path.lstat().st_size for path in made.iterdir() if path.suffix == ".safetensors") < 2000
    decoder = load_model(made, select("reference"), heads="any")
    held = dict(to_huggingface(decoder))
    assert all(torch.equal(tensor, peer.state_dict()[name]) for name, tensor in held.items() if not name.startswith("score."))
    assert held["score.weight"].abs().max() > 0
    classes = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
    assert torch.equal(classes[head].from_pretrained(made).score.weight, held["score.weight"]), "transformers reads the folder too"
    again = make_value_folder(tmp_path / "language", head, 7, tmp_path / "again")
    assert torch.equal(dict(to_huggingface(load_model(again, select("reference"), heads="any")))["score.weight"], held["score.weight"])
    assert make_value_folder(made, head, 8, tmp_path / "other") == made, "a model that has a head keeps it"


def test_a_value_head_beside_a_language_model_head_is_not_exported(peer_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    peer = peer_model("qwen3", head_dim=16, tie_word_embeddings=True)
    peer.save_pretrained(tmp_path / "language")
    decoder = unfilled_model(tmp_path / "language", select("reference"), value_head="token")
    load_tensors(decoder, [*read_tensors(tmp_path / "language"), *new_head(tmp_path / "language", "token", 3)])
    assert decoder.score is not None and decoder.score.weight.abs().max() > 0
    for like in (None, tmp_path / "language"):
        folder = tmp_path / f"exported-{like is None}"
        save_model(decoder, folder, pad_token_id=0, like=like)
        returned = AutoModelForCausalLM.from_pretrained(folder)
        assert all(torch.equal(tensor, peer.state_dict()[name]) for name, tensor in returned.state_dict().items())
        assert read_shapes(folder) == decoder.shapes.exported


def test_a_head_of_several_labels_and_a_model_without_the_wanted_head_are_one_line(peer_value_model, tmp_path) -> None:
    peer_value_model("llama", "sequence", labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="num_labels 3; a reward model or a critic gives one number: name a model with num_labels 1"):
        read_shapes(tmp_path / "three", "any")
    peer_value_model("llama", "sequence").save_pretrained(tmp_path / "one")
    with pytest.raises(UserError, match="is a LlamaForSequenceClassification, which scores text and has no language-model head"):
        load_model(tmp_path / "one", select("reference"))
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    del config["model_type"]
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    assert read_shapes(tmp_path / "one", "any").value_head == "sequence", "the class alone names the family"
