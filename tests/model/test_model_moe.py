"""Routing: ties, order, balance, and models that are not mixtures of experts."""

import json
import random

import pytest
import torch

from tandem.kernels import Kernels, select
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.expert_shapes import ExpertShapes, SigmoidRouting
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.families import mixtral
from tandem.model.huggingface.model_folder import load_model, load_tensors, read_shapes, save_model, to_huggingface
from tandem.model.initialise import initialise
from tandem.model.moe import Experts, load_balancing_loss, mixture
from tandem.model.routing import Replay, ReplayCount, Selection
from tandem.types import UserError

SHAPES = ModelShapes("mixtral", 40, 24, 2, 2, 1, 16, 32, 64, False, experts=ExpertShapes(6, 2, 32, names=mixtral.NAMES))


def random_experts(shapes: ExpertShapes, hidden: int) -> Experts:
    experts = Experts(shapes, hidden, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0.0, 0.3)
    return experts


def test_the_gates_of_a_case_worked_by_hand(kernels: Kernels) -> None:
    # Probabilities 0.5, 0.25, 0.125, 0.125: the two largest, and their shares of 0.75.
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().roll(1, 1)
    plain, normalised = kernels.route(logits, 2, False), kernels.route(logits, 2, True)
    assert plain.experts.tolist() == normalised.experts.tolist() == [[1, 2]]
    torch.testing.assert_close(plain.gates, torch.tensor([[0.5, 0.25]]))
    torch.testing.assert_close(normalised.gates, torch.tensor([[2 / 3, 1 / 3]]))


def test_of_equal_experts_the_lowest_ids_are_chosen_whoever_stands_beside(kernels: Kernels) -> None:
    tied = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0] * 4])
    for rows in (1, 3, 40):
        logits = torch.randn(rows, 32)
        logits[-1] = tied
        assert kernels.route(logits, 3, True).experts[-1].tolist() == [1, 3, 4]


def test_rows_stand_by_expert_and_go_back_to_their_tokens(kernels: Kernels) -> None:
    torch.manual_seed(0)
    routing = kernels.route(torch.randn(50, 7), 3, False)
    flat = routing.experts.reshape(-1)
    for expert in range(7):
        rows = routing.order[routing.bounds[expert] : routing.bounds[expert + 1]]
        assert (flat[rows] == expert).all() and rows.tolist() == sorted(rows.tolist())
    assert routing.bounds[-1] == 150
    assert torch.equal(routing.order[routing.inverse], torch.arange(150))


@pytest.mark.parametrize(("experts", "each"), [(1, 1), (5, 2), (60, 8), (128, 8)])
def test_a_token_has_the_same_bits_whoever_is_routed_beside_it(kernels: Kernels, experts: int, each: int) -> None:
    torch.manual_seed(experts)
    shapes = ExpertShapes(experts, each, 40)
    plain = random_experts(shapes, 72)
    x = torch.randn(150, 72)
    whole = mixture(kernels, plain.plain(), x)
    packed = plain.pack(kernels)
    with torch.no_grad():
        for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(40, 109), slice(0, 150)):
            assert torch.equal(mixture(kernels, packed, x[rows].clone()), whole[rows]), rows
        order = torch.randperm(150)
        assert torch.equal(mixture(kernels, packed, x[order]), whole[order])
        crowd = torch.cat((x[:1], x[1:2].expand(99, -1)))
        assert torch.equal(mixture(kernels, packed, crowd)[:1], whole[:1])


def test_a_mixture_is_the_gated_sum_of_its_experts() -> None:
    torch.manual_seed(3)
    experts = random_experts(ExpertShapes(5, 2, 12), 20).double()
    x = torch.randn(30, 20, dtype=torch.float64)
    ours = mixture(ReferenceKernels(), experts.plain(), x)
    probabilities = (x @ experts.router.t()).softmax(-1)
    kept = probabilities.where(probabilities >= probabilities.topk(2).values[:, 1:], 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,eih->tei", x, experts.gate_up_proj).chunk(2, dim=-1)
    returned = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, experts.down_proj)
    torch.testing.assert_close(ours, (returned * kept.unsqueeze(-1)).sum(1))


def test_the_balancing_loss_is_that_of_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(1)
    logits = [torch.randn(40, 6, requires_grad=True) for _ in range(3)]
    ours = load_balancing_loss(logits, 2)
    theirs = load_balancing_loss_func(tuple(logits), 6, 2)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(mine, other)
    assert load_balancing_loss([torch.eye(6).repeat(5, 1)], 2) < load_balancing_loss([torch.eye(6)[:1].repeat(30, 1)], 2)


def test_the_router_logits_of_every_layer_can_be_had(kernels: Kernels) -> None:
    decoder = Decoder(SHAPES, kernels)
    initialise(decoder, 0)
    seen: list[torch.Tensor] = []
    decoder(torch.arange(9), torch.arange(9), PackedContext(torch.tensor([0, 9]), 9), seen)
    assert [tuple(logits.shape) for logits in seen] == [(9, 6), (9, 6)]
    load_balancing_loss(seen, 2).backward()
    router = decoder.layers[0].experts.router
    assert router.grad.abs().sum() > 0


def test_initialisation_treats_the_matrices_that_write_to_the_residual_stream_alike_in_both_namings(tmp_path) -> None:
    decoder = Decoder(SHAPES, ReferenceKernels())
    initialise(decoder, 0, 0.5)
    deviations = {name: tensor.std().item() for name, tensor in to_huggingface(decoder) if "experts.3." in name}
    for name, deviation in deviations.items():
        assert deviation == pytest.approx(0.25 if ".w2." in name else 0.5, rel=0.1)


def test_a_missing_expert_is_named_and_nothing_is_written() -> None:
    decoder = Decoder(SHAPES, ReferenceKernels())
    initialise(decoder, 0)
    tensors = dict(to_huggingface(decoder))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    with pytest.raises(UserError, match=name):
        load_tensors(decoder, [(key, tensor + 1) for key, tensor in tensors.items() if key != name])
    assert all(torch.equal(tensor, before[key]) for key, tensor in to_huggingface(decoder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than its num_experts 6"),
        ({"num_local_experts": 0}, "num_local_experts 0"),
        ({"num_experts_per_tok": "two"}, "num_experts_per_tok 'two'"),
    ],
)
def test_impossible_mixtures_are_refused_by_name(changes, message, tmp_path) -> None:
    decoder = Decoder(SHAPES, ReferenceKernels())
    initialise(decoder, 0)
    save_model(decoder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        read_shapes(tmp_path / "model")


@pytest.mark.parametrize("seed", range(8))
def test_random_mixtures_have_the_logits_of_transformers(seed: int, peer_model, packed_logits, tmp_path) -> None:
    draw = random.Random(seed)
    kv_heads, experts, layers = draw.choice((1, 2, 3)), draw.randint(1, 40), draw.randint(1, 4)
    config = {
        "num_experts": experts, "num_experts_per_tok": draw.randint(1, min(8, experts)), "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * draw.randint(1, 3), "head_dim": 2 * draw.randint(2, 16),
        "hidden_size": draw.randint(8, 90), "intermediate_size": draw.randint(4, 70), "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    model_type = draw.choice(("qwen3_moe", "mixtral"))
    if model_type == "qwen3_moe":
        config |= {
            "moe_intermediate_size": draw.randint(4, 70), "norm_topk_prob": draw.random() < 0.5,
            "decoder_sparse_step": draw.randint(1, 2), "mlp_only_layers": [i for i in range(layers) if draw.random() < 0.2],
        }  # fmt: skip
    peer = peer_model(model_type, seed, **config)
    # The grouped product requires rows of a multiple of 16 bytes.
    peer.set_experts_implementation("eager")
    peer.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, select("auto"))
    tokens = torch.randint(0, 61, (50,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        (ours,) = packed_logits(decoder, [tokens])
        theirs = peer(tokens.unsqueeze(0)).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


def test_sigmoid_routing_gives_a_token_the_same_bits_in_any_batch_and_when_its_own_choice_is_replayed() -> None:
    logits = torch.randn(50, 12) * 3
    selection = Selection(SigmoidRouting(4, 2, 1.7), torch.randn(12))
    whole = selection.route(logits, 3, True)
    for first, last in ((0, 1), (7, 20), (13, 50), (9, 9)):
        part = selection.route(logits[first:last].clone(), 3, True)
        assert torch.equal(part.gates, whole.gates[first:last]) and torch.equal(part.experts, whole.experts[first:last])
    replayed = Replay(whole.experts.unsqueeze(1).to(torch.int16), ReplayCount())
    again = replayed.route(0, selection, logits, 3, True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, whole, strict=True))
    assert replayed.counts.take(logits.device).tolist() == [0, 50]
    groups = [len(set(row)) for row in (whole.experts // 3).tolist()]
    assert max(groups) == 2, "from two of the four groups of three experts"


def test_a_bias_on_the_choice_changes_who_is_chosen_and_no_gate_and_has_no_gradient() -> None:
    logits, bias = torch.randn(40, 6, requires_grad=True), torch.tensor([0.0, 9.0, 0, 0, 0, 0], requires_grad=True)
    routing = Selection(SigmoidRouting(), bias).route(logits, 2, False)
    assert (routing.experts[:, 0] == 1).all()
    assert torch.allclose(routing.gates, logits.sigmoid().gather(1, routing.experts))
    routing.gates.sum().backward()
    assert bias.grad is not None and not bias.grad.any() and logits.grad is not None and logits.grad.any()
