"""The router: filters, scores and pickers, each alone and together."""

import random
from collections import Counter

import pytest
from routing_cases import Clock, backends, in_task, request

from tandem.config.gateway import BackendConfig, BreakerConfig, GatewayConfig
from tandem.config.load import build
from tandem.gateway.backend import Backend
from tandem.gateway.breaker import Outcome
from tandem.gateway.ejection import bound_ejections
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.routing import pickers, scores
from tandem.gateway.routing.filters import with_room
from tandem.gateway.routing.hashing import home_of
from tandem.gateway.routing.router import Router
from tandem.types import UserError


def router(made: list[Backend], **settings: object) -> Router:
    listed = [{"url": each.config.url, "weight": each.config.weight, "zone": each.config.zone} for each in made]
    return Router(build(GatewayConfig, {"backends": listed, **settings}))


def chosen(one: Router, made: list[Backend], asked: InferenceRequest | None = None) -> int:
    backend = one.choose(asked or request(), made)
    assert backend is not None
    return made.index(backend)


def test_the_backend_with_the_fewest_tokens_for_its_weight_is_taken_and_equal_ones_alternate() -> None:
    def run() -> None:
        made = backends(1, 1, 4)
        made[0].take(300)
        made[1].take(299)
        held = made[2].take(1195)
        one = router(made)
        assert chosen(one, made) == 2
        held.done(-2)
        assert chosen(one, made) == 1, "1197 / 4 is more than 299"
        idle = backends(1, 1, 1)
        order = []
        for _ in range(6):
            order.append(chosen(one, idle))
            idle[order[-1]].take(50).release()
        assert order == [0, 1, 2, 0, 1, 2], "requests one after the other do not all go to the first"
        assert one.choose(request(), []) is None

    in_task(run)


def test_power_of_two_never_takes_the_most_loaded_of_all() -> None:
    pool, asked = backends(1, 1, 1, 1), request()
    pick = pickers.power_of_two(random.Random(0))
    taken = Counter(pool.index(pick(asked, pool, [40, 30, 20, 10])) for _ in range(6000))
    # Of the 6 pairs, backend 3 wins 3, backend 2 wins 2, backend 1 wins 1.
    assert taken[0] == 0
    assert [taken[i] / 6000 for i in (1, 2, 3)] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=0.03)


def test_round_robin_follows_weights_and_one_that_returns_does_not_catch_up() -> None:
    pool = backends(1, 2, 1)
    one = router(pool, balance="round_robin")
    assert Counter(chosen(one, pool) for _ in range(40)) == {0: 10, 1: 20, 2: 10}
    for _ in range(100):
        chosen(one, pool[:2])
    assert Counter(chosen(one, pool) for _ in range(40))[2] <= 11


def test_a_full_backend_is_left_out_unless_all_are() -> None:
    def run() -> None:
        pool = backends(1, 1, max_requests=1)
        pool[0].take(1)
        assert with_room(request(), pool) == [pool[1]]
        pool[1].take(9)
        assert with_room(request(), pool) == pool

    in_task(run)


def test_keys_are_divided_by_weight_and_one_that_leaves_moves_no_other() -> None:
    pool = backends(1, 2, 1)
    homes = {key: pool.index(home_of(key, pool)) for key in map(str, range(4000))}
    shares = Counter(homes.values())
    assert [shares[i] / 4000 for i in range(3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.025)
    without = [pool[0], pool[2]]
    assert all(pool.index(home_of(key, without)) == home for key, home in homes.items() if home != 1), "only the keys of the one that left have moved"


def test_consistent_hashing_keeps_a_session_at_home_and_every_load_below_its_bound() -> None:
    def run() -> None:
        pool = backends(1, 1, 2, 1)
        one = router(pool, balance="consistent_hash", router={"hash_bound": 0.25})
        for session in ("a", "b", "c"):
            asked = request([1] * 90, 10, session_id=session)
            assert {chosen(one, pool, asked) for _ in range(5)} == {pool.index(home_of(asked.session, pool))}, "an idle home takes its session"
        draw = random.Random(3)
        running = []
        for _ in range(3000):
            # One session has half of all requests: more than any backend's share.
            session = "hot" if draw.random() < 0.5 else str(draw.randrange(50))
            asked = request([1] * 90, 10, session_id=session)
            total = sum(each.outstanding_tokens for each in pool) + 100
            backend = pool[chosen(one, pool, asked)]
            assert backend.outstanding_tokens < 1.25 * total * backend.config.weight / 5, "Mirrokni et al., with weights"
            running.append(backend.take(100))
            if len(running) > 40:
                running.pop(draw.randrange(40)).release()
        same = request([7] * 64)
        assert chosen(one, pool, same) == chosen(one, pool, request([7] * 64 + [1])), "without a session the beginning of the prompt is the key"

    in_task(run)


def test_a_session_stays_at_its_backend_until_that_has_more_to_do_than_its_prompt_is_worth() -> None:
    def run() -> None:
        pool = backends(1, 1, 1)
        one = router(pool, router={"session": 1.0})
        asked = request(list(range(500)), headers=[(b"x-session-id", b"talk")])
        home = chosen(one, pool, asked)
        assert asked.session and pool[home] is home_of(asked.session, pool)
        held = pool[home].take(499)
        assert chosen(one, pool, asked) == home
        held.release()
        pool[home].take(501)
        assert chosen(one, pool, asked) != home
        for field in ("session_id", "prompt_cache_key", "user"):
            assert request(**{field: "talk"}).session == asked.session
        assert request(tenant="a", user="1").session != request(tenant="b", user="1").session, "tenants share no session"
        assert request(user=7).session == request(user="").session == ""

    in_task(run)


def test_savings_are_never_more_than_the_prompt() -> None:
    """Prefix and session at once: a backend with more than the prompt's tokens to do is not preferred, whatever is weighed."""

    def run() -> None:
        pool = backends(1, 1)
        one = router(pool, router={"prefix": 1.0, "session": 1.0})
        asked = request(list(range(640)), user="u")
        home = chosen(one, pool, asked)
        assert one.sent(asked, pool[home]) == 0 and one.sent(asked, pool[home]) == 640
        pool[home].take(641)
        assert chosen(one, pool, asked) != home
        work = scores.work_before([scores.load], [(1.0, lambda request, backends: [10**6, 0])])
        assert work(asked, pool) == [pool[0].load, pool[1].load + 2 * 640], "the second has a request, which 640 tokens of work delay too"

    in_task(run)


def test_the_own_zone_is_taken_until_it_has_too_much_more_to_do() -> None:
    def run() -> None:
        near, far = backends(1, zone="a")[0], Backend.make(BackendConfig(url="http://b9:1", models=("m",), zone="b"), BreakerConfig())
        one = router([near, far], zone="a", router={"zone_tokens": 100})
        near.take(99)
        assert chosen(one, [far, near]) == 1
        near.take(2)
        assert chosen(one, [far, near]) == 0

    in_task(run)


def test_a_backend_that_comes_back_is_given_its_share_by_and_by() -> None:
    def run() -> None:
        pool, clock = backends(1, 1, slow_start_s=10.0), Clock()
        for each in pool:
            each.clock = clock
        pool[1].came_back()
        assert pool[1].capacity == 0.1
        clock.now += 5
        assert pool[1].capacity == pytest.approx(0.5)

        def share() -> float:
            one, running = router(pool), []
            taken = 0
            for _ in range(600):
                backend = pool[chosen(one, pool)]
                taken += backend is pool[1]
                running.append(backend.take(100))
                if len(running) > 60:
                    running.pop(0).release()
            for each in running:
                each.release()
            return taken / 600

        assert share() == pytest.approx(1 / 3, abs=0.05), "half a weight beside a whole one"
        clock.now += 5
        assert pool[1].capacity == 1 and share() == pytest.approx(1 / 2, abs=0.05)
        clock.now -= 9
        assert pool[1].capacity == 1, "it ends once"

    in_task(run)


def test_a_breaker_that_closes_again_begins_a_slow_start() -> None:
    def run() -> None:
        (one,) = backends(1, breaker=BreakerConfig(failures=1, successes=1, open_s=0.001, max_open_s=0.001), slow_start_s=100.0)

        def attempt(outcome: Outcome) -> None:
            made = one.take(1)
            made.release()
            made.report(outcome)

        attempt(Outcome.SUCCESS)
        assert one.capacity == 1
        attempt(Outcome.FAILURE)
        while not one.breaker.allows():
            pass
        attempt(Outcome.SUCCESS)
        assert one.breaker.state == "closed" and one.capacity < 0.2

    in_task(run)


@pytest.mark.parametrize("share, out", [(1.0, 4), (0.5, 2), (0.74, 2), (0.2, 0)])
def test_at_most_a_share_of_the_backends_is_out(share: float, out: int) -> None:
    def run() -> None:
        pool = backends(1, 1, 1, 1, breaker=BreakerConfig(failures=2, open_s=1000, max_open_s=1000))
        other = backends(1, models=("another",))[0]
        bound_ejections([*pool, other], share)
        for _ in range(5):
            for each in pool:
                if each.breaker.allows():
                    each.breaker.report(each.breaker.take(), Outcome.FAILURE)
        assert sum(each.breaker.state == "open" for each in pool) == out

    in_task(run)


@pytest.mark.parametrize("settings, says", [
    ({"balance": "prefix"}, "must be one of least_tokens, power_of_two, round_robin, consistent_hash"),
    ({"router": {"prefix": 2}}, "'router.prefix' is 2; it must be from 0 to 1"),
    ({"router": {"session": -1}}, "'router.session' is -1"),
    ({"router": {"hash_bound": 0}}, "'router.hash_bound' is 0"),
    ({"router": {"hash_bound": 0.5}}, "set balance: consistent_hash"),
    ({"router": {"slow_start_s": -1}}, "'router.slow_start_s' is -1"),
    ({"router": {"zone_tokens": 5}}, "set zone"),
    ({"router": {"zone_tokens": -5}}, "'router.zone_tokens' is -5"),
    ({"router": {"prefix": 1}, "balance": "round_robin"}, "round_robin weighs nothing"),
    ({"router": {"prefx": 1}}, "did you mean"),
    ({"breaker": {"max_share": 0}}, "'breaker.max_share' is 0"),
])  # fmt: skip
def test_routing_settings_that_cannot_work_are_one_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build(GatewayConfig, {"backends": [{"url": "http://a:1"}], **settings})
    assert says in str(caught.value) and "\n" not in str(caught.value)
