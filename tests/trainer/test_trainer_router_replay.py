"""Router replay: Tandem's engine needs none, a routing is replayed row by row, and it is what makes up for routers that choose otherwise."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.model import NewModelConfig
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.kernels.reference import ReferenceKernels
from tandem.model import decoder
from tandem.model.create_model import create_model
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_model
from tandem.model.layer_pass import LayerBatch, run_layer
from tandem.rl.algorithms.batch import train_sequence, without_replay
from tandem.trainer.logprobs import infer_sequences
from tandem.trainer.micro_batch import collate
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import FrozenReplica
from tandem.types import FinishReason, RoutedExperts, Sample, TrainSequence, WeightVersion

LAYERS, EXPERTS, EACH = 3, 6, 2
Chosen = dict[int, Counter[tuple[int, tuple[int, ...]]]]
"""By layer, how often a position was sent to which experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "model"
    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "head_dim": 16, "moe_intermediate_size": 32}
    create_model(NewModelConfig(architecture="qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=EACH, initializer_range=0.2, **sizes), 0, path)
    return path


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Records what the routers of any decoder choose."""
    found: Chosen = defaultdict(Counter)

    class Recording:
        def __init__(self, batch: LayerBatch, layer: int, rows: Any) -> None:
            self.kernels, self.layer = batch.kernels, layer
            positions = batch.rotations[0].positions
            self.positions = positions if rows is None else positions[rows]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.kernels, name)

        def route(self, *arguments: Any) -> Any:
            routing = self.kernels.route(*arguments)
            found[self.layer].update(zip(self.positions.tolist(), map(tuple, routing.experts.tolist()), strict=True))
            return routing

    def recording(batch: LayerBatch, weights: Any, x: Any, residual: Any, rows: Any = None) -> Any:
        return run_layer(batch._replace(kernels=Recording(batch, weights.attention.index, rows)), weights, x, residual, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder, "run_layer", recording)
    return found


def logprobs_of(model: Decoder, sequences: list[TrainSequence]) -> torch.Tensor:
    """The raw log-probabilities of all sampled tokens, one sequence after the other."""
    return torch.cat([values[0] for values in infer_sequences(FrozenReplica(alone(), model), sequences, 64)])


def sequences_of(llm: LLM) -> list[TrainSequence]:
    params = SamplingParams(n=4, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    outputs = llm.generate(["sort 3 1 2", "q"], params)
    samples = [
        Sample(
            f"0/{prompt}/{each.index}", str(prompt), each.index, tuple(output.prompt_token_ids), tuple(each.token_ids), tuple(each.raw_logprobs),
            tuple(each.sampling_logprobs), (WeightVersion(0, 0),) * len(each.token_ids), FinishReason.LENGTH, "",
        )
        for prompt, output in enumerate(outputs) for each in output.outputs
    ]  # fmt: skip
    return [train_sequence(sample) for sample in samples]


def test_the_engine_sends_every_token_to_the_experts_that_the_trainer_sends_it_to(folder: Path, chosen: Chosen) -> None:
    """Continuous batching, chunked prefill: the routing is the trainer's, token for token, and so are the bits of log-probabilities."""
    llm = LLM(folder, max_num_seqs=5, max_num_batched_tokens=8, enable_prefix_caching=False)
    sequences = sequences_of(llm)
    in_engine = {layer: counts.copy() for layer, counts in chosen.items()}
    chosen.clear()
    found = logprobs_of(load_model(folder, llm.engine.decoder.kernels), sequences)
    assert torch.equal(found, torch.tensor([value for s in sequences for value in s.rollout_logprobs[s.prompt_length :]], dtype=torch.float64))
    assert in_engine.keys() == chosen.keys() == set(range(LAYERS))
    for layer in range(LAYERS):
        # The engine computes a prompt once for its samples, and of a prompt the last layer's experts for the last token alone.
        completions = {key: count for key, count in chosen[layer].items() if key[0] >= max(s.prompt_length for s in sequences)}
        assert sum(completions.values()) > 30
        assert {key: in_engine[layer][key] for key in completions} == completions
        assert in_engine[layer].keys() <= chosen[layer].keys()
    assert len({experts for _, experts in chosen[1]}) > 5


def test_a_routing_is_replayed_row_by_row(folder: Path) -> None:
    """A decoder that is given its own choices computes the same bits; given another's, it computes what that decoder does but for the gates."""
    llm = LLM(folder, max_num_seqs=5)
    sequences, model = sequences_of(llm), load_model(folder, ReferenceKernels())
    routed = [replace(s, routed_experts=own_routing(model, s)) for s in sequences]
    assert torch.equal(logprobs_of(model, routed), logprobs_of(model, sequences))
    assert without_replay(routed) == sequences
    batch = collate(routed[:3])
    assert batch.routed_experts is not None and batch.routed_experts.shape == (len(batch.tokens), LAYERS, EACH)
    shifted = [replace(s, routed_experts=replace(s.routed_experts, data=bytes((e + 1) % EXPERTS for e in s.routed_experts.data))) for s in routed]
    assert (logprobs_of(model, shifted) - logprobs_of(model, sequences)).abs().max() > 0.01


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_choices_that_differ_from_the_routers_own_are_counted_once(folder: Path, recompute: str) -> None:
    """Three tokens are sent to an expert fewer of their own in the last layer, after which nothing is routed; the order of a token's experts has no meaning."""
    sequences, model = sequences_of(LLM(folder, max_num_seqs=5)), load_model(folder, ReferenceKernels())
    model.recompute = recompute
    routed = [replace(s, routed_experts=own_routing(model, s)) for s in sequences]

    def changed(sequence: TrainSequence, token: int) -> TrainSequence:
        assert sequence.routed_experts is not None
        data = bytearray(sequence.routed_experts.data)
        place = (token * LAYERS + LAYERS - 1) * EACH
        other = next(each for each in range(EXPERTS) if each not in data[place : place + EACH])
        data[place : place + EACH] = bytes([data[place + 1], other])
        data[:EACH] = data[:EACH][::-1]
        return replace(sequence, routed_experts=replace(sequence.routed_experts, data=bytes(data)))

    batch = collate([changed(routed[0], 2), changed(routed[1], 5), changed(routed[2], 7), *routed[3:]])
    model(batch.tokens, batch.positions, batch.context).sum().backward()
    assert model.replay_count.take(model.device).tolist() == [3, len(batch.tokens) * LAYERS]
    assert model.replay_count.take(model.device).tolist() == [0, 0]


def own_routing(model: Decoder, sequence: TrainSequence) -> RoutedExperts:
    seen: list[torch.Tensor] = []
    batch = collate([replace(sequence, loss_mask=(0.0, *[1.0] * (len(sequence.token_ids) - 1)))])
    with torch.no_grad():
        model(batch.tokens, batch.positions, batch.context, seen)
    experts = torch.stack([logits.softmax(-1).topk(EACH).indices for logits in seen], 1)
    return RoutedExperts(LAYERS, EACH, 1, bytes(experts.flatten().tolist()))


def test_replay_makes_up_for_routers_that_choose_otherwise(folder: Path, make_perturbed: Callable[[Decoder], Decoder]) -> None:
    """The rollout's routers are a little other than the trainer's, as another engine's rounding makes them: the mismatch falls by more than half."""
    trainer = load_model(folder, ReferenceKernels(), dtype=torch.float64)
    rollout = make_perturbed(load_model(folder, ReferenceKernels(), dtype=torch.float64))
    sequences = sequences_of(LLM(folder, max_num_seqs=5))
    routed = [replace(s, routed_experts=own_routing(rollout, s)) for s in sequences]
    drawn = logprobs_of(rollout, sequences)

    def mismatch(found: torch.Tensor) -> float:
        """The mean of k3 (Schulman, 2020) between the rollout and the trainer."""
        ratio = found - drawn
        return float((ratio.exp() - 1 - ratio).mean())

    plain, replayed = mismatch(logprobs_of(trainer, sequences)), mismatch(logprobs_of(trainer, routed))
    assert 0 < replayed < plain / 2


@pytest.fixture
def make_perturbed() -> Callable[[Decoder], Decoder]:
    def perturb(model: Decoder) -> Decoder:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "router" in name:
                    parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        return model

    return perturb


def test_a_routing_of_other_tokens_and_a_batch_of_which_some_have_none_are_refused(folder: Path) -> None:
    model = load_model(folder, ReferenceKernels())
    sequence = TrainSequence("s", tuple(range(3, 11)), 2, (0.0,) * 2 + (1.0,) * 6)
    routed = replace(sequence, routed_experts=own_routing(model, sequence))
    with pytest.raises(ValueError, match="some sequences of a micro-batch have a recorded routing"):
        collate([routed, sequence])
    short = replace(routed, routed_experts=replace(routed.routed_experts, data=routed.routed_experts.data[: -LAYERS * EACH]))
    with pytest.raises(ValueError, match="routed_experts has 6 entries for the 7 tokens before its last"):
        collate([short])
    wide = replace(routed, routed_experts=RoutedExperts(LAYERS, EACH, 2, bytes(b for e in routed.routed_experts.data for b in (e, 0))))
    assert torch.equal(collate([wide]).routed_experts, collate([routed]).routed_experts)
