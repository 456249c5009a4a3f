"""The predicted peak of a rank against a calculation by hand."""

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.peak_bytes import TRAINING_PROCESS_BYTES, peak_bytes
from tandem.estimate.training_bytes import training_bytes
from tandem.layout.shapes import ModelShapes, parameter_count

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
LAYER = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32
ENDS = 100 * 32 + 32 + 100 * 32


def test_peak_is_the_process_what_training_holds_what_ranks_exchange_and_the_copy_of_a_checkpoint() -> None:
    count, tokens = parameter_count(LLAMA), 50
    assert count == 3 * LAYER + ENDS
    # Weights and two moments are staged, by two ranks half each; a tenth of what is freed is kept. Sums under way: of two layers
    # and of the embedding or the head, each as it is sent and as it arrives.
    exchanged = {0: 4 * LAYER + 6400, 1: 4 * LAYER + 6400, 2: 5 * LAYER + 9600, 3: 7 * LAYER + 9600 + ENDS}
    for zero, numbers in exchanged.items():
        parallel = ParallelConfig(data=2, zero=zero)  # type: ignore[arg-type]
        held = training_bytes(LLAMA, TrainerConfig(), tokens, parallel) + 4 * numbers
        assert peak_bytes(LLAMA, TrainerConfig(), tokens, parallel) == TRAINING_PROCESS_BYTES + int(1.1 * held) + 6 * count


def test_one_process_exchanges_nothing_and_beside_offloaded_moments_the_copy_is_in_a_file() -> None:
    for config, staged in ((TrainerConfig(), 12 * parameter_count(LLAMA)), (TrainerConfig(offload="nvme"), 0)):
        assert peak_bytes(LLAMA, config, 50) == TRAINING_PROCESS_BYTES + int(1.1 * training_bytes(LLAMA, config, 50)) + staged
