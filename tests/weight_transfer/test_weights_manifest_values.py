"""Manifests of any size are published in the embedded store and in a real etcd, whose requests have at most 1.5 MiB."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.coordination.store import Guard, Store
from tandem.types import DamagedWeights, PartEntry, RunError, TensorEntry, WeightManifest, WeightVersion
from tandem.weight_transfer.manifest import make_manifest, to_json
from tandem.weight_transfer.manifest_values import PREFIX
from tandem.weight_transfer.publication import KEY, current, publish, replaceable

PLAIN, COMPRESSED, IN_KEYS = 10, 3_000, 40_000
"""Numbers of tensors, of manifests in each form. The last is about that of DeepSeek-V3."""


def manifest(count: int, step: int) -> WeightManifest:
    def entry(i: int) -> TensorEntry:
        digest = hashlib.md5(f"{step} {i}".encode()).hexdigest()
        name = f"model.layers.{i // 800}.mlp.experts.{i % 800 // 3}.{('gate', 'up', 'down')[i % 3]}_proj.weight"
        return TensorEntry(name, "bfloat16", (2048, 7168), "pod-weights-0", i * 2048 * 7168 * 2, 2048 * 7168 * 2, (PartEntry(0, (0, 0), (2048, 7168), digest),))

    return make_manifest(WeightVersion(1, step), [entry(i) for i in range(count)])


@pytest.fixture(params=["embedded", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "pod").mkdir()
    is_etcd = request.param == "etcd"
    opened = open_store(store_address(request.getfixturevalue("etcd_server").config() if is_etcd else CoordinationConfig(), tmp_path))
    yield opened
    opened.close()


def keys(store: Store) -> list[str]:
    return [entry.key for entry in store.list(PREFIX)]


@pytest.mark.parametrize("count", [PLAIN, COMPRESSED, pytest.param(IN_KEYS, marks=pytest.mark.full, id="in several keys")])
def test_a_manifest_of_any_size_is_published_and_replaced(store: Store, count: int) -> None:
    for step in range(2):
        sent = manifest(count, step)
        revision = publish(store, sent)
        assert current(store) == (sent, revision) == replaceable(store)
        entry = store.get(KEY)
        assert entry is not None and max(len(entry.value), *[0, *(len(each.value) for each in store.list(PREFIX))]) < 1.5 * 2**20
    names = {key.removeprefix(PREFIX).partition("/")[0] for key in keys(store)}
    assert len(names) == (1 if count == IN_KEYS else 0), "those of the replaced manifest are removed"
    assert (len(to_json(sent)) > 1.5 * 2**20) == (count == IN_KEYS)


def test_what_is_refused_leaves_no_keys(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.weight_transfer.manifest_values.PLAIN_BYTES", 1000)
    monkeypatch.setattr("tandem.weight_transfer.manifest_values.VALUE_BYTES", 1000)
    publish(store, manifest(100, 5))
    before = keys(store)
    assert len(before) > 2
    with pytest.raises(RunError, match="not newer"):
        publish(store, manifest(100, 4))
    with pytest.raises(RunError, match="leads the run no more"):
        publish(store, manifest(100, 6), guard=Guard("leader", 3))
    assert keys(store) == before
    publish(store, manifest(100, 5))
    found = current(store)
    assert keys(store) == before and found is not None and found[0] == manifest(100, 5), "the same again keeps its keys"


def test_a_reader_that_is_overtaken_reads_the_newer_manifest_and_a_damaged_one_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.weight_transfer.manifest_values.PLAIN_BYTES", 1000)
    monkeypatch.setattr("tandem.weight_transfer.manifest_values.VALUE_BYTES", 1000)
    publish(store, manifest(100, 1))
    own, seen = store.get, list[str]()

    def overtaken(key: str) -> object:
        entry = own(key)
        seen.append(key)
        if len(seen) == 1:
            publish(store, manifest(100, 2))
        return entry

    monkeypatch.setattr(store, "get", overtaken)
    found = current(store)
    assert found is not None and found[0].version.step == 2
    monkeypatch.setattr(store, "get", own)
    first = keys(store)[0]
    entry = store.get(first)
    assert entry is not None
    store.put(first, bytes([entry.value[0] ^ 1]) + entry.value[1:])
    with pytest.raises(DamagedWeights, match="does not have its digest; register them again"):
        current(store)
    store.delete(first)
    with pytest.raises(DamagedWeights, match="is not there any more; register them again"):
        current(store)
    publish(store, manifest(100, 3))
    found = current(store)
    assert found is not None and found[0] == manifest(100, 3)


@pytest.mark.parametrize("value", [b"K", b"K[]", b'K["a", 0]', b'K["a", 99999999]', b"Z", b"Znothing", b"", b"Q"])
def test_values_that_are_no_manifest_are_damaged_weights(store: Store, value: bytes) -> None:
    store.put(KEY, value)
    with pytest.raises(DamagedWeights, match="the published weights cannot be used"):
        current(store)
    publish(store, manifest(PLAIN, 1))
    found = current(store)
    assert found is not None and found[0] == manifest(PLAIN, 1)
