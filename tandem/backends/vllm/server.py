"""Owns the process of ``vllm serve``: started for a model, waited for, updated, and ended with this process.

The server listens on a Unix socket in a folder that only this user can enter, because its control calls ask for no credential.
"""

import contextlib
import logging
import os
import re
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.backends.environment import python_of, tandem_path
from tandem.backends.vllm.arguments import BACKEND, version_label
from tandem.backends.vllm.http_client import VllmClient
from tandem.config.load import to_mapping
from tandem.config.lora import LoraConfig
from tandem.runtime.process.processes import Threads, describe_exit, kill, spawn
from tandem.runtime.rpc.calls import PeerDied
from tandem.types.errors import DamagedWeights, EngineDied, RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import Updated

logger = logging.getLogger(__name__)

POLL_S = 0.2


@dataclass
class VllmServer:
    """``arguments``: of ``vllm serve`` after the model (see ``arguments.serve_arguments``). ``folder``: for its socket and temporary files, emptied at the
    start. ``log``: receives its output. ``store``: the address at which weights are published. ``threads``: that each rank computes with."""

    model: Path
    arguments: Sequence[str]
    folder: Path
    log: Path
    store: str
    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)
    returns_routing: bool = False
    lora: LoraConfig | None = None
    """Of an adapter, which is published without the weights that it is added to."""
    version: WeightVersion | None = None
    digests: list[dict[str, str]] = field(default_factory=list)
    """Of what each rank held after the last update, by name."""
    process: "subprocess.Popen[bytes] | None" = None
    client: VllmClient = field(init=False)
    _directory: int = -1

    def start(self) -> None:
        """Starts the server and waits until it answers. Raises ``RunError`` with the last error of its log if it ends first: a model or an option that vLLM
        does not take."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)
        # By its descriptor: the path of a socket has at most 107 bytes.
        self._directory = os.open(self.folder, os.O_RDONLY)
        self.client = VllmClient(Path(f"/proc/self/fd/{self._directory}/http"))
        written = self.log.stat().st_size if self.log.exists() else 0
        began = time.monotonic()
        self.process = spawn(
            None, ["-m", "vllm.entrypoints.cli.main", "serve", str(self.model), "--uds", "http", *self.arguments],
            program=str(python_of("vllm")), threads=Threads(self.threads), output=self.log, directory=self.folder,
            environment={**self._environment(), **self.environment},
        )  # fmt: skip
        while not self._answers():
            if (status := self.process.poll()) is not None:
                raise RunError(f"vLLM did not start ({describe_exit(status)}): {_last_error(self.log, written)}; the rest is in logs/{self.log.name}")
            time.sleep(POLL_S)
        # A call that waits for an engine that has died would wait for ever: vLLM's server ends only when its connections are closed.
        threading.Thread(target=_end_with, args=(self.process, _engines(self.process.pid)), name="vllm-engines", daemon=True).start()
        lora = None if self.lora is None else to_mapping(self.lora)
        self.client.post("/init_weight_transfer_engine", {"init_info": {"store": self.store, "threads": self.threads, "lora": lora}})
        self.client.ask_workers("tandem_report_raw_logprobs")
        if self.returns_routing:
            self.client.ask_workers("tandem_return_routed_experts")
        logger.info("vLLM answers after %.1f s, process %d", time.monotonic() - began, self.process.pid)

    def _answers(self) -> bool:
        try:
            self.client.get("/health")
        except EngineDied:
            return False
        return True

    def _environment(self) -> dict[str, str]:
        path = Path(tandem_path(self.folder))
        plugin = path / f"{BACKEND}_vllm-1.dist-info"
        plugin.mkdir()
        (plugin / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BACKEND}-vllm\nVersion: 1\n", encoding="utf-8")
        (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{BACKEND} = tandem.backends.vllm.plugin:register\n", encoding="utf-8")
        return {
            "PYTHONPATH": str(path), "VLLM_PLUGINS": BACKEND, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_RPC_BASE_PATH": ".", "TMPDIR": str(self.folder),
        }  # fmt: skip

    def update(self, version: WeightVersion) -> Updated:
        """Brings the published ``version`` into every rank, or into none. Raises what
        ``WeightReader.read`` raises, and ``EngineDied`` if a rank holds anything else afterwards."""
        post = self.client.post
        post("/pause?mode=wait")
        post("/start_weight_update")
        post("/update_weights", {"update_info": {"incarnation": version.incarnation, "step": version.step}})
        outcomes = self.client.ask_workers("tandem_update_outcome")
        failed = next((outcome["error"] for outcome in outcomes if outcome["error"]), None)
        if failed is not None:
            self.client.ask_workers("tandem_drop_update")
            post("/finish_weight_update")
            post("/resume")
            _raise(*failed)
        post("/finish_weight_update", {"weight_version": version_label(version)})
        if not post("/reset_prefix_cache")["success"]:
            raise EngineDied("vLLM kept keys and values of older weights: its prefix cache could not be reset")
        self.digests = self.client.ask_workers("tandem_digests_after_update")
        post("/resume")
        self.version = version
        rereads = tuple(dict.fromkeys(name for outcome in outcomes for name in outcome["rereads"]))
        return Updated(version, sum(outcome["bytes"] for outcome in outcomes), rereads, min(outcome["revision"] for outcome in outcomes))

    def check_held(self) -> None:
        """Raises ``EngineDied`` if a rank holds other bits than after the last update, with the first tensor that differs."""
        for rank, (after, now) in enumerate(zip(self.digests, self.held_digests(), strict=True)):
            changed = [name for name in after if now.get(name) != after[name]]
            if changed:
                raise EngineDied(f"vLLM's tensor '{changed[0]}'{f' on rank {rank}' if rank else ''} has changed in its memory since the update")

    def held_digests(self) -> list[dict[str, str]]:
        """Returns the digests of what each rank holds now, by name."""
        return self.client.ask_workers("tandem_held_digests")

    def close(self) -> None:
        """Ends the server, and with it its engine, at once."""
        process, self.process = self.process, None
        if process is not None:
            kill(process)
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        shutil.rmtree(self.folder, ignore_errors=True)


def _engines(pid: int) -> list[int]:
    """Returns the processes below ``pid`` that compute, by the titles that vLLM gives them."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                title = Path(f"/proc/{child}/cmdline").read_bytes()
                found += [child, *_engines(child)] if title.startswith(b"VLLM::") else _engines(child)
    return found


def _end_with(process: "subprocess.Popen[bytes]", engines: Sequence[int]) -> None:
    """Waits until one of ``engines`` has ended, and ends ``process``, the server, so that calls of it end too."""
    with contextlib.ExitStack() as stack:
        ended = select.poll()
        for pid in engines:
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                break
            stack.callback(os.close, file)
            ended.register(file, select.POLLIN)
        else:
            ended.poll()
    if process.poll() is None:
        logger.warning("a process of vLLM's engine has ended; its server %d is ended too", process.pid)
        process.kill()


def _raise(kind: str, text: str) -> None:
    """Raises the error that a rank reported."""
    if kind == "PeerDied":
        raise PeerDied("trainer", "update_weight", text)
    raise DamagedWeights(text) if kind == "DamagedWeights" else RunError(text)


def _last_error(log: Path, written: int) -> str:
    """Returns the last line with an error in what was written to ``log`` after its first ``written`` bytes."""
    with log.open("rb") as file:
        file.seek(written)
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b[A-Z]\w*Error: |Value error, ", line) and not re.search("root cause|Engine core initialization", line)]
    return (errors or lines or ["it wrote nothing"])[-1][:500]
