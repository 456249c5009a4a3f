"""The publication of the current weights: one key in the store, updated by compare-and-swap."""

from tandem.runtime.coordination.store import Conflict, Fenced, Guard, Store
from tandem.types.errors import DamagedWeights, RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.manifest_values import KeysGone, discard, from_value, is_in_keys, to_value

KEY = "weights/current"


Replaceable = tuple[WeightManifest | None, int]
"""The manifest that a publication replaces (``None`` if it is damaged) and its revision."""


def current(store: Store) -> tuple[WeightManifest, int] | None:
    """Returns the published manifest and its revision, or ``None`` before the first publication. Raises ``DamagedWeights`` if the manifest
    is damaged."""
    entry = store.get(KEY)
    while entry is not None:
        try:
            return from_value(store, entry.value), entry.revision
        except (ValueError, KeysGone) as error:
            again = store.get(KEY) if isinstance(error, KeysGone) else entry
            if again == entry:
                raise DamagedWeights(f"the published weights cannot be used: {error}; register them again") from None
            entry = again
    return None


def replaceable(store: Store, known: Replaceable | None = None) -> Replaceable | None:
    """Returns ``current`` for a writer, which may replace a damaged manifest. ``known``: an earlier result, which is not read again if it
    is still published."""
    entry = store.get(KEY)
    if entry is None:
        return None
    if known is not None and known[1] == entry.revision:
        return known
    try:
        return from_value(store, entry.value), entry.revision
    except (ValueError, KeysGone):
        # Replaced in the meantime, or damaged: a writer that takes the revision for the published one is told that it is not.
        return None, entry.revision


def check_newer(version: WeightVersion, digest: str | None, published: WeightManifest | None) -> None:
    """Raises ``RunError`` unless ``version`` may follow the published one: a larger (incarnation, step). The same version may be published
    again with the same ``digest`` (``None``: not known yet), by a trainer whose request was repeated."""
    if published is None or version > published.version:
        return
    if version == published.version and digest in (None, published.digest):
        return
    if version.incarnation < published.version.incarnation:
        raise RunError(
            f"weights {describe(version)} are from a trainer that has been replaced; the published weights are {describe(published.version)}"
        )
    raise RunError(f"weights {describe(version)} are not newer than the published ones {describe(published.version)}")


def publish(store: Store, manifest: WeightManifest, replaced: Replaceable | None = None, guard: Guard | None = None) -> int:
    """Publishes ``manifest`` and returns its revision. ``replaced``: a recent result of ``replaceable``. Raises ``RunError`` if a newer
    manifest is published, even concurrently: a stale incarnation loses every race; so does the trainer of a controller whose ``guard`` does not hold."""
    value = to_value(store, manifest)
    # Only a manifest in several keys has replaced one whose keys must be removed.
    before = store.get(KEY) if is_in_keys(value) else None
    replaced = replaced or replaceable(store)
    while True:
        try:
            check_newer(manifest.version, manifest.digest, replaced[0] if replaced else None)
            revision = store.compare_and_swap(KEY, replaced[1] if replaced else None, value, guard=guard)
        except Conflict:
            before, replaced = store.get(KEY) if is_in_keys(value) else None, replaceable(store)
            continue
        except (Fenced, RunError) as error:
            discard(store, value, None if before is None else before.value)
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"weights {describe(manifest.version)} were not published: their controller leads the run no more; end this run's processes, then resume it"
            ) from None
        if before is not None and replaced is not None and before.revision == replaced[1]:
            discard(store, before.value, value)
        return revision


def describe(version: WeightVersion) -> str:
    return f"of step {version.step} (incarnation {version.incarnation})"
