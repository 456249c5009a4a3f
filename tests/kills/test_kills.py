"""A hundred kills at random milliseconds, starts included: pods, data-parallel ranks and servers. ``benchmarks/kills.py`` writes their table."""

from pathlib import Path

import pytest
from kill_targets import pod_job, ranks_job, server_model
from random_kills import Job, Kill, kill_job, kill_one, kill_server, table


def check(kills: list[Kill]) -> None:
    print("\n".join(table(kills)))
    assert [kill for kill in kills if kill.wrong] == []


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return pod_job(tmp_path_factory.mktemp("pod"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return ranks_job(tmp_path_factory.mktemp("ranks"))


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_pod_killed_at_a_random_millisecond_ends_with_the_same_bits(seed: int, pod: Job, tmp_path: Path) -> None:
    check([kill_one(lambda folder, rng: kill_job(pod, folder, rng), tmp_path, seed, number) for number in range(20)])


@pytest.mark.full
@pytest.mark.parametrize("seed", [3, 4])
def test_ranks_killed_at_a_random_millisecond_end_with_the_same_bits(seed: int, ranks: Job, tmp_path: Path) -> None:
    check([kill_one(lambda folder, rng: kill_job(ranks, folder, rng), tmp_path, seed, number) for number in range(20)])


@pytest.mark.full
def test_server_killed_at_a_random_millisecond_serves_again(tmp_path: Path) -> None:
    model, text, seconds = server_model(tmp_path)
    check([kill_one(lambda folder, rng: kill_server(model, folder, text, seconds, rng), tmp_path, 5, number) for number in range(20)])
