"""Limits and keys without a network: reservations, windows, digests, files."""

import asyncio
import json
import random
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.cli import keys
from tandem.cli.main import main, parser
from tandem.config.gateway import BackendConfig, GatewayConfig, LimitConfig, TenantConfig
from tandem.gateway.auth import Auth
from tandem.gateway.keys import KeyFile, find_key, new_key, read_keys, write_keys
from tandem.gateway.rate_limit import EmbeddedLimits, Refusal, Share, limit_headers, refused, shares_of
from tandem.gateway.usage import Meter, read_usage
from tandem.serving.errors import ApiError
from tandem.types import UserError


class Clock:
    now = 1_000_000_000.0 - 40  # 1,000,000,000 s is 40 s into a minute.

    def __call__(self) -> float:
        return self.now


class Store:
    """A store of limits called without a loop."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.limits = EmbeddedLimits(self.clock)

    def reserve(self, id: str, shares: list[Share]) -> list[int] | Refusal:
        return asyncio.run(self.limits.reserve(id, shares))

    def refuse(self, id: str, shares: list[Share]) -> Refusal:
        over = self.reserve(id, shares)
        assert isinstance(over, Refusal)
        return over

    def settle(self, id: str, shares: list[Share], tokens: int, requests: int, input_tokens: int = 0) -> None:
        asyncio.run(self.limits.settle(id, shares, tokens, requests, input_tokens))


def test_what_is_reserved_counts_until_it_is_settled_and_then_what_was_used() -> None:
    store = Store()
    shares = shares_of("tenant t", LimitConfig(tokens_per_minute=100), 60)
    assert store.reserve("a", shares) == [40]
    assert store.refuse("b", shares).share.name == "tenant t:tokens_per_minute"
    store.settle("a", shares, 25, 1)
    assert store.reserve("b", shares) == [15]
    store.settle("b", shares, 0, 0)
    assert store.reserve("c", shares) == [15], "what nobody answered costs nothing"


def test_what_is_left_of_each_limit_is_that_of_adding_up_all_requests() -> None:
    """Random reservations, settlements and minutes, beside a list of what every request has."""
    draw, store, limits = random.Random(0), Store(), LimitConfig(requests_per_minute=60, input_tokens_per_minute=2000, tokens_per_day=60_000, concurrent=12)
    running: dict[str, tuple[list[Share], int, int]] = {}
    settled: list[tuple[float, int, int, int]] = []
    refusals = 0
    for number in range(2000):
        if draw.random() < 0.05:
            store.clock.now += 20
        now = store.clock.now
        if running and draw.random() < 0.45:
            id = draw.choice(list(running))
            shares, tokens, prompt = running.pop(id)
            used = draw.randrange(prompt, tokens + 1)
            store.settle(id, shares, used, 1, prompt)
            settled.append((now, 1, prompt, used))
            continue
        prompt = draw.randrange(1, 100)
        tokens = prompt + draw.randrange(100)
        shares = shares_of("tenant t", limits, tokens, prompt)
        amounts = {"requests_per_minute": (1, 60, 60, 1), "input_tokens_per_minute": (prompt, 2000, 60, 2), "tokens_per_day": (tokens, 60_000, 86_400, 3)}
        expected = {"concurrent": 12 - len(running) - 1}
        for name, (amount, limit, window_s, field) in amounts.items():
            of_window = sum(each[field] for each in settled if each[0] // window_s == now // window_s)
            expected[name] = limit - of_window - sum((1, each[2], each[1])[field - 1] for each in running.values()) - amount
        left = store.reserve(str(number), shares)
        if isinstance(left, Refusal):
            refusals += 1
            assert min(expected.values()) < 0
        else:
            assert {share.name.partition(":")[2]: rest for share, rest in zip(shares, left, strict=True)} == expected
            running[str(number)] = shares, tokens, prompt
    assert 100 < refusals < 1500 and len(settled) > 300


def test_prompts_and_answers_have_limits_of_their_own() -> None:
    store = Store()
    limits = LimitConfig(tokens_per_day=100, input_tokens_per_minute=40, output_tokens_per_day=50)
    first, second = shares_of("t", limits, 30 + 20, 30), shares_of("t", limits, 5 + 35, 5)
    assert store.reserve("a", first) == [50, 10, 30]
    over = store.refuse("b", second)
    assert over.share.name == "t:output_tokens_per_day" and over.retry_after_s is not None
    # The prompt was 8 tokens longer than estimated, and 3 were generated: 38 and 3 of 41.
    store.settle("a", first, 41, 1, 38)
    long = store.refuse("c", second)
    assert long.share.name == "t:input_tokens_per_minute" and "input tokens per minute: 40" in refused(long).message
    store.clock.now += 60
    assert store.reserve("b", second) == [100 - 41 - 40, 35, 50 - 3 - 35]
    never = store.refuse("d", shares_of("u", limits, 51, 0))
    assert never.retry_after_s is None and refused(never).kind == "tokens" and "51 output tokens, more than the limit" in refused(never).message


def test_a_refused_request_reserves_nothing_of_any_limit() -> None:
    store = Store()
    both = [*shares_of("key k", LimitConfig(requests_per_minute=5), 1), *shares_of("tenant t", LimitConfig(tokens_per_day=10), 20)]
    over = store.refuse("a", both)
    assert over.retry_after_s is None and store.reserve("b", both[:1]) == [4]
    error = refused(over)
    assert error.status == 429 and error.retry_after_s is None and "make it smaller" in error.message


def test_windows_end_with_the_minute_and_the_day_and_retry_after_says_when() -> None:
    store = Store()
    minute = shares_of("t", LimitConfig(requests_per_minute=1), 1)
    assert store.reserve("a", minute) == [0]
    store.settle("a", minute, 5, 1)
    store.clock.now += 10.5
    over = store.refuse("b", minute)
    assert over.retry_after_s == pytest.approx(49.5) and refused(over).retry_after_s == 50
    store.clock.now += 49
    store.refuse("b", minute)
    store.clock.now += 0.5
    assert store.reserve("b", minute) == [0]
    day = shares_of("t", LimitConfig(tokens_per_day=10), 10)
    assert store.reserve("c", day) == [0]
    store.settle("c", day, 10, 1)
    assert store.refuse("d", day).retry_after_s == pytest.approx(86_400 - store.clock.now % 86_400)


def test_requests_at_once_are_given_back() -> None:
    store = Store()
    shares = shares_of("t", LimitConfig(concurrent=2, tokens_per_day=1000), 400)
    assert store.reserve("a", shares) == [1, 600] and store.reserve("b", shares) == [0, 200]
    over = store.refuse("c", shares)
    assert over.share.name == "t:concurrent" and over.retry_after_s == 1
    store.settle("a", shares, 1, 1)
    assert store.reserve("c", shares) == [0, 199]


def test_the_headers_name_the_limit_of_which_the_smallest_part_is_left() -> None:
    shares = [*shares_of("key", LimitConfig(requests_per_minute=10, tokens_per_minute=1000), 50), *shares_of("tenant", LimitConfig(requests_per_day=4), 50)]
    left = Store().reserve("a", shares)
    assert left == [9, 950, 3]
    assert dict(limit_headers(shares, left, Clock.now)) == {
        b"x-ratelimit-limit-requests": b"4", b"x-ratelimit-remaining-requests": b"3", b"x-ratelimit-reset-requests": b"%.0fs" % (86_400 - Clock.now % 86_400),
        b"x-ratelimit-limit-tokens": b"1000", b"x-ratelimit-remaining-tokens": b"950", b"x-ratelimit-reset-tokens": b"60s",
    }  # fmt: skip
    assert limit_headers([], [], Clock.now) == []


def test_counters_of_callers_that_have_gone_are_forgotten() -> None:
    clock = Clock()
    store = EmbeddedLimits(clock)

    async def pass_by() -> None:
        for number in range(11_000):
            clock.now += 600
            shares = shares_of(f"t{number}", LimitConfig(requests_per_minute=1), 1)
            assert await store.reserve("a", shares) == [0]
            await store.settle("a", shares, 1, 1)

    asyncio.run(pass_by())
    assert len(store._counters) < 2000


def test_usage_is_what_the_backend_says_last_and_no_text_feigns_it() -> None:
    answer = json.dumps({"choices": [{"text": '"completion_tokens": 9999, "prompt_tokens": 9999'}], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
    assert read_usage(answer.encode()) == (7, 5)
    assert read_usage(json.dumps({"choices": [{"text": '"completion_tokens": 9'}]}).encode()) == (None, None)
    assert read_usage(b'{"usage": {"input_tokens": 3, "output_tokens": 4}}') == (3, 4)
    meter = Meter(100)
    assert meter.tokens == 0, "nobody has answered"
    assert meter.events(b'data: {"usage": null}\n\ndata: {}\n\n') == 2 and meter.tokens == 102
    assert meter.events(b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 9}}\n\ndata: [DONE]\n\n') == 7 and meter.tokens == 16


def test_keys_are_found_by_their_digest_alone() -> None:
    key, record = new_key("t")
    other, second = new_key("t")
    records = {record.id: record, second.id: second}
    assert find_key(records, key) is record and find_key(records, other) is second
    swapped = f"tk-{record.id}-{other.split('-', 2)[2]}"
    for wrong in ("", key[:-1], key + "x", swapped, key.upper(), "tk-", f"tk-{record.id}-", record.digest, "\udcff", key.replace("tk", "sk")):
        assert find_key(records, wrong) is None, wrong
    assert key.split("-", 2)[2] not in json.dumps(record.__dict__, default=str) and len(key.split("-", 2)[2]) >= 43


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["keys", *arguments, "--file", str(tmp_path / "keys.json")])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_keys_are_created_listed_rotated_and_revoked(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    status, key, _ = command("create", "--tenant", "research", "--models", "small,large", "--expires", "30d", "--tokens-per-day", "1000")
    key = key.strip()
    assert status == 0 and stat.S_IMODE(file.stat().st_mode) == 0o600 and key not in file.read_text()
    record = find_key(read_keys(file), key)
    assert record is not None and (record.tenant, record.models, record.limits.tokens_per_day) == ("research", ("small", "large"), 1000)
    assert record.expires - record.created == pytest.approx(30 * 86_400, abs=5)
    _, listing, _ = command("list")
    assert record.id in listing and "small, large, tokens per day 1000" in listing and key not in listing
    _, fresh, _ = command("rotate", record.id)
    rotated = find_key(read_keys(file), fresh.strip())
    assert find_key(read_keys(file), key) is None and rotated is not None and rotated.models == record.models and rotated.expires == record.expires
    # With a grace both open until it ends, but the old one no longer than it would have.
    _, again, _ = command("rotate", rotated.id, "--grace", "2h")
    newest, kept = (find_key(read_keys(file), each.strip()) for each in (again, fresh))
    assert newest is not None and kept is not None and newest.expires == rotated.expires and kept.models == newest.models
    assert kept.expires == pytest.approx(newest.created + 7200, abs=60)
    _, last, _ = command("rotate", kept.id, "--grace", "60d")
    assert read_keys(file)[kept.id].expires == kept.expires
    for each in (*read_keys(file),):
        assert command("revoke", each)[0] == 0
    assert read_keys(file) == {} and last.strip() not in (again.strip(), fresh.strip())
    assert [each.name for each in tmp_path.iterdir() if each.suffix != ".lock"] == ["keys.json"]


def test_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    given = [parser().parse_args(["keys", "create", "--tenant", f"t{number}", "--file", str(file)]) for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(keys.run, given)) == [0] * 12
    assert sorted(record.tenant for record in read_keys(file).values()) == sorted(f"t{number}" for number in range(12))


@pytest.mark.parametrize("arguments, says", [
    (("create", "--tenant", ""), "--tenant is ''"),
    (("create", "--tenant", "t", "--expires", "soon"), "--expires is 'soon'"),
    (("create", "--tenant", "t", "--expires=-3d"), "--expires is '-3d'"),
    (("create", "--tenant", "t", "--tokens-per-day", "0"), "'tokens_per_day' is 0"),
    (("create", "--tenant", "t", "--output-tokens-per-minute", "0"), "'output_tokens_per_minute' is 0"),
    (("list",), "does not exist"),
    (("revoke", "abc"), "does not exist"),
])  # fmt: skip
def test_what_is_wrong_with_a_key_is_one_line(command: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], says: str) -> None:
    status, _, said = command(*arguments)
    assert status == 2 and says in said and len(said.splitlines()) == 1, said


def test_a_key_file_that_changes_is_read_again_and_one_that_breaks_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, record = new_key("t")
    write_keys(file, {record.id: record})
    read = KeyFile(file)
    auth = Auth(GatewayConfig((BackendConfig("http://a:1"),), tenants={"t": TenantConfig(limits=LimitConfig(concurrent=3))}), read)
    header = [(b"authorization", f"Bearer {key}".encode())]
    caller = auth.caller(header, "")
    assert caller.tenant == "t" and [share.name for share in caller.shares(1, None)] == ["tenant t:concurrent"]
    file.write_text("{")
    read.refresh()
    assert read.problem is not None and auth.caller(header, "").tenant == "t"
    write_keys(file, {})
    read.refresh()
    for headers in (header, [], [(b"authorization", b"Basic x")], [(b"authorization", b"Bearer \xff")]):
        with pytest.raises(ApiError) as caught:
            auth.caller(headers, "")
        assert caught.value.status == 401


def test_an_expired_key_and_a_model_that_a_key_does_not_allow_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    expired, first = new_key("t", expires=1.0)
    narrow, second = new_key("t", models=("small",))
    write_keys(file, {record.id: record for record in (first, second)})
    auth = Auth(GatewayConfig((BackendConfig("http://a:1"),)), KeyFile(file))
    with pytest.raises(ApiError, match=f"the key {first.id} has expired"):
        auth.caller([(b"authorization", f"Bearer {expired}".encode())], "")
    caller = auth.caller([(b"Authorization".lower(), f"bearer {narrow}".encode())], "")
    caller.check_model("small")
    for model in ("large", None):
        with pytest.raises(ApiError) as caught:
            caller.check_model(model)
        assert caught.value.status == 403 and "it allows small" in caught.value.message


@pytest.mark.parametrize("content", ["[]", "{", '{"keys": [{"id": 1}]}', '{"kees": []}'])
def test_a_broken_key_file_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(content)
    with pytest.raises(UserError) as caught:
        read_keys(tmp_path / "keys.json")
    assert "\n" not in str(caught.value)
