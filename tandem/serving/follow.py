"""A server that follows a run: it takes each version of the weights that the run's trainer publishes, while it answers clients.

It reads the run's shared memory as a rollout engine does, and verifies every digest; it writes nothing of the run, so the run's numbers do not depend on it
and its end costs the run nothing. Weights are read and verified while requests are computed, where the memory has room for both; the pause is short.
Requests in flight during an update are handled by the pause modes of vLLM: ``wait`` finishes them on the weights that they began with, ``abort`` answers them
with the tokens that they have. New requests wait for the update. Imports no torch.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from tandem.runtime.coordination.open import open_store
from tandem.runtime.coordination.store import Store, WatchTimeout
from tandem.serving.engines.pool import Pool
from tandem.serving.engines.slot import Weights
from tandem.serving.errors import ApiError
from tandem.serving.settings import FollowedRun
from tandem.types import DamagedWeights, RunError, UserError, WeightSource, WeightVersion
from tandem.weight_transfer.publication import KEY, current

T = TypeVar("T")
WATCH_S = 2.0
"""How long one look at the store may wait for new weights."""
ATTEMPTS = 3
"""Readings of one version: it may be damaged, or replaced while it is read."""
PAUSE_S = 1.0


class Published:
    """The newest published version of a run. ``opening``: the inode of its store's file, 0 for etcd. Used by one thread at a time, which it may block for
    ``WATCH_S``."""

    def __init__(self, address: str) -> None:
        self._address, self._file = address, None if address.startswith("etcd:") else Path(address)
        self._store: Store | None = None
        self.opening = 0
        self._revision = 0

    def next(self) -> WeightVersion | None:
        """Returns the newest version if it was published since the last call, ``None`` otherwise. Raises ``UserError`` where the store cannot be used."""
        store = self._opened()
        if store is None:
            return None
        try:
            entry = store.watch(KEY, self._revision, WATCH_S)
        except WatchTimeout:
            if self._file is None and store.get(KEY) is None:
                # The run removed its keys: those of its next start have revisions after these.
                self._revision = 0
            return None
        self._revision = entry.revision
        with contextlib.suppress(DamagedWeights):  # The trainer registers them again.
            published = current(store)
            return None if published is None else published[0].version
        return None

    def _opened(self) -> Store | None:
        """Opens the store, also anew: a run that is started again makes another file. It is never made here."""
        if self._file is not None:
            inode = self._file.stat().st_ino if self._file.exists() else 0
            if inode != self.opening:
                self.close()
                self.opening, self._revision = inode, 0
            if inode == 0:
                return None
        if self._store is None:
            self._store = open_store(self._address)
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


async def follow(pool: Pool, run: FollowedRun, say: Callable[[str], None]) -> None:
    """Brings each newest version of ``run`` to the engines of ``pool``, until it is cancelled. What goes wrong is said once, and the weights before stay."""
    published, said = Published(run.store), ""
    try:
        while True:
            try:
                version = await asyncio.to_thread(published.next)
                if version is None:
                    await asyncio.sleep(PAUSE_S / 4)
                    continue
                how = await _take(pool, run, Weights(version, source=WeightSource(run.store, opening=published.opening)))
                say(f"serving the weights of step {version.step} (incarnation {version.incarnation}); {how}")
                said = ""
            except (UserError, ApiError) as error:
                if str(error) != said:
                    said = str(error)
                    say(f"the weights stay as they are: {said}")
                await asyncio.sleep(PAUSE_S)
    finally:
        published.close()


async def _take(pool: Pool, run: FollowedRun, weights: Weights) -> str:
    """Lets the engines stage ``weights`` while they answer clients, then pauses them, lets all of them take what they have staged, and resumes what was not
    paused before. Returns how, for the log."""
    if pool.is_sleeping:
        raise RunError("the engines are asleep; they take the next weights after /wake_up")
    is_staged = await _again_if_damaged(lambda: pool.stage(weights))
    was_paused = pool.is_paused
    try:
        if not was_paused:
            # Without an engine there is nothing to pause, and the next one begins with these weights.
            with contextlib.suppress(ApiError):
                await pool.pause(run.mode)
        began = time.monotonic()
        await _again_if_damaged(lambda: pool.update(weights))
        return f"{'staged before' if is_staged else 'not staged'}, taken in {(time.monotonic() - began) * 1e3:.1f} ms"
    finally:
        if not was_paused:
            # First, so that an engine that takes the place of one that hangs begins with its requests.
            pool.is_paused = False
            await pool.resume()


async def _again_if_damaged(do: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of ``do()``, which is tried up to ``ATTEMPTS`` times where the weights are damaged: the trainer may repair them."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await do()
        except DamagedWeights:
            await asyncio.sleep(PAUSE_S / 4)
    return await do()
