"""The head of an EAGLE-3 draft against plain torch with the semantics of vLLM's ``LlamaForCausalLMEagle3``, and its folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels import BLOCK_TOKENS, Kernels, PagedBatch, empty_cache, select
from tandem.layout.eagle3 import Eagle3Shapes, default_aux_layers, eagle3_shapes
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PackedContext, PagedContext
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder import Decoder
from tandem.model.draft_decoder import DraftDecoder
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import eagle3_tensors, initialise_eagle3, load_eagle3, save_eagle3
from tandem.model.huggingface.eagle3_config import read_eagle3_shapes
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise
from tandem.trainer.build import ReplicaSettings, load_draft
from tandem.trainer.parallel.ranks import alone
from tandem.types import UserError

TARGET = ModelShapes("llama", 61, 48, 4, 4, 2, 12, 80, 128, False, rope_theta=500.0)


def a_head(kernels: Kernels, draft_vocab_size: int = 40, dtype: torch.dtype = torch.float32, seed: int = 1, **own: Any) -> Eagle3Head:
    """Returns a head with an embedding drawn from ``seed``, whose parameters have no special value."""
    shapes = eagle3_shapes(TARGET, draft_vocab_size)
    shapes = Eagle3Shapes(shapes.layer, shapes.target_hidden_size, draft_vocab_size, shapes.aux_layers, **own)
    table = torch.randn(61, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    head = Eagle3Head(shapes, kernels, dtype=dtype, embedding=lambda tokens: table[tokens])
    initialise_eagle3(head, seed, 0.2)
    with torch.no_grad():
        for name, tensor in eagle3_tensors(head).items():
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2, generator=torch.Generator().manual_seed(seed))
    head.target_ids = torch.randperm(61, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort().values
    return head


def expected(head: Eagle3Head, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (logits, hidden states of the next step, those of this step) of one sequence in float64, by the equations."""
    w = {name: tensor.double() for name, tensor in eagle3_tensors(head).items()}
    layer = head.shapes.layer

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + layer.rms_norm_eps).sqrt() * w[f"{name}.weight"]

    hidden = states.double() @ w["fc.weight"].T
    normed, embedded = norm(hidden, "midlayer.hidden_norm"), norm(head.embedded(tokens).double(), "midlayer.input_layernorm")
    x = torch.cat((embedded, normed), dim=1)
    length, size = len(tokens), layer.head_dim
    q, k, v = ((x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, size).transpose(0, 1) for name in "qkv")
    angle = torch.arange(length).double()[:, None] / layer.rope_theta ** (torch.arange(0, size, 2).double() / size)
    cos, sin = torch.cat((angle, angle), 1).cos(), torch.cat((angle, angle), 1).sin()

    def rotated(y: Tensor) -> Tensor:
        return y * cos + torch.cat((-y[..., size // 2 :], y[..., : size // 2]), -1) * sin

    groups = layer.num_attention_heads // layer.num_key_value_heads
    q, k, v = rotated(q), rotated(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    x = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    x = residual = x + (normed if head.shapes.norm_before_residual else hidden)
    x = norm(x, "midlayer.post_attention_layernorm")
    gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = residual + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return norm(x, "norm") @ w["lm_head.weight"].T, x, hidden


@pytest.mark.parametrize("before", [False, True])
def test_logits_and_hidden_states_are_those_of_the_equations(kernels: Kernels, before: bool) -> None:
    head, generator = a_head(kernels, norm_before_residual=before), torch.Generator().manual_seed(2)
    lengths = [19, 1, 33]
    tokens, states = torch.randint(61, (53,), generator=generator), torch.randn(53, 144, generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    context = PackedContext(torch.tensor([0, 19, 20, 53], dtype=torch.int32), 33)
    x, following = head(tokens, positions, head.combined(states.split(48, 1)), context)
    own = zip(head.logits(x).split(lengths), following.split(lengths), tokens.split(lengths), states.split(lengths), strict=True)
    for logits, after, one, of_one in own:
        wanted = expected(head, one, of_one)
        torch.testing.assert_close(logits.double(), wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after.double(), wanted[1], rtol=1e-4, atol=1e-4)


def test_a_packed_head_over_a_paged_cache_has_the_bits_of_packed_sequences(kernels: Kernels) -> None:
    head, generator = a_head(kernels), torch.Generator().manual_seed(3)
    tokens, states = torch.randint(61, (21,), generator=generator), torch.randn(21, 144, generator=generator)
    positions = torch.arange(21)
    x, following = head(tokens, positions, head.combined(states.split(48, 1)), PackedContext(torch.tensor([0, 21], dtype=torch.int32), 21))
    logits = head.logits(x)
    head.pack()
    caches = empty_cache((4, 2, 12), 1, torch.float32, torch.device("cpu"))
    table = torch.tensor([2, 0, 3][: -(-21 // BLOCK_TOKENS)], dtype=torch.int32)
    hidden = head.combined(states.split(48, 1))
    for start, end in ((0, 9), (9, 20), (20, 21)):
        rows = torch.arange(start, end)
        slots = table[rows // BLOCK_TOKENS].long() * BLOCK_TOKENS + rows % BLOCK_TOKENS
        batch = PagedBatch(torch.tensor([0, end - start], dtype=torch.int32), torch.tensor([end], dtype=torch.int32), table[None], slots)
        last = torch.tensor([end - start - 1])
        own, after = head(tokens[start:end], rows, hidden[start:end], PagedContext(batch, caches, last))
        assert torch.equal(head.logits(own), logits[end - 1 : end])
        assert torch.equal(after, following[end - 1 : end])


def test_gradients_are_those_of_the_equations() -> None:
    head, generator = a_head(select("reference"), dtype=torch.float64), torch.Generator().manual_seed(4)
    tokens, states = torch.randint(61, (17,), generator=generator), torch.randn(17, 144, generator=generator, dtype=torch.float64)
    x, _ = head(tokens, torch.arange(17), head.combined(states.split(48, 1)), PackedContext(torch.tensor([0, 17], dtype=torch.int32), 17))
    weights = torch.randn(17, 40, generator=generator, dtype=torch.float64)
    parameters = [parameter for _, parameter in sorted(head.named_parameters())]
    own = torch.autograd.grad((head.logits(x) * weights).sum(), parameters)
    # Differences of float64 along a random direction.
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    values = []
    with torch.no_grad():
        for step in (1e-6, -1e-6):
            for parameter, way in zip(parameters, direction, strict=True):
                parameter.add_(way, alpha=step)
            values.append((expected(head, tokens, states)[0] * weights).sum())
            for parameter, way in zip(parameters, direction, strict=True):
                parameter.add_(way, alpha=-step)
    slope = float((values[0] - values[1]) / 2e-6)
    # The table of cosines is fp32.
    assert sum(float((gradient * way).sum()) for gradient, way in zip(own, direction, strict=True)) == pytest.approx(slope, rel=1e-5)


def test_a_decoder_hands_out_the_residual_stream_that_transformers_calls_hidden_states(kernels: Kernels, peer_model: Any) -> None:
    from tandem.model.huggingface.model_config import shapes_of
    from tandem.model.huggingface.model_folder import load_tensors

    peer = peer_model("qwen3", num_hidden_layers=4)
    decoder = Decoder(shapes_of(peer.config.to_dict()), kernels)
    load_tensors(decoder, peer.state_dict().items())
    tokens, aux = torch.randint(61, (15,), generator=torch.Generator().manual_seed(5)), AuxHiddenStates((0, 2, 3))
    with torch.no_grad():
        decoder(tokens, torch.arange(15), PackedContext(torch.tensor([0, 15], dtype=torch.int32), 15), aux=aux)
        wanted = peer(tokens[None], output_hidden_states=True).hidden_states
    for layer, state in zip((0, 2, 3), aux.states, strict=True):
        torch.testing.assert_close(state, wanted[layer][0], rtol=1e-4, atol=1e-4)


def test_the_layers_are_vllms_and_in_small_models_a_low_a_middle_and_a_high_one() -> None:
    assert [default_aux_layers(layers) for layers in (32, 7, 6, 4, 3, 2, 1)] == [
        (2, 16, 29), (2, 3, 4), (1, 3, 5), (1, 2, 3), (0, 1, 2), (0, 1, 1), (0, 0, 0),
    ]  # fmt: skip


def test_a_folder_has_the_tensors_that_vllm_loads_and_reads_back_with_the_same_bits(tmp_path: Path) -> None:
    head = a_head(select("reference"))
    save_eagle3(head, tmp_path / "head")
    tensors, config = load_file(tmp_path / "head/model.safetensors"), json.loads((tmp_path / "head/config.json").read_text())
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "fc.weight": [48, 144], "midlayer.hidden_norm.weight": [48], "midlayer.input_layernorm.weight": [48],
        "midlayer.post_attention_layernorm.weight": [48], "midlayer.self_attn.q_proj.weight": [48, 96],
        "midlayer.self_attn.k_proj.weight": [24, 96], "midlayer.self_attn.v_proj.weight": [24, 96],
        "midlayer.self_attn.o_proj.weight": [48, 48], "midlayer.mlp.gate_proj.weight": [80, 48], "midlayer.mlp.up_proj.weight": [80, 48],
        "midlayer.mlp.down_proj.weight": [48, 80], "norm.weight": [48], "lm_head.weight": [40, 48], "d2t": [40], "t2d": [61],
    }  # fmt: skip
    assert tensors["t2d"].dtype == torch.bool and torch.equal(tensors["t2d"].nonzero()[:, 0], head.target_ids)
    assert torch.equal(torch.arange(40) + tensors["d2t"], head.target_ids)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 40 and config["vocab_size"] == 61
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2], "SpecForge counts the layers whose outputs these are"
    read = load_eagle3(tmp_path / "head", select("reference"), TARGET)
    assert read.shapes == head.shapes and torch.equal(read.target_ids, head.target_ids)
    assert all(torch.equal(tensor, eagle3_tensors(read)[name]) for name, tensor in eagle3_tensors(head).items())


def test_a_folder_of_specforge_says_the_layers_by_their_outputs(tmp_path: Path) -> None:
    save_eagle3(a_head(select("reference")), tmp_path / "head")
    path = tmp_path / "head/config.json"
    config = json.loads(path.read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(config))
    assert read_eagle3_shapes(tmp_path / "head").aux_layers == (1, 2, 3)


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    save_eagle3(a_head(select("reference")), tmp_path / "head")
    other = ModelShapes("llama", 62, 48, 4, 4, 2, 12, 80, 128, False)
    with pytest.raises(UserError, match="has vocab_size 61 and the model 62; name a head that was trained for this model"):
        load_eagle3(tmp_path / "head", select("reference"), other)


def test_a_head_is_trained_at_positions_beyond_those_of_its_folder(tmp_path: Path) -> None:
    target, head = Decoder(TARGET, select("cpu")), a_head(select("cpu"))
    initialise(target, 7, 0.2)
    save_model(target, tmp_path / "target")
    save_eagle3(head, tmp_path / "head")
    tokens, context = torch.arange(20), PackedContext(torch.tensor([0, 20], dtype=torch.int32), 20)
    made = []
    for positions in (128, 4):
        path = tmp_path / "head" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions}))
        settings = ReplicaSettings(tmp_path / "target", tmp_path, TrainerConfig(), ParallelConfig(), 32, context=20)
        model, _ = load_draft(settings, alone(), select("cpu"), tmp_path / "head", 2)
        made.append(model.outputs(tokens, tokens, context, tokens[:-1], tokens[1:], 1.0).of_draft)
    assert all(torch.equal(step.cross_entropy, other.cross_entropy) for step, other in zip(*made, strict=True))


def test_training_computes_at_each_position_what_drafting_from_there_does(kernels: Kernels) -> None:
    """The draft of each token is computed anew: the target's states up to it, then the head's own, as one sequence."""
    target, head, generator = Decoder(TARGET, kernels), a_head(kernels), torch.Generator().manual_seed(6)
    initialise(target, 7, 0.2)
    lengths, tokens = [9, 6], torch.randint(61, (15,), generator=generator)
    positions, context = torch.cat([torch.arange(9), torch.arange(6)]), PackedContext(torch.tensor([0, 9, 15], dtype=torch.int32), 9)
    head.embedding = target.embedded
    model, rows = DraftDecoder(head.shapes, head, target, 3), torch.tensor([2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14])
    made = model.outputs(tokens, positions, context, rows, rows, 1.0).of_draft
    assert made is not None
    wanted: list[list[Tensor]] = [[], [], []]
    with torch.no_grad():
        aux = AuxHiddenStates(head.shapes.aux_layers)
        logits, first = target.logits(target(tokens, positions, context, aux=aux)), 0
        for length in lengths:
            states, own = head.combined([state[first : first + length] for state in aux.states]), tokens[first : first + length]
            for t in range(length):
                hidden = states[: t + 1]
                for step in range(3):
                    label = t + step + 1
                    if label < length:
                        whole = PackedContext(torch.tensor([0, label], dtype=torch.int32), label)
                        x, following = head(own[1 : label + 1], torch.arange(label), hidden, whole)
                        hidden = torch.cat((hidden, following[-1:]))
                        if first + label in rows.tolist():
                            distribution = logits[first + label, head.target_ids].softmax(0)
                            wanted[step].append(-(distribution * head.logits(x[-1:])[0].log_softmax(0)).sum())
            first += length
    for step, values in zip(made, wanted, strict=True):
        torch.testing.assert_close(step.cross_entropy.detach(), torch.stack(values), rtol=1e-4, atol=1e-4)
