"""An engine of another pod receives the trainer's weights over TCP and computes the same bits as the engine of the trainer's pod."""

from collections.abc import Iterator

import pytest
from pods_of_a_run import TwoPods

from tandem.types import RunError, WeightVersion

FIRST = WeightVersion(1, 0)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPods]:
    made = TwoPods(tmp_path_factory.mktemp("pods"))
    made.start()
    made.register(FIRST)
    yield made
    made.close()


@pytest.mark.full
def test_the_engine_of_another_pod_draws_the_same_samples_with_the_same_log_probabilities(pods: TwoPods) -> None:
    here, there = pods.engines
    with pytest.raises(RunError, match="no pod serves the shared memory"):
        there.receive_weights(pods.store, pods.own_store, FIRST)
    assert pods.trainer.serve_weights(pods.store).keys() == {"tcp"}
    got = there.receive_weights(pods.store, pods.own_store, FIRST)
    assert (got["version"], got["protocol"], got["rereads"], got["breaks"]) == ([1, 0], "tcp", [], 0)
    for engine in (here, there):
        engine.update_weight(FIRST)
    one, other = (pods.rollout(engine, 0) for engine in (here, there))
    assert len(one) == 16 and one == other
    assert there.receive_weights(pods.store, pods.own_store, None)["protocol"] == ""
