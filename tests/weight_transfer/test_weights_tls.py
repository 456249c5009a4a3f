"""Weights between pods under TLS: the same bytes, whatever happens on the way, none of them readable there, and none for a machine that is no pod."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from certificates import certificate
from tcp_proxy import Alter, TcpProxy
from torch import Tensor
from two_pods import TwoPods
from whole_tensors import converted

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.pod_tls import PodTls, tls_files
from tandem.types import RunError, WeightVersion
from tandem.weight_transfer.update import WeightReader

NUMBERS = 400_000


def weights(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [("embed", torch.randn(NUMBERS // 400, 400, generator=generator)), ("small", torch.arange(7.0)), ("scalar", torch.tensor(3.5))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    authority, other = certificate(made, "authority"), certificate(made, "other")
    for name, signer in (("first", authority), ("second", authority), ("stranger", other)):
        certificate(made, name, signer)
    return made


def tls(folder: Path, name: str, authority: str = "authority") -> PodTls:
    return PodTls(tls_files(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(folder / f"{authority}.crt")))


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Iterator[Callable[..., TwoPods]]:
    """Makes two pods; ``alter``: the faults of a proxy between them."""
    torch.set_num_threads(1)
    made: list[TwoPods | TcpProxy] = []

    def make(alter: Callable[[], Alter] | None = None, **settings: object) -> TwoPods:
        pods = TwoPods(tmp_path, **{"tls": (tls(folder, "first"), tls(folder, "second")), **settings})  # type: ignore[arg-type]
        made.append(pods)
        if alter is not None:
            proxy = TcpProxy(pods.service.endpoint.offers[0].port, alter)
            made.append(proxy)
            pods.port = lambda port: proxy.port
        return pods

    yield make
    for each in made:
        each.close()


def assert_received(pods: TwoPods, expected: list[tuple[str, Tensor]]) -> None:
    reader = WeightReader(pods.own)
    found = [(name, tensor.clone()) for name, tensor in reader.read().tensors]
    reader.close()
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(found, expected, strict=True))


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["tls", "plain"])
def test_every_version_arrives_bit_for_bit_and_is_readable_on_the_wire_without_tls_alone(is_encrypted: bool, make: Callable[..., TwoPods]) -> None:
    seen = bytearray()

    def record() -> Alter:
        def alter(sent: int, block: bytearray) -> bool:
            seen.extend(block)
            return True

        return alter

    pods = make(record, **({} if is_encrypted else {"tls": (None, None)}))
    for step in range(3):
        pods.publish(weights(step), WeightVersion(1, step))
        assert pods.bring(WeightVersion(1, step)).fetched[:2] == ((), 0)
        assert_received(pods, weights(step))
    assert len(seen) > 3 * 4 * NUMBERS
    some = weights(2)[0][1].numpy().tobytes()[4000:4064]
    assert (some in seen) != is_encrypted and (b"size_bytes" in seen) != is_encrypted


def test_parts_that_are_read_while_they_are_registered_are_encrypted_as_well(make: Callable[..., TwoPods]) -> None:
    seen = bytearray()

    def record() -> Alter:
        def alter(sent: int, block: bytearray) -> bool:
            seen.extend(block)
            return True

        return alter

    pods, sent = make(record), weights(1)
    pods.mirror.begin_early(WeightVersion(1, 1), ("tcp",), Deadline(60.0))
    pods.writer.publish(converted(sent), WeightVersion(1, 1), announces=True)
    ends = time.monotonic() + 30
    while not any(piece.is_verified for piece in list(pods.mirror._early._pieces)) and time.monotonic() < ends:  # type: ignore[union-attr]
        time.sleep(0.005)
    assert pods.bring().early_bytes > 0
    assert_received(pods, sent)
    assert sent[0][1].numpy().tobytes()[4000:4064] not in seen and b"ready" not in seen


def test_elementwise_deltas_are_encrypted_as_well(make: Callable[..., TwoPods]) -> None:
    pytest.importorskip("numpy")
    pods = make(full_update_every=20)
    first = weights(1)
    pods.publish(first, WeightVersion(1, 1))
    pods.bring()
    changed = [(name, tensor.clone()) for name, tensor in first]
    changed[0][1][::37, 5] += 1
    pods.publish(changed, WeightVersion(1, 2))
    arrived = pods.bring()
    assert arrived.delta_bytes > 0 and arrived.whole == ()
    assert_received(pods, changed)


def test_connections_that_are_cut_or_altered_are_made_again_and_no_wrong_byte_is_taken(make: Callable[..., TwoPods]) -> None:
    draw, faults = random.Random(3), [0]

    def damage() -> Alter:
        # Behind the handshake, which a proxy may break too.
        at, is_cut = draw.randrange(6_000, 900_000), faults[0] % 2 == 0
        faults[0] += 1

        def alter(sent: int, block: bytearray) -> bool:
            if faults[0] > 6 or not sent <= at < sent + len(block):
                return True
            if not is_cut:
                block[at - sent] ^= 4
            return not is_cut

        return alter

    pods = make(damage)
    pods.publish(weights(1), WeightVersion(1, 1))
    fetched = pods.bring().fetched
    # A record that was altered ends its connection, so that no part arrives with another digest.
    assert fetched.rereads == () and fetched.breaks > 0
    assert_received(pods, weights(1))


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (("stranger", "other"), "its certificate is not that of a pod"),
        (None, "the connection to pod first at .* broke"),
    ],
)  # fmt: skip
def test_a_machine_that_is_no_pod_reads_nothing(second: tuple[str, str] | None, line: str, folder: Path, make: Callable[..., TwoPods]) -> None:
    pods = make(tls=(tls(folder, "first"), None if second is None else tls(folder, *second)), patience_s=1.0)
    pods.publish(weights(1), WeightVersion(1, 1))
    with pytest.raises(Exception, match=line) as raised:
        pods.bring()
    assert isinstance(raised.value, RunError) or "pod first" in str(raised.value)


def test_a_pod_that_has_another_authority_is_refused_by_the_one_that_serves(folder: Path, make: Callable[..., TwoPods]) -> None:
    # It takes the other's certificate, and has one of its own that the other does not take.
    pods = make(tls=(tls(folder, "first"), tls(folder, "stranger", "authority")), patience_s=1.0)
    pods.publish(weights(1), WeightVersion(1, 1))
    with pytest.raises(Exception, match=r"does not accept this machine's certificate|broke"):
        pods.bring()


def test_a_pod_that_serves_without_tls_is_named(folder: Path, make: Callable[..., TwoPods]) -> None:
    pods = make(tls=(None, tls(folder, "second")), patience_s=1.0, silent_s=2.0)
    pods.publish(weights(1), WeightVersion(1, 1))
    with pytest.raises(RunError, match=r"does not speak TLS|closed the connection"):
        pods.bring()
