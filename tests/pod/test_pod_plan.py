"""The choice of a plan by budget, its states as a table by hand, and memory that is left behind."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.recipe import Recipe, load_config
from tandem.config.residents import ResidentsConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import PodMemory
from tandem.layout.residents import PLANS, RESIDENTS, Phase, Residency, State
from tandem.pod.actor import FrozenModel
from tandem.pod.residents.plan import Budget, Candidate, candidates, choose, largest_micro_batch
from tandem.pod.residents.residue import SLACK_BYTES, ResidueCheck
from tandem.pod.residents.trainer import HeldTensors, TrainerResidents
from tandem.trainer.offload.offloader import Offloader
from tandem.trainer.offload.places import FilePlace
from tandem.types import DamagedOffload, RunError, UserError

GIB = 2**30
DEVICE, DISK, ABSENT = State.DEVICE, State.DISK, State.ABSENT
NEEDED = {"keep": 10, "sleep": 8, "offload": 6, "figure": 5, "terminate": 5}
"""Gibibytes of memory, for each plan; what is saved takes 3 of disk, 2 under ``terminate``."""


def needs(residency: Residency) -> Candidate:
    disk = (2 if residency.rule.rebuilds else 3) if residency.rule.offloads else 0
    return Candidate(residency, PodMemory(trainer=NEEDED[residency.plan] * GIB, trainer_idle=0, rollout=0), None, disk * GIB)


def chosen(memory: float, disk: float = 100, **settings: object) -> tuple[str, list[str]]:
    allowed = candidates(ResidentsConfig(**settings), on_gpu=False, sleeps=True)  # type: ignore[arg-type]
    candidate, why = choose(allowed, needs, Budget(None, int(memory * GIB), int(disk * GIB)))
    return candidate.residency.plan, why


def test_the_loosest_plan_that_fits_is_taken_and_says_why_no_looser_one_is() -> None:
    assert chosen(10) == ("keep", [])
    assert chosen(9) == ("sleep", ["keep needs 10.00 GiB at its worst moment and may take 9.00 GiB of memory"])
    assert chosen(6)[0] == "offload" and chosen(5)[0] == "figure"
    plan, why = chosen(5, disk=2)
    assert plan == "terminate" and len(why) == 4 and why[3] == "figure (to disk) needs 3.00 GiB of disk and may take 2.00 GiB"
    assert chosen(10, plan="figure")[0] == "figure", "the recipe's own choice"


def test_a_budget_that_nothing_fits_in_is_one_line_that_says_what_would() -> None:
    with pytest.raises(RunError) as caught:
        chosen(4, disk=1)
    assert str(caught.value).startswith(
        "this run needs 5.00 GiB at its worst moment and may take 4.00 GiB of memory, under plan terminate (to disk), the one that needs least; "
        "what would fit: 5.00 GiB of memory (machine.memory_gib) and 2.00 GiB of disk (residents.disk_gib), or lower"
    )
    with pytest.raises(RunError, match=r"under plan sleep.*8.00 GiB of memory \(machine.memory_gib\) or another residents.plan"):
        chosen(4, plan="sleep")


def test_the_largest_micro_batch_has_a_shared_prompt_once_and_attends_to_it_for_every_sample() -> None:
    def largest(micro_batch_tokens: int, share_prompts: bool) -> tuple[int, int]:
        trainer = TrainerConfig(micro_batch_tokens=micro_batch_tokens, share_prompts=share_prompts)
        return largest_micro_batch(RolloutConfig(prompts_per_step=3, max_tokens=20), AlgorithmConfig(group_size=4), trainer, 100)

    assert largest(10_000, False) == (3 * 4 * 100, 0), "the whole step"
    assert largest(10_000, True) == (3 * (80 + 4 * 20), 3 * 4 * 100)
    # Two samples fit beside their prompt of 80 tokens, so that 120 tokens attend to twice 100.
    assert largest(125, False) == (125, 0) and largest(120, True) == (120, 200)
    assert largest(50, True) == (100, 100), "one sample is longer than a micro-batch should be"


def test_an_engine_of_several_ranks_does_not_sleep() -> None:
    allowed = [residency.plan for residency in candidates(ResidentsConfig(), on_gpu=False, sleeps=False)]
    assert allowed == ["keep", "figure", "terminate"]
    with pytest.raises(RunError, match=r"'residents.plan' is 'sleep' and an engine with tensor-parallel ranks cannot sleep"):
        list(candidates(ResidentsConfig(plan="sleep"), on_gpu=False, sleeps=False))
    on_gpu = [(residency.plan, residency.to) for residency in candidates(ResidentsConfig(plan="figure"), on_gpu=True, sleeps=True)]
    assert on_gpu == [("figure", "memory"), ("figure", "disk")], "memory is the nearer place"


def test_where_each_resident_is_in_each_phase_of_each_plan() -> None:
    """Rollout, inference, train; from the figure, and Kimi k1.5's terminate."""
    away = {"actor": (DISK, DISK, DEVICE), "optimizer": (DISK, DISK, DEVICE), "reference": (DISK, DEVICE, DISK), "reward_model": (DISK, DEVICE, DISK)}
    away |= {"critic": (DISK, DEVICE, DEVICE), "critic_optimizer": (DISK, DISK, DEVICE), "updated_reference": (DISK, DEVICE, DEVICE)}
    stays = dict.fromkeys(away, (DEVICE, DEVICE, DEVICE))
    engine = {"keep": (DEVICE, DEVICE, DEVICE)}
    rebuilt = dict.fromkeys(("reference", "reward_model"), (ABSENT, DEVICE, ABSENT))
    trainer = {"keep": stays, "sleep": stays, "offload": away, "figure": away, "terminate": {**away, **rebuilt}}
    for plan in PLANS:
        expected = {name: engine.get(plan, (DEVICE, ABSENT, ABSENT)) for name in ("engine_weights", "kv_cache")}
        expected |= {"gradients": (ABSENT, ABSENT, DEVICE), **trainer[plan]}
        found = {name: tuple(Residency(plan).state(resident, phase) for phase in Phase) for name, resident in RESIDENTS.items()}
        assert found == expected, plan


def test_what_can_be_read_ahead_is_what_fits_beside_the_present_phase() -> None:
    memory = PodMemory(trainer=6, trainer_idle=1, rollout=5, segments=1, inference=3)
    figure = Candidate(Residency("figure"), memory, None, 0)
    assert figure.prefetches(Budget(None, 8, 9)) == set()
    assert figure.prefetches(Budget(None, 9, 9)) == {Phase.ROLLOUT}, "5 of the engine, 3 of inference and the buffers"
    assert figure.prefetches(Budget(None, 10, 9)) == {Phase.ROLLOUT, Phase.INFERENCE}, "3 of inference, 6 of training and the buffers"
    assert replace(figure, residency=Residency("keep")).prefetches(Budget(None, 99, 9)) == set(), "nothing is away"


def test_old_keys_are_refused_with_their_new_name() -> None:
    for old in ("rollout.sleep_mode=terminate", "trainer.sleep_offload=nvme"):
        with pytest.raises(UserError, match=rf"'{old.split('=')[0]}' cannot be set: it is residents.plan now"):
            load_config("recipes/sort.yaml", [f"--{old}"])
    with pytest.raises(UserError, match=r"'residents.to' is 'disk', which is not read: residents.plan is 'keep'"):
        load_config("recipes/sort.yaml", ["--residents.plan=keep", "--residents.to=disk"])
    recipe = load_config("recipes/sort.yaml", ["--residents.plan=offload", "--trainer.offload_folder=/tmp"])
    assert isinstance(recipe, Recipe)
    with pytest.raises(UserError, match=r"'trainer.offload_folder' is '/tmp'.*residents.plan to offload"):
        load_config("recipes/sort.yaml", ["--residents.plan=sleep", "--trainer.offload_folder=/tmp"])


def test_a_resident_that_is_kept_by_somebody_is_found_by_name(tmp_path) -> None:
    actor = torch.ones(1 << 18)
    residents = TrainerResidents(Residency("offload"), {"actor": HeldTensors(lambda: [actor])}, Offloader(FilePlace(tmp_path)))
    residents.leave(Phase.ROLLOUT, 0)
    residents.settle()
    check = ResidueCheck()
    assert check.of_residents(residents.states, residents.held_bytes()) == []
    actor.untyped_storage().resize_(1 << 20)  # something made the storage again behind the manager's back
    assert check.of_residents(residents.states, residents.held_bytes()) == ["actor should be on disk and holds 1.0 MiB of the device's memory"]


def test_a_destroyed_model_that_something_still_refers_to_is_found_and_one_that_is_made_of_other_weights_is_refused() -> None:
    made: list[torch.nn.Linear] = []

    def build() -> SimpleNamespace:
        made.append(torch.nn.Linear(1 << 10, 1 << 8, bias=False))
        torch.nn.init.constant_(made[-1].weight, float(len(made) > 2))
        return SimpleNamespace(model=made[-1], weights=lambda model=made[-1]: list(model.parameters()))

    reference = FrozenModel(build)  # type: ignore[arg-type]
    residents, check = TrainerResidents(Residency("terminate"), {"reference": reference}, None), ResidueCheck()
    assert residents.states["reference"] is State.ABSENT
    residents.enter(Phase.INFERENCE, 0)
    residents.enter(Phase.TRAIN, 0)
    assert check.of_residents(residents.states, residents.held_bytes()) == ["reference should be absent and holds 1.0 MiB of the device's memory"]
    made.clear()
    assert check.of_residents(residents.states, residents.held_bytes()) == []
    assert [(move.resident, str(move.move), move.size_bytes) for move in residents.take_moves()] == [
        ("reference", "instantiate", 1 << 20), ("reference", "destroy", 1 << 20)
    ]  # fmt: skip
    residents.enter(Phase.INFERENCE, 1)
    residents.enter(Phase.TRAIN, 1)
    made += [made[0], made[0]]
    with pytest.raises(DamagedOffload, match="the reference was read again from its folder and has other weights than before"):
        residents.enter(Phase.INFERENCE, 2)


def test_a_process_that_grows_beside_its_residents_is_found_after_it_has_settled() -> None:
    check, held = ResidueCheck(), {"actor": GIB}
    sizes = [GIB, 2 * GIB, 2 * GIB + SLACK_BYTES]
    assert [check.of_process(Phase.TRAIN, size, held) for size in sizes] == [[], [], []]
    (line,) = check.of_process(Phase.TRAIN, 2 * GIB + SLACK_BYTES + GIB // 5, held)
    assert "the trainer's process holds 268.8 MiB beside its residents more" in line
    assert check.of_process(Phase.ROLLOUT, 9 * GIB, held) == [], "each phase by itself"
