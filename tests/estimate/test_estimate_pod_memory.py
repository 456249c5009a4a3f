"""The memory plan of a pod against a calculation by hand."""

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import PROCESS_BYTES, fits_together, predict
from tandem.estimate.peak_bytes import TRAINING_PROCESS_BYTES, peak_bytes
from tandem.layout.shapes import ModelShapes, parameter_count

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
WEIGHTS = 4 * parameter_count(LLAMA)


def test_trainer_of_a_pod_takes_what_all_ranks_of_its_mesh_take_together() -> None:
    meshes = ParallelConfig(data=2, zero=1), ParallelConfig(data=2, zero=3), ParallelConfig(data=2, tensor=2), ParallelConfig(pipeline=3)
    for parallel in (ParallelConfig(), *meshes):
        plan = predict(LLAMA, TrainerConfig(), parallel, tokens=50, kv_cache_tokens=0, reference=True)
        frozen = WEIGHTS if parallel.zero == 3 else parallel.data * WEIGHTS
        difference = plan.trainer - parallel.world * peak_bytes(LLAMA, TrainerConfig(), 50, parallel) - frozen
        assert 0 >= difference > -parallel.world and plan.segments == 2 * WEIGHTS


def test_trainer_without_its_turn_has_weights_moments_reference_and_a_staged_checkpoint_unless_they_are_in_a_file() -> None:
    staged = 3 * WEIGHTS
    every = (
        (ParallelConfig(), 4 * WEIGHTS),
        (ParallelConfig(data=2, zero=1), 2 * 2 * WEIGHTS + 2 * WEIGHTS),
        (ParallelConfig(data=2, zero=3), 3 * WEIGHTS + WEIGHTS),
    )
    for parallel, held in every:
        for sleep_offload, in_memory in (("none", held), ("nvme", 0)):
            trainer = TrainerConfig(sleep_offload=sleep_offload)  # type: ignore[arg-type]
            plan = predict(LLAMA, trainer, parallel, tokens=50, kv_cache_tokens=0, reference=True)
            wanted = parallel.world * TRAINING_PROCESS_BYTES + 1.1 * in_memory + staged
            assert abs(plan.trainer_idle - wanted) < 64, (parallel, sleep_offload)


def test_engine_stays_where_both_fit_together() -> None:
    plan = predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=False)
    assert fits_together(plan, plan.together) and not fits_together(plan, plan.together - 1)
    assert plan.largest_phase < plan.together


def test_every_rollout_worker_has_weights_and_a_cache_of_its_own() -> None:
    one, three = (
        predict(LLAMA, TrainerConfig(), ParallelConfig(), tokens=50, kv_cache_tokens=1000, reference=False, swap_bytes=7, engines=engines)
        for engines in (1, 3)
    )
    # Keys and values of 2 heads of 8 floats in 3 layers.
    assert one.rollout == PROCESS_BYTES + 2 * WEIGHTS + 1000 * 3 * 2 * 2 * 8 * 4 + 7 and three.rollout == 3 * one.rollout
    assert (three.trainer, three.segments) == (one.trainer, one.segments)
