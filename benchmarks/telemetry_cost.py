"""What telemetry costs: a step and a request with metrics, traces at their default rate and log files, beside the same without.

    python benchmarks/telemetry_cost.py [--steps 120] [--requests 600] [--scrape-seconds 15]

Steps: one run of each of two jobs, in which blocks of ``BLOCK`` steps with all of it and without take turns, as in ``metrics_cost.py``; with it,
``/metrics`` is scraped at its default rate and every step is a trace that a collector in another process receives. Beside the time of each step there is the
processor time of all processes of the run in each block, which other work on the machine hardly changes. What the process of ``metrics.sqlite`` takes for a
scrape is counted by itself, as it scrapes each 15 s and not by blocks.

Entropies: a run of reinforcement learning in one process (``--inline``), in which blocks of steps that keep the entropy of each token, for the page of the run,
and blocks that do not take turns: recorded in the update, gathered, packed, and written to ``entropies.sqlite``. In a pod there is a socket between the last
two; the bytes of a step are beside it.

Requests: two systems of a gateway and a server of a tiny model, one with all of it, one without, which are asked in turns; and the processor time of two
gateways before a backend that computes nothing, where a request has least to hide behind.
"""

import contextlib
import http.client
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from machine import ROOT, machine, write_report
from metrics_cost import BLOCK, NO_PAUSE, UNCOUNTED, USUAL_S, Turns, interval
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from options import parser as shared_parser

from tandem.config.recipe import load_config
from tandem.jobs.data_run import data_run
from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.jobs.rl_run import rl_run
from tandem.jobs.start import train
from tandem.metrics_database.scrape import Target, samples_of
from tandem.metrics_database.store import MetricsWriter, Retention
from tandem.pod import policy_step, trainer_worker
from tandem.runtime.machine.usage import processes_below
from tandem.runtime.records.entropies import FILE, EntropyFile
from tandem.runtime.traces.context import new_trace
from tandem.runtime.traces.otlp import readable
from tandem.runtime.traces.spans import MOST_SPANS, SPANS, begin_first, span
from tandem.runtime.traces.steps import STEP
from tandem.trainer.step import Loss

GATEWAY_BLOCK = 400
COLLECTOR = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "tests" / "observability")!r})
from otlp_receiver import HttpReceiver
with HttpReceiver() as receiver:
    print(receiver.port, flush=True)
    while True:
        time.sleep(1)
        receiver.spans.clear()
"""


class NoEntropies:
    """In the place of ``EntropyRecord``: keeps nothing."""

    def of(self, loss: Loss) -> Loss:
        return loss

    def take(self, *_: Any) -> dict[str, bytes]:
        return {}


class TracedTurns(Turns):
    """Also records steps as traces in the blocks in which the run is scraped."""

    def __init__(self, flag: Path, scrape_s: float, collector: int) -> None:
        super().__init__(flag, scrape_s)
        self._collector = collector
        self.processor_s: dict[bool, list[float]] = {False: [], True: []}
        self._before = 0.0

    def is_on(self) -> bool:
        return self.flag.exists()

    def row(self, row: Mapping[str, float | int | str]) -> None:
        step, was_on = int(row["step"]), self.is_on()
        if (step + 1) % BLOCK == 0:
            now = self._used()
            if step + 1 > UNCOUNTED:
                self.processor_s[was_on].append((now - self._before) / BLOCK)
            self._before = now
        super().row(row)

    def _used(self) -> float:
        """Returns the processor seconds of the run's processes; the scraper and the collector stand for Prometheus and Jaeger and are none of them."""
        others = {self._collector, self._scraper.pid if self._scraper is not None else -1}
        return sum(each.cpu_s for each in processes_below(os.getpid()) if each.pid not in others)

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Inside, steps in blocks without telemetry have no trace."""
        kept = [(module, module.step_span) for module in (rl_run, data_run)]
        for module, step_span in kept:
            module.step_span = self._switched(step_span)
        try:
            yield
        finally:
            for module, step_span in kept:
                module.step_span = step_span

    def _switched(self, step_span: Callable[..., Any]) -> Callable[..., Any]:
        return lambda config, *arguments, **options: step_span(config if self.is_on() else None, *arguments, **options)


class EntropyTurns(TracedTurns):
    """Keeps the entropies of tokens in the blocks in which ``flag`` exists. Nothing is scraped. ``parts_s``: the processor seconds of what is done for them, in
    each step that has them: they are gathered and packed, encoded, and written."""

    def __init__(self, flag: Path) -> None:
        super().__init__(flag, USUAL_S, -1)
        self.parts_s: list[float] = []
        self._parts = 0.0

    def row(self, row: Mapping[str, float | int | str]) -> None:
        if self._parts:
            self.parts_s.append(self._parts)
            self._parts = 0.0
        super().row(row)

    def message(self, text: str) -> None:
        pass

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Inside, steps in the other blocks keep none."""
        kept = policy_step.EntropyRecord
        parts = [(kept, "take"), (trainer_worker, "encode_entropies"), (EntropyFile, "write")]
        before = [getattr(owner, name) for owner, name in parts]
        policy_step.EntropyRecord = lambda: kept() if self.is_on() else NoEntropies()
        for (owner, name), do in zip(parts, before, strict=True):
            setattr(owner, name, self._timed(do))
        try:
            yield
        finally:
            policy_step.EntropyRecord = kept
            for (owner, name), do in zip(parts, before, strict=True):
                setattr(owner, name, do)

    def _timed(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return do(*arguments)
            finally:
                # The controller calls its file with nothing too, in the other blocks.
                self._parts += (time.thread_time() - began) * self.is_on()

        return timed


@contextlib.contextmanager
def started(command: list[str], ready: str, **options: Any) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Runs a command; yields its process and the line that ends with what ``ready`` is followed by."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as process:
        stream = process.stdout if not ready else process.stderr
        assert stream is not None
        try:
            for line in stream:
                if ready in line:
                    yield process, line.partition(ready)[2].split()[0] if ready else line.strip()
                    return
            raise SystemExit(f"{command} ended before it said {ready!r}")
        finally:
            process.kill()


def steps(name: str, recipe: str, settings: list[str], work: Path, endpoint: str, scrape_s: float, collector: int) -> str:
    turns = TracedTurns(work / f"{recipe}.flag", scrape_s, collector)
    on = ["metrics.targets_folder=", "metrics.database=false", f"traces.endpoint={endpoint}"]
    config = load_config(ROOT / "recipes" / f"{recipe}.yaml", [*settings, f"run.directory={work}", f"run.name={recipe}", *on])
    with turns.switching():
        train(config, callbacks=[turns], progress=False)
    turns.end()
    return rows(name, turns)


def entropy_steps(settings: list[str], work: Path) -> tuple[str, str]:
    """Returns the rows, and a line with the bytes of a step."""
    turns, name = EntropyTurns(work / "entropies.flag"), "entropies"
    config = load_config(ROOT / "recipes" / "sort.yaml", [*settings, f"run.directory={work}", f"run.name={name}"])
    with turns.switching():
        train(config, callbacks=[turns], progress=False, inline=True)
    with contextlib.closing(sqlite3.connect(work / name / FILE)) as connection:
        sizes = [size for (size,) in connection.execute("SELECT length(sequences) FROM entropies")]
    # As many steps as had the flag, so that the other side really kept none.
    assert abs(len(sizes) - len(turns.seconds[True])) <= BLOCK, (len(sizes), len(turns.seconds[True]))
    size_kib, parts_ms = statistics.median(sizes) / 1024, 1000 * statistics.median(turns.parts_s)
    said = (
        f"The entropies of the tokens of a step, {size_kib:.1f} KiB: {parts_ms:.2f} ms of the processor to be gathered, packed, encoded and written to "
        f"`{FILE}` (median of {len(turns.parts_s)} steps)."
    )
    return rows("a step of reinforcement learning in one process, with the entropies of its tokens", turns), said


def rows(name: str, turns: TracedTurns) -> str:
    wall = row(name, turns.seconds[False], turns.seconds[True], 1000, "ms")
    return wall + "\n" + row(f"processor time of {name}, all processes", turns.processor_s[False], turns.processor_s[True], 1000, "ms")


def database_ms(work: Path) -> float:
    """Returns the milliseconds of the processor that one scrape of a run takes to be read and written to a ``metrics.sqlite``."""
    metrics = RunMetrics("r", "grpo", True)
    metrics.row({f"key/{number}": 0.1 * number for number in range(80)})
    text, labels, count = metrics.text().decode(), Target.of("h:1", {"job": "grpo", "run": "r"}).labels, 50
    writer = MetricsWriter(work / "metrics.sqlite", Retention())
    began = time.process_time()
    for number in range(count):
        writer.append((series, 1000 * number, value) for series, value in samples_of(text, labels).items())
    used = time.process_time() - began
    writer.close()
    return 1000 * used / count


def span_us() -> tuple[float, float, float]:
    """Returns the microseconds of the processor that a span takes to be recorded, to cross a frame between two processes, and to be encoded and handed to the
    protocol."""
    SPANS.take(MOST_SPANS)
    count, costs = 2000, []
    for number in range(3):
        began = time.process_time()
        if number == 0:
            with begin_first("first", new_trace(1.0)):
                for step in range(count):
                    with span("train", {STEP: step, "tandem.sidecar": "trainer"}):
                        pass
        elif number == 1:
            for each in json.loads(json.dumps(SPANS.take_json(count))):
                SPANS.add(each)
            spans = SPANS.take(count)
        else:
            encode_spans([readable(each) for each in spans]).SerializeToString()
        costs.append(1e6 * (time.process_time() - began) / count)
    return costs[0], costs[1], costs[2]


def row(name: str, off: list[float], on: list[float], scale: float, unit: str) -> str:
    low, high = interval(off, on)
    print(json.dumps({"job": name, "off": off, "on": on}), flush=True)
    ratio = statistics.median(on) / statistics.median(off)
    return (
        f"| {name} | {len(off)} | {scale * statistics.median(off):.2f} {unit} | {scale * statistics.median(on):.2f} {unit} | {ratio:.4f} "
        f"({low:.4f} to {high:.4f}) |"
    )


class Client:
    """A connection that is kept open."""

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._body = json.dumps(body)

    def ask(self, path: str) -> float:
        """Returns the seconds of a request."""
        began = time.perf_counter()
        self._connection.request("POST", path, self._body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        return time.perf_counter() - began


def gateway(backend: str, folder: Path, **settings: Any) -> "contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]":
    folder.mkdir(exist_ok=True)
    (folder / "gateway.yaml").write_text(json.dumps({"backends": [backend], "port": 0, "log_requests": False, **settings}))
    command = [sys.executable, "-m", "tandem", "gateway", str(folder / "gateway.yaml")]
    return started(command, "gateway at ")


def wait_ready(url: str) -> None:
    parts = urlsplit(url)
    while True:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
            connection.request("GET", "/readiness")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)


def requests(model: Path, count: int, work: Path, endpoint: str) -> str:
    """Asks two systems in turns."""
    seconds: list[list[float]] = [[], []]
    logs = {"log_folder": str(work / "log")}
    flags = (["--log-folder", str(work / "log"), "--otlp-traces-endpoint", endpoint], [])
    with contextlib.ExitStack() as stack:
        clients = []
        for number, own in enumerate(flags):
            command = [sys.executable, "-m", "tandem", "serve", str(model), "--port", "0", "--threads", "1", "--served-model-name", "m", *own]
            _, served = stack.enter_context(started([*command, "--disable-uvicorn-access-log"], " at "))
            settings = {**logs, "traces": {"endpoint": endpoint}} if own else {}
            _, url = stack.enter_context(gateway(served, work / f"gateway-{number}", **settings))
            wait_ready(url)
            clients.append(Client(url, {"model": "m", "prompt": [1, 2, 3, 4], "max_tokens": 16, "ignore_eos": True, "temperature": 0}))
        for number in range(count + 20):
            for side in (0, 1) if number % 2 else (1, 0):
                took = clients[side].ask("/v1/completions")
                if number >= 20:
                    seconds[side].append(took)
    return row("a request of 16 tokens, gateway and server", seconds[1], seconds[0], 1000, "ms")


def processor_s(process: "subprocess.Popen[str]") -> float:
    """Returns the processor time of all threads of ``process``."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def gateways(rounds: int, work: Path, endpoint: str) -> str:
    """Returns the row of the processor time of a request in the gateway alone."""
    seconds: list[list[float]] = [[], []]
    stub = [sys.executable, str(ROOT / "benchmarks" / "gateway_stub.py"), "0"]
    settings: tuple[dict[str, Any], ...] = ({"log_folder": str(work / "log"), "traces": {"endpoint": endpoint}}, {})
    with started(stub, "") as (_, port), contextlib.ExitStack() as stack:
        running = [stack.enter_context(gateway(f"http://127.0.0.1:{port}", work / f"stub-{number}", **own)) for number, own in enumerate(settings)]
        clients = []
        for _, url in running:
            wait_ready(url)
            clients.append(Client(url, {"model": "m", "messages": [{"role": "user", "content": "x"}]}))
        for number in range(rounds + 1):
            for side in (0, 1) if number % 2 else (1, 0):
                before = processor_s(running[side][0])
                for _ in range(GATEWAY_BLOCK):
                    clients[side].ask("/v1/chat/completions")
                if number:
                    seconds[side].append((processor_s(running[side][0]) - before) / GATEWAY_BLOCK)
    return row("processor time of the gateway alone, a request", seconds[1], seconds[0], 1e6, "us")


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=120, help="steps of reinforcement learning; fine-tuning takes three times as many")
    parser.add_argument("--requests", type=int, default=600, help="requests to each of the two systems")
    parser.add_argument("--scrape-seconds", type=float, default=USUAL_S, help="seconds between scrapes of a run")
    options = parser.parse_args()
    scrape_s = options.scrape_seconds
    lines = [
        "# What telemetry costs", "", machine(), "",
        f"`python benchmarks/telemetry_cost.py --steps {options.steps} --requests {options.requests} --scrape-seconds {scrape_s:g}`: with metrics "
        f"(scraped each {scrape_s:g} s in the runs), traces at their default rates (all steps, 1 % of requests "
        "and of a step's many parts) and log files, beside none of it, in turns: "
        f"blocks of {BLOCK} steps after the first "
        f"{UNCOUNTED}, single requests, and blocks of {GATEWAY_BLOCK} requests. "
        "The rows that name entropies of tokens have these on one side, and no other difference.", "",
        "| what | a side | median without | with it | ratio (95 % interval) |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, started([sys.executable, "-c", COLLECTOR], "") as (collector, port):
        work, endpoint = Path(folder), f"http://127.0.0.1:{port}"
        # Two threads that wait for each other on a machine with other work vary by more than what is measured.
        tuning = ["checkpoint.every_steps=100000", "machine.threads=1"]
        given, tuned = (work, endpoint, scrape_s, collector.pid), [*tuning, f"run.max_steps={3 * options.steps}"]
        lines.append(steps("a step of fine-tuning in one process", "sft_sort", tuned, *given))
        model = ["model.create=null", f"model.path={work / 'sft_sort' / 'model'}", "sft=null", "rollout.prompts_per_step=8"]
        rl = [*NO_PAUSE, *tuning, *model, f"run.max_steps={options.steps}"]
        lines.append(steps("a step of reinforcement learning in a pod", "sort", rl, *given))
        table, entropies = entropy_steps([*rl, "metrics=null"], work)
        lines.append(table)
        span_us()  # Without what is imported and made once.
        recorded, crossed, encoded = span_us()
        written = database_ms(work)
        lines.append(requests(work / "sft_sort" / "model", options.requests, work, endpoint))
        lines.append(gateways(max(4, options.requests // 30), work, endpoint))
    said = f"{recorded:.1f} us to be recorded, {crossed:.1f} us to cross a frame, {encoded:.1f} us to be encoded for the collector"
    lines += ["", f"Processor time of a span: {said}. A scrape of a run, each 15 s, into its metrics.sqlite: {written:.1f} ms."]
    lines += ["", entropies]
    print(write_report("telemetry-cost", "\n".join(lines), options.out))


if __name__ == "__main__":
    main()
