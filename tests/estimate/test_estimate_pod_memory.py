"""The memory plan of a pod against a calculation by hand."""

from dataclasses import replace
from pathlib import Path

import torch

from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.config.lora import LoraConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import load_config
from tandem.config.trainer import TrainerConfig
from tandem.engine.kv_cache.cache_tensors import empty_states
from tandem.estimate.count_bytes import running_state_bytes
from tandem.estimate.memory import predict, saved_bytes_on_disk
from tandem.estimate.processes import CONTROLLER_BYTES, FORK_SERVER_BYTES, FORKED_ENGINE, FORKED_RANK_BYTES, SHARED_BYTES, SHIM_BYTES
from tandem.estimate.resident_bytes import forward_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.estimate.training_bytes import head_bytes
from tandem.jobs.pod_plan import plan_of
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.parameters import parameter_count
from tandem.layout.residents import PlanName, Residency
from tandem.layout.shapes import ModelShapes

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
WEIGHTS = 4 * parameter_count(LLAMA)


def peak_bytes(shapes: ModelShapes, parallel: ParallelConfig = ParallelConfig()) -> int:  # noqa: B008
    return predict_rank_memory(shapes, layout_of_trainer(TrainerConfig(), parallel, 50)).total


def kept_heap(shapes: ModelShapes, parallel: ParallelConfig = ParallelConfig()) -> int:  # noqa: B008
    """Returns what a rank has freed after an update and not given back: what the update had, where that is less than 64 MiB."""
    memory = predict_rank_memory(shapes, layout_of_trainer(TrainerConfig(), parallel, 50))
    freed = memory.activations + memory.logits + memory.gathered + memory.gradients
    assert 0 < freed < 64 << 20
    return freed


def test_trainer_of_a_pod_takes_what_all_ranks_of_its_mesh_take_together() -> None:
    meshes = ParallelConfig(data=2, zero=1), ParallelConfig(data=2, zero=3), ParallelConfig(data=2, tensor=2), ParallelConfig(pipeline=3)
    for parallel in (ParallelConfig(), *meshes):
        plan = predict(LLAMA, TrainerConfig(), parallel, tokens=50, kv_cache_tokens=0, reference=True)
        frozen = WEIGHTS if parallel.zero == 3 else parallel.data * WEIGHTS
        difference = plan.trainer - parallel.world * peak_bytes(LLAMA, parallel) - frozen
        assert 0 >= difference > -parallel.world and plan.segments == 2 * WEIGHTS


def test_trainer_without_its_turn_has_weights_moments_reference_and_a_staged_checkpoint_unless_they_are_in_a_file() -> None:
    staged = 3 * WEIGHTS
    every = (
        (ParallelConfig(), 4 * WEIGHTS),
        (ParallelConfig(data=2, zero=1), 2 * 2 * WEIGHTS + 2 * WEIGHTS),
        (ParallelConfig(data=2, zero=3), 3 * WEIGHTS + WEIGHTS),
    )
    for parallel, held in every:
        for residency, in_memory in ((Residency("keep"), held), (Residency("offload", "disk"), 0), (Residency("terminate", "disk"), 0)):
            plan = predict(LLAMA, TrainerConfig(), parallel, tokens=50, kv_cache_tokens=0, reference=True, residency=residency)
            # Beside an engine that stays nothing is given back.
            heap = parallel.world * kept_heap(LLAMA, parallel) if residency.plan == "keep" else 0
            wanted = parallel.world * FORKED_RANK_BYTES + 1.1 * in_memory + staged + heap
            assert abs(plan.trainer_idle - wanted) < 64, (parallel, residency)


def test_adapter_is_all_that_has_gradients_moments_and_a_place_in_updates_and_the_weights_beside_it_may_have_4_bits() -> None:
    lora = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))
    adapter = 3 * 4 * 4 * ((32 + 32) + (48 + 32))
    # 64 columns or fewer are one group: 4 bits a weight and a scale a row.
    rows = (32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)
    matrices = 3 * sum(n * k for n, k in rows)
    quantized = WEIGHTS - 4 * matrices + matrices // 2 + 3 * 4 * sum(n for n, _ in rows)
    for kind, weights in (("none", WEIGHTS), ("nf4", quantized)):
        shapes = replace(LLAMA, lora=replace(lora, quantization=kind))
        plan = predict(shapes, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=0, reference=False, reads_base=True)
        assert plan.segments == 2 * adapter
        # A staged checkpoint has the adapter and its moments.
        heap = kept_heap(shapes)
        assert abs(plan.trainer_idle - FORKED_RANK_BYTES - 1.1 * (weights + 3 * adapter) - 3 * adapter - heap) < 64, kind
        # Beside the reference's pass, of the actor, the keys and values of a layer that are gathered where sequences begin alike; all in what was freed.
        passes = forward_bytes(shapes, 50, ParallelConfig()) + 50 * 4 * (16 + 16)
        assert plan.inference - plan.trainer_idle == max(passes, heap) - heap


def test_every_phase_holds_what_its_plan_says() -> None:
    def phases(plan: PlanName) -> tuple[int, int, int, int]:
        found = predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=True, residency=Residency(plan))
        # A machine has the pages that ranks and engines share with the servers that they are forked from once.
        beside = CONTROLLER_BYTES + 2 * SHIM_BYTES + FORK_SERVER_BYTES - SHARED_BYTES
        trains = max(found.trainer, found.inference) + found.engine_idle - (SHARED_BYTES if found.engine_idle else 0)
        assert found.largest_phase == max(found.trainer_idle + found.rollout - SHARED_BYTES, trains) + found.segments + beside
        return found.trainer_idle, found.inference, found.trainer, found.engine_idle

    kept, away = phases("keep"), phases("figure")
    # The allocator keeps a tenth of what a process holds.
    moved = [before - after for before, after in zip(kept, away, strict=True)]
    heap, passes = kept_heap(LLAMA), forward_bytes(LLAMA, 50, ParallelConfig()) + 50 * 4 * (16 + 16)
    assert abs(moved[0] - 1.1 * 4 * WEIGHTS - heap) < 64, "weights, two moments and the reference"
    assert abs(moved[1] - 1.1 * 3 * WEIGHTS - (heap - passes)) < 64 and heap > passes, "weights and moments are away while the reference is here"
    assert moved[2] == WEIGHTS, "the reference is away while the actor trains"
    assert kept[3] == predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=True).rollout and away[3] == 0
    assert phases("terminate") == away and phases("offload")[:3] == away[:3]
    # An engine that is to sleep needs what an update has freed.
    assert phases("sleep")[:3] == (kept[0] - heap, kept[1] - (heap - passes), kept[2])
    # A sleeping engine has its process, the embedding, the head and the last norm.
    assert phases("sleep")[3] == FORKED_ENGINE.first + 4 * (2 * 100 * 32 + 32)


PLANS_OF_TRAINING: tuple[tuple[PlanName, int], ...] = (("keep", WEIGHTS), ("figure", 2 * WEIGHTS), ("terminate", 2 * WEIGHTS))
SAVED: tuple[tuple[PlanName, int], ...] = (("keep", 0), ("figure", 4 * WEIGHTS), ("terminate", 4 * WEIGHTS))


def test_a_reference_that_follows_is_there_while_the_actor_trains_and_is_staged_with_it() -> None:
    for plan, more_in_training in PLANS_OF_TRAINING:
        frozen, moving = (
            predict(
                LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=0, reference=True, follows=follows, residency=Residency(plan)
            )
            for follows in (False, True)
        )  # fmt: skip
        # A plan that moves residents has a frozen one away while the actor trains; the other weights are those of the staged checkpoint.
        assert moving.trainer - frozen.trainer == more_in_training, plan
        assert abs(moving.inference - frozen.inference - WEIGHTS) < 64 and abs(moving.trainer_idle - frozen.trainer_idle - WEIGHTS) < 64, plan
    for plan, saved in SAVED:
        arguments = (LLAMA, TrainerConfig(), ParallelConfig(), Residency(plan, "disk"))
        assert saved_bytes_on_disk(*arguments, reference=True, follows=True) == saved, plan
    assert saved_bytes_on_disk(*arguments, reference=True) == 3 * WEIGHTS, "terminate makes a frozen one again"


def test_a_teacher_takes_the_bytes_of_its_own_shapes() -> None:
    wide = ModelShapes("llama", 100, 64, 5, 4, 2, 8, 96, 64, tie_word_embeddings=False)
    own, other = (
        predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=0, reference=True, teacher=teacher) for teacher in (None, wide)
    )
    assert other.trainer - own.trainer == 4 * parameter_count(wide) - WEIGHTS and other.inference > own.inference


def test_a_critic_is_trained_and_staged_beside_the_actor_and_has_no_logits() -> None:
    critic = replace(LLAMA, value_head="token", language_head=False)
    # In place of a head of 100 x 32, which is not tied, one of 32 numbers and a bias.
    weights = WEIGHTS - 4 * 100 * 32 + 4 * 33
    assert weights == 4 * parameter_count(critic)
    without, beside = (
        predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=0, reference=True, critic=each) for each in (None, critic)
    )
    # Weights and two moments, as they are and staged; and gradients that stay while the actor learns.
    assert beside.trainer - without.trainer == 7 * weights
    for phase in ("trainer_idle", "inference"):
        assert abs(getattr(beside, phase) - getattr(without, phase) - 1.1 * 3 * weights - 3 * weights) < 64, phase
    assert head_bytes(critic, 50) == 0 and forward_bytes(LLAMA, 50, ParallelConfig()) - forward_bytes(critic, 50, ParallelConfig()) == head_bytes(LLAMA, 50)
    # One that is wider than the actor needs most while it learns itself, beside weights, moments and the staged copy of the actor.
    wide = replace(critic, hidden_size=256)
    found = predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=0, reference=False, critic=wide)
    assert found.trainer == peak_bytes(wide) + 3 * WEIGHTS + 3 * WEIGHTS
    assert saved_bytes_on_disk(LLAMA, TrainerConfig(), ParallelConfig(), Residency("figure", "disk"), reference=False, critic=critic) == 3 * (WEIGHTS + weights)


def test_a_reward_model_that_is_larger_than_the_others_decides_what_inference_takes() -> None:
    scorer = ModelShapes("llama", 100, 128, 3, 4, 2, 8, 512, 64, False, value_head="sequence", language_head=False)
    small, large = (
        predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=5000, kv_cache_tokens=0, reference=False, reward_model=each, residency=Residency("sleep"))
        for each in (replace(LLAMA, value_head="sequence", language_head=False), scorer)
    )
    weights = 4 * (parameter_count(scorer) - parameter_count(replace(LLAMA, value_head="sequence", language_head=False)))
    # Two layers' worth of what a token has in one: four times the width, q|k|v twice, the attention's output, log-sum-exps and the MLP three times.
    layers = 2 * 5000 * 4 * (4 * (128 - 32) + 3 * (512 - 48))
    assert abs(large.inference - small.inference - 1.1 * weights - layers) < 64


def test_every_rollout_worker_has_weights_and_a_cache_of_its_own() -> None:
    one, three = (
        predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=False, swap_bytes=7, engines=engines)
        for engines in (1, 3)
    )
    # Keys and values of 2 heads of 8 floats in 3 layers.
    assert one.rollout == FORKED_ENGINE.first + 2 * WEIGHTS + 1000 * 3 * 2 * 2 * 8 * 4 + 7 and three.rollout == 3 * one.rollout
    assert (three.trainer, three.segments) == (one.trainer, one.segments)


def test_every_pod_of_the_machine_has_two_weight_buffers_of_its_own() -> None:
    two = predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=False, engines=2, pods=2)
    assert two.segments == 2 * 2 * WEIGHTS


def test_engines_that_compute_with_the_shared_weights_have_none_of_their_own_after_the_first_update() -> None:
    plans = [
        predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=True, engines=3, shares_weights=shares)
        for shares in (False, True)
    ]
    assert plans[0].rollout - plans[1].rollout == 6 * WEIGHTS and plans[0].segments == plans[1].segments
    assert plans[0].rollout_phase - plans[1].rollout_phase == 3 * WEIGHTS, "until then they have one"


def test_an_engine_beside_an_adapter_has_experts_in_mxfp4_once_with_a_folder_decoded_to_16_bits_while_it_reads() -> None:
    shapes = ModelShapes("gpt_oss", 100, 64, 2, 4, 2, 16, 48, 64, tie_word_embeddings=False, experts=ExpertShapes(8, 2, 48, biased=True))
    trained = replace(shapes, lora=LoraConfig(rank=4, target_modules=("q_proj",)))
    # A layer has 8 experts: 96 and 64 rows of 64 and 48 columns, which have 2 scales each of one byte.
    layer, coded = 8 * (96 * 64 + 64 * 48), 8 * (96 * (32 + 2) + 64 * (24 + 2))
    adapter = 2 * 4 * (64 + 64)
    rest = parameter_count(shapes) - 2 * layer
    of = lambda **given: predict(trained, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=0, reference=False, **given).rollout
    decoded, held = of(), of(experts_in_mxfp4=True)
    assert decoded == FORKED_ENGINE.total(1) + 2 * 4 * (parameter_count(shapes) + adapter)
    assert held - FORKED_ENGINE.total(1) == 4 * (rest + adapter) + 2 * coded + 2 * (rest + 2 * layer) + 4 * layer


def test_a_plan_counts_experts_in_mxfp4_where_an_engine_keeps_them_and_nothing_replaces_them(tmp_path: Path) -> None:
    shapes = ModelShapes("gpt_oss", 100, 64, 2, 4, 2, 16, 48, 256, tie_word_embeddings=False, experts=ExpertShapes(64, 2, 48, biased=True))
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    adapter = ["--trainer.lora.target_modules=[q_proj]", "--residents.plan=keep"]

    def rollout(overrides: list[str], folder: Path | None) -> int:
        return plan_of(replace(load_config("sort", overrides), sft=None), shapes, 64, folder).host.rollout  # type: ignore[arg-type]

    numbers, coded = 2 * 64 * (96 * 64 + 64 * 48), 2 * 64 * (96 * (32 + 2) + 64 * (24 + 2))
    rest = parameter_count(shapes) - numbers
    # Once in fp32 or in 4 bits, once in 16 bits, and the experts of one of two layers; in place of twice in fp32.
    adapted = 4 * 2 * 16 * (64 + 64)
    saved = 2 * (4 * rest + 4 * numbers + adapted) - (4 * rest + adapted + coded + 2 * (rest + numbers) + 2 * numbers)
    assert rollout(adapter, None) - rollout(adapter, tmp_path) == saved
    for other in (["--machine.kernels=reference"], ["--trainer.precision=bf16"]):
        assert rollout(adapter + other, None) == rollout(adapter + other, tmp_path), other
    assert rollout(adapter[1:], None) == rollout(adapter[1:], tmp_path), "a trainer replaces all weights"


def test_engines_on_cpus_have_the_states_of_all_sequences_and_of_draft_tokens() -> None:
    linear = LinearAttention((0, 1), num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8, kernel_size=4)
    shapes = replace(LLAMA, linear_attention=linear)
    for speculative, states in ((None, 6), (SpeculativeConfig("ngram", num_speculative_tokens=2, disable_by_batch_size=2), 6 + 4)):
        engine = EngineArgs(max_num_seqs=6, speculative_config=speculative)
        held = sum(tensor.nbytes for _ in linear.layers for tensor in empty_states(linear, states, torch.float32, torch.device("cpu")) if tensor is not None)
        assert running_state_bytes(shapes, engine) == held
