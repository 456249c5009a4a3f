"""Breaks what stands around a gateway, for real, and says what became of every request.

Each row starts `tandem gateway` and its backends as processes (stub backends that fail on command, a real Redis, real engines behind `tandem serve` in the
last row), breaks something while clients ask, and waits until all is at rest. A request is answered (whole, and with its own answer), refused (an error of
OpenAI's form), cut (visibly not whole: an event with an error, or a closed connection), or its client left. Lost: no answer, or one that looks whole and is
not. Answered twice: more than one answer, or another request's. Leaked: tasks, sockets, reservations, load or engine blocks that were not given back. These
are the rows of `tests/gateway/fault_rows.py`, here with more requests.

The last table: two tenants before one backend that takes 16 requests at once, 250 ms each. One asks one request after the other, first alone, then beside
another tenant that has 64 requests there at any time. Nothing is preempted, so what the calm one waits for is the next of 16 that ends.

    python benchmarks/gateway_faults.py [--requests 200] [--streams 2048] [--out benchmarks/results]

Ends with exit code 1 where something was lost, answered twice or leaked.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser

for room in (".", "gateway", "serving"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from fault_clients import Request, Tally, ask  # noqa: E402 - found by the lines above
from fault_rows import ROWS, Row, streams_with_disconnects, why_not  # noqa: E402
from gateway_process import fault_backend, gateway  # noqa: E402

from tandem.gateway.keys import new_key, write_keys  # noqa: E402

ASKED = 40
"""Requests of the calm tenant."""
WORK_S = 0.25
FLOOD, SLOTS = 64, 16


def line(row: Row, tally: Tally, seconds: float) -> str:
    return (
        f"| {row.name} | {tally.sent:,} | {tally.answered:,} | {tally.refused:,} | {tally.cut:,} | {tally.left:,} | {len(tally.lost)} | {len(tally.twice)} | "
        f"{len(tally.leaked)} | {seconds:.0f} | {tally.note} |"
    )


def flooded(folder: Path) -> list[str]:
    """Returns the lines on a tenant beside one that floods the gateway."""
    made = {name: new_key(name) for name in ("calm", "flood")}
    write_keys(folder / "tenants.json", {record.id: record for _, record in made.values()})
    header = {name: f"Authorization: Bearer {key}\r\n" for name, (key, _) in made.items()}
    with fault_backend("only") as backend:
        listed = [{"url": backend.url, "max_requests": SLOTS}]
        with gateway(folder, [], backends=listed, keys_file=str(folder / "tenants.json")) as running:
            backend.mode("ok", delay_s=WORK_S)

            async def latencies(who: str, stop: asyncio.Event | None = None) -> list[float]:
                seconds, tally = [], Tally()
                while not (stop.is_set() if stop is not None else len(seconds) >= ASKED):
                    began = time.perf_counter()
                    await ask(running.url, Request(f"{who}{len(seconds)}", headers=header[who]), tally)
                    seconds.append(time.perf_counter() - began)
                assert not tally.wrong and tally.answered == len(seconds), tally
                return seconds

            async def beside(others: list[str]) -> tuple[list[float], list[list[float]]]:
                stop = asyncio.Event()
                tasks = [asyncio.create_task(latencies(who, stop)) for who in others]
                await asyncio.sleep(1.0)
                calm = await latencies("calm")
                stop.set()
                return calm, await asyncio.gather(*tasks)

            alone, _ = asyncio.run(beside([]))
            calm, flood = asyncio.run(beside(["flood"] * FLOOD))
            theirs = [each for one in flood for each in one]
    ratio = statistics.median(calm) / statistics.median(alone)
    return [
        "| tenant | median ms | p99 ms |", "| --- | --- | --- |",
        *(f"| {name} | {1000 * statistics.median(each):.0f} | {1000 * statistics.quantiles(each, n=100)[98]:.0f} |"
          for name, each in (("alone", alone), ("beside the flood", calm), (f"the flood ({FLOOD} requests at once)", theirs))),
        "", f"Beside a flood the median is {ratio:.2f} of that alone (aim 1.3).",
    ]  # fmt: skip


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--requests", type=int, default=200, help="of each row, about")
    parser.add_argument("--streams", type=int, default=2048, help="at once in the row of streams")
    parser.add_argument("--only", default="", help="the rows whose names begin so")
    options = parser.parse_args()
    lines = ["# Faults around a gateway", "", machine(), "", (__doc__ or "").split("\n\n")[1], ""]
    lines += ["| fault | sent | answered | refused | cut | client left | lost | answered twice | leaked | s | |", "| " + "--- | " * 11]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        for row in ROWS:
            if not row.name.startswith(options.only):
                continue
            if reason := why_not(row):
                lines.append(f"| {row.name} | {reason} | | | | | | | | | |")
                continue
            count = options.streams if row.run is streams_with_disconnects else 50 if row.name.startswith("requests beyond") else options.requests
            count = min(count, 60) if row.name.startswith("engines") else count
            began = time.monotonic()
            tally = row.run(Path(work), count)
            lines.append(line(row, tally, time.monotonic() - began))
            wrong += [f"{row.name}: {each}" for each in tally.wrong]
            print(lines[-1], *tally.wrong[:5], sep="\n  ", flush=True)
        lines += ["", (__doc__ or "").split("\n\n")[2], "", *flooded(Path(work))]
    print("\n".join(lines[-6:]))
    print(f"wrote {write_report('gateway-faults', chr(10).join([*lines, '', *(f'- {each}' for each in wrong)]), options.out)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
