"""DeepSpeed as a trainer's backend, as far as it goes without its environment: what is refused, how the environment is made, the network around our decoder,
and which elements of which tensor a rank has."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tandem.backends import requirements
from tandem.backends.deepspeed.fragments import fragments_of
from tandem.backends.deepspeed.network import Network
from tandem.backends.deepspeed.optimizer import DeepSpeedOptimizer
from tandem.backends.new_environment import NewEnvironment
from tandem.config.recipe import load_config
from tandem.kernels import select
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors
from tandem.trainer.micro_batch import collate
from tandem.trainer.step import predict
from tandem.types import TrainSequence, UserError

RECIPE = Path(__file__).parents[2] / "recipes" / "sort.yaml"
REFUSED = [
    (("trainer.optimizer=muon",), "'trainer.optimizer' is 'muon' and trainer.backend 'deepspeed', which updates with AdamW; set it to 'adamw'"),
    (("trainer.dtype=bfloat16",), "'trainer.dtype' is 'bfloat16'"),
    (("trainer.precision=fp16",), "'trainer.precision' is 'fp16' and trainer.backend 'deepspeed', which scales no loss here"),
    (("trainer.offload=nvme",), "'trainer.offload' is 'nvme'"),
    (("trainer.offload=nvme", "trainer.offload_parameters=nvme"), "'trainer.offload_parameters' is 'nvme'"),
    (("trainer.offload_activations=nvme",), "'trainer.offload_activations' is 'nvme'"),
    (("trainer.router_balance_loss=0.1",), "'trainer.router_balance_loss' is 0.1"),
    (("trainer.router_bias_rate=0.1",), "'trainer.router_bias_rate' is 0.1"),
    (("trainer.lora.rank=4",), "section 'trainer.lora' is given"),
    (("trainer.recompute=full", "parallel.data=2", "parallel.zero=3"), "'trainer.recompute' is 'full' with parallel.zero 3"),
    (("parallel.tensor=2",), "'parallel.tensor' is 2"),
    (("parallel.pipeline=2",), "'parallel.pipeline' is 2"),
    (("parallel.context=2",), "'parallel.context' is 2"),
    (("parallel.data=2", "parallel.expert=2", "parallel.zero=1"), "'parallel.expert' is 2"),
    (("parallel.data=2",), "'parallel.zero' is 0 with parallel.data 2"),
    (("algorithm.name=ppo",), "'algorithm.name' is 'ppo'"),
    (("algorithm.kl_coef=0.01", "reference.update=ema", "reference.every_steps=2"), "'reference.update' is 'ema'"),
    (("residents.plan=figure",), "'residents.plan' is 'figure'"),
    (("machine.device=cuda",), "'machine.device' is 'cuda'"),
]


@pytest.mark.parametrize(("settings", "named"), REFUSED)
def test_what_deepspeed_does_not_do_here_is_refused_in_one_line(settings: Sequence[str], named: str) -> None:
    overrides = [f"--{setting}" for setting in settings]
    load_config(RECIPE, overrides)
    with pytest.raises(UserError) as refused:
        load_config(RECIPE, ["--trainer.backend=deepspeed", *overrides])
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_its_stages_run_on_one_rank_too_and_training_on_data_is_tandems_own() -> None:
    taken = ((), ("parallel.zero=3",), ("parallel.data=2", "parallel.zero=2", "trainer.offload=cpu"), ("residents.plan=sleep",), ("trainer.precision=bf16",))
    for settings in taken:
        load_config(RECIPE, ["--trainer.backend=deepspeed", *(f"--{setting}" for setting in settings)])
    with pytest.raises(UserError, match=r"trainer.backend.*Tandem's own trainer"):
        load_config(RECIPE, ["--trainer.backend=deepspeed", "--algorithm.name=sft"])


class Recorded(NewEnvironment):
    """An environment that notes what would be installed and run."""

    def run(self, what: str, *arguments: str, environment: Any = None) -> None:
        self.__dict__.setdefault("ran", []).append((arguments, environment or {}))


def test_its_operators_are_compiled_when_the_environment_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorded("deepspeed", tmp_path, ("--index-url", "https://mirror"))
    requirements.install_deepspeed(made)
    first, second, third = made.__dict__["ran"]
    assert any(argument.startswith("torch==") for argument in first[0]) and "ninja" in first[0]
    assert second[0][-1] == "deepspeed" and {"--no-build-isolation", "--no-binary", "--constraint", "https://mirror"} <= set(second[0])
    assert second[1]["DS_BUILD_CPU_ADAM"] == "1" == second[1]["DS_BUILD_SHM_COMM"] and (tmp_path / "constraints.txt").read_text().startswith("torch==")
    assert "cpu_adam_op" in third[0][-1]
    monkeypatch.setattr(requirements.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"compiled with c\+\+, which is not there; install g\+\+"):
        requirements.install_deepspeed(made)


SHAPES = ModelShapes("qwen3", 40, 32, 2, 2, 1, 16, 64, 48, True, qk_norm=True)


def decoder() -> Decoder:
    made, draw = Decoder(SHAPES, select("auto", torch.float32)), torch.Generator().manual_seed(0)
    load_tensors(made, ((name, torch.randn(shape, generator=draw) * 0.2) for name, shape in parameters(SHAPES)))
    return made


def test_the_network_around_the_decoder_computes_its_bits_and_gradients_one_layer_a_module() -> None:
    sequence = TrainSequence("a", (1, 2, 3, 4, 5, 6), 2, (0.0, 0.0, 1.0, 1.0, 1.0, 1.0), (-1.0,) * 6, (-1.0,) * 6, None, (0.5,) * 6)
    micro_batch = collate([sequence])

    def gradients(model: Decoder, wrapped: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        compute = lambda held: predict(held, micro_batch, 1.0).logprobs.scaled.sum()
        total = Network(model)(compute) if wrapped else compute(model)
        total.backward()
        return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (ours, own), (plain, theirs) = gradients(decoder(), True), gradients(decoder(), False)
    assert torch.equal(ours, plain) and own.keys() == theirs.keys() == dict(decoder().named_parameters()).keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    network, called = Network(decoder()), list[str]()
    for name, module in network.around.items():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    network(lambda held: predict(held, micro_batch, 1.0))
    assert called == ["0", "1"]
    inside = {id(parameter) for module in network.around.values() for parameter in module.parameters()}
    assert {id(parameter) for parameter in network.ends()} | inside == {id(parameter) for parameter in network.decoder.parameters()}
    assert inside.isdisjoint({id(parameter) for parameter in network.ends()})


def of_stage_3(parameters: dict[str, nn.Parameter], ranks: int) -> SimpleNamespace:
    """A ZeRO 3 optimizer's tables: each parameter in equal parts, the last padded, and a rank's parts end to end in one flat tensor."""
    positions, at = {}, 0
    for number, parameter in enumerate(parameters.values()):
        length = -(-parameter.numel() // ranks)
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
        parameter.number = number  # type: ignore[attr-defined]
        positions[number] = [0, at, length]
        at += length
    flat = torch.arange(float(at))
    return SimpleNamespace(
        grad_position=positions, get_param_id=lambda parameter: parameter.number, fp32_partitioned_groups_flat=[flat], offload_optimizer=False,
        optimizer=SimpleNamespace(state={}), averaged_gradients={},
    )  # fmt: skip


def of_stage_1(parameters: dict[str, nn.Parameter], ranks: int, rank: int) -> SimpleNamespace:
    """A ZeRO 1 optimizer's tables: all parameters end to end, padded, in equal parts."""
    at, total = 0, sum(parameter.numel() for parameter in parameters.values())
    part = -(-total // ranks)
    for parameter in parameters.values():
        first, last = max(at, rank * part), min(at + parameter.numel(), (rank + 1) * part)
        here, there = SimpleNamespace(start=first - at, numel=last - first), SimpleNamespace(start=first - rank * part)
        fragment = SimpleNamespace(lp_fragment_address=here, hp_fragment_address=there, param_group_index=0)
        parameter._hp_mapping = fragment if first < last else None  # type: ignore[attr-defined]
        at += parameter.numel()
    return SimpleNamespace(single_partition_of_fp32_groups=[torch.arange(float(part))], cpu_offload=False, optimizer=SimpleNamespace(state={}))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_fragments_of_all_ranks_cover_every_element_once_without_padding(stage: int) -> None:
    sizes = {"a": (5, 3), "b": (1,), "c": (7, 2)}
    seen = {name: torch.zeros(shape).view(-1) for name, shape in sizes.items()}
    for rank in range(2):
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in sizes.items()}
        zero = of_stage_3(parameters, 2) if stage == 3 else of_stage_1(parameters, 2, rank)
        for fragment in fragments_of(zero, stage, parameters, rank):
            seen[fragment.name][fragment.first : fragment.first + fragment.size] += 1
        flat = (zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)[0]
        optimizer = DeepSpeedOptimizer(SimpleNamespace(optimizer=zero), stage, parameters, SimpleNamespace(data=SimpleNamespace(rank=rank)))  # type: ignore[arg-type]
        for part in optimizer.parts():
            assert part.kind == "weights" and part.values.data_ptr() >= flat.data_ptr(), "a copy"
        # Worked by hand: 15, 1 and 14 elements; each rank has 8, 1 and 7 of them under ZeRO 3 (7 and 0 on rank 1), and 15 in all under ZeRO 1.
        held = {part.name: (part.first, part.values.numel()) for part in optimizer.parts()}
        by_hand = {3: [{"a": (0, 8), "b": (0, 1), "c": (0, 7)}, {"a": (8, 7), "c": (7, 7)}], 1: [{"a": (0, 15)}, {"b": (0, 1), "c": (0, 14)}]}
        assert held == by_hand[stage][rank]
    assert all(bool((count == 1).all()) for count in seen.values())
