"""Which weights are the current ones: one key in the store, moved forward by compare-and-swap."""

from tandem.runtime.coordination.store import Conflict, Store
from tandem.types.errors import DamagedWeights, RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.manifest import from_json, to_json

KEY = "weights/current"


Replaceable = tuple[WeightManifest | None, int]
"""What a publication replaces: a manifest, ``None`` where it is damaged, and its revision."""


def current(store: Store) -> tuple[WeightManifest, int] | None:
    """The published manifest and its revision, or ``None`` before the first. Raises ``DamagedWeights`` where the manifest is damaged."""
    entry = store.get(KEY)
    if entry is None:
        return None
    try:
        return from_json(entry.value), entry.revision
    except ValueError as error:
        raise DamagedWeights(f"the published weights cannot be used: {error}; register them again") from None


def replaceable(store: Store, known: Replaceable | None = None) -> Replaceable | None:
    """``current`` for a writer, which may replace a damaged manifest; ``known``: one of earlier, which is not read again where it is
    still the published one."""
    entry = store.get(KEY)
    if entry is None:
        return None
    if known is not None and known[1] == entry.revision:
        return known
    try:
        return from_json(entry.value), entry.revision
    except ValueError:
        return None, entry.revision


def check_newer(version: WeightVersion, digest: str | None, published: WeightManifest | None) -> None:
    """Raises ``RunError`` unless ``version`` may follow what is published: a larger (incarnation, step). The same
    version may be published again with the same ``digest`` (``None``: not known yet), from a trainer that was asked
    twice."""
    if published is None or version > published.version:
        return
    if version == published.version and digest in (None, published.digest):
        return
    if version.incarnation < published.version.incarnation:
        raise RunError(
            f"weights {describe(version)} are of a trainer that has been replaced: those {describe(published.version)} are published"
        )
    raise RunError(f"weights {describe(version)} are not newer than the published ones {describe(published.version)}")


def publish(store: Store, manifest: WeightManifest, found: Replaceable | None = None) -> int:
    """Make ``manifest`` the current one; returns the revision. Raises ``RunError`` where a newer one is published, or is published
    meanwhile: a stale incarnation loses every race. ``found``: what ``replaceable`` returned a moment ago."""
    value = to_json(manifest)
    found = found or replaceable(store)
    while True:
        check_newer(manifest.version, manifest.digest, found[0] if found else None)
        try:
            return store.compare_and_swap(KEY, found[1] if found else None, value)
        except Conflict:
            found = replaceable(store)


def describe(version: WeightVersion) -> str:
    return f"of step {version.step} (incarnation {version.incarnation})"
