"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) of what a run has written."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from starlette.concurrency import run_in_threadpool

from tandem.dashboard.open_run import OpenRun, stamp_of
from tandem.dashboard.runs import Runs
from tandem.runtime.records.run_lock import lock_holder

EVERY_S = 1.0
"""How often the files are asked for their size and date, which is all that a page costs a run that writes nothing."""
LIST_EVERY_S = 3.0
_ALIVE_S = 15.0
"""A comment after so many quiet seconds keeps connections open and finds those that are gone."""


def _event(kind: str, data: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


async def run_events(runs: Sequence[OpenRun]) -> AsyncIterator[bytes]:
    """Yields an event whenever one of ``runs`` has written something, or has started or ended."""
    directories = [run.directory for run in runs]
    before = await run_in_threadpool(lambda: [stamp_of(each) for each in directories])
    yield _event("open", {})
    quiet_s = 0.0
    while True:
        await asyncio.sleep(EVERY_S)
        now = await run_in_threadpool(lambda: [stamp_of(each) for each in directories])
        quiet_s += EVERY_S
        if now != before:
            changed = [run.name for run, old, new in zip(runs, before, now, strict=True) if old != new]
            before, quiet_s = now, 0.0
            yield _event("change", {"runs": changed, "live": [run.name for run in runs if lock_holder(run.directory) is not None]})
        elif quiet_s >= _ALIVE_S:
            quiet_s = 0.0
            yield b": nothing new\n\n"


async def list_events(runs: Runs) -> AsyncIterator[bytes]:
    """Yields an event whenever a run in the folder has written something, was added or removed."""
    before = await run_in_threadpool(runs.stamps)
    yield _event("open", {})
    quiet_s = 0.0
    while True:
        await asyncio.sleep(LIST_EVERY_S)
        now = await run_in_threadpool(runs.stamps)
        quiet_s += LIST_EVERY_S
        if now != before:
            before, quiet_s = now, 0.0
            yield _event("change", {})
        elif quiet_s >= _ALIVE_S:
            quiet_s = 0.0
            yield b": nothing new\n\n"
