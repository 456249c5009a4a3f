"""The sidecars of a pod that joins a run from another machine: ``python -m tandem.pod.joining_shim ...``, which ``tandem pod`` starts.

It is a member of the run as long as its lease lasts, and this process is one life of it: the run sends it the recipe once (``setup``), and it ends, with
its workers and its shared memory, when the lease is over, when the run drops it, or when another controller takes over. ``tandem pod`` then starts the next
life, which joins anew. So nothing of an earlier life can answer late or keep old weights, whoever was cut off from whom. Imports no torch.
"""

import argparse
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import yaml

from tandem import __version__
from tandem.config.health import HealthConfig
from tandem.config.recipe import load_config
from tandem.config.yaml_text import parse_yaml
from tandem.pod.calls import ROLLOUT_CALLS, TRAINER_CALLS
from tandem.pod.failures import Role
from tandem.pod.joined_keeper import JoinedKeeper, asks_owner
from tandem.pod.joining import FOLDER_PROOF
from tandem.pod.joining_checks import describe_machine, has_died, process_space
from tandem.pod.sent_functions import take_functions
from tandem.pod.sent_weights import KeptWeights
from tandem.pod.shim import Shim
from tandem.pod.weights_between_pods import add_tls, pod_tls
from tandem.runtime.coordination.election import LEADER
from tandem.runtime.coordination.membership import ENDED, Member, find_member, join, leave
from tandem.runtime.coordination.open import open_store, with_deadline
from tandem.runtime.coordination.session import Session
from tandem.runtime.health.node_report import REPORTS
from tandem.runtime.health.node_watch import HEALTH, NodeReading, NodeWatch
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.faults import FaultPlan, no_fault
from tandem.runtime.process.stacks import named_stacks
from tandem.runtime.records.logs import log_uncaught, setup
from tandem.runtime.rpc.calls import Blobs, Meta, Method, PeerDied, Progress, Reply
from tandem.runtime.rpc.credentials import read_credential
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

STACKS_FOLDER = "stacks"
"""In the folder of a pod: where its processes answer with their stacks."""
REPORT_FILE = "preflight.json"
"""In the folder of a pod: what was measured of its machine."""
RELEASED, AGAIN = 0, 75
"""Exit statuses: the run needs this pod no longer; this life is over and the next one may join (``EX_TEMPFAIL``)."""
_OF_ROLLOUT = (*ROLLOUT_CALLS, "start_worker", "stop_worker", "replace_worker", "receive_early", "receive_weights", "verify_weights", "memory")
_OF_TRAINER = {**{name: name for name in (*TRAINER_CALLS, "start_ranks", "allocate")}, "stop_ranks": "stop_worker"}
"""Calls of the trainer's ranks in this pod, with their names in its shim."""
_FIRST_CONTACT_S = 10.0
_LOOK_S = 0.2


class JoiningShim:
    """One life. ``token``: of the controller that set it up, with the revisions of its leadership and of this life's joining."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.name, self.folder = options, str(options.member), Path(options.run)
        self.lease_s = float(options.lease)
        # Calls that wait for the store no longer than a part of the lease, so that its end is seen in time.
        self.store = open_store(with_deadline(options.join, _FIRST_CONTACT_S))
        self.session: Session | None = None
        self.member: Member | None = None
        self.token: list[int] | None = None
        self.shims: dict[Role, Shim] = {}
        self.is_leaving = self.is_released = False
        self.ended = threading.Event()
        self.keeper: JoinedKeeper | None = None
        self.is_of_data = False
        self.status, self.lock = RELEASED, threading.Lock()
        self.weights = KeptWeights(self.folder / "base")
        self.health = HealthConfig(**json.loads(options.health))

    # -- membership --------------------------------------------------------------------------------------------------------

    def join(self, port: int) -> None:
        """Becomes a member that answers at ``port``. Raises ``UserError`` if there is another one of this name, or the store does not let it in."""
        facts = {
            "host": self.options.host, "port": port, "pid": os.getpid(), "machine": socket.gethostname(), "agent": self.options.agent, "version": __version__,
            "tls": self.options.tls is not None, "trains": bool(self.options.trains), "processes": process_space(),
        }  # fmt: skip
        before = find_member(self.store, self.name)
        if before is not None and (before.facts.get("agent") == self.options.agent or has_died(before)):
            leave(self.store, self.name)  # The life before this one, which has ended, or that of a command which was killed.
        self.session = Session(self.store, self.lease_s)
        with contextlib.suppress(FileNotFoundError):
            # Before it is a member, so that who finds it has the report.
            self.store.put(REPORTS + self.name, (self.folder / REPORT_FILE).read_bytes(), self.session.lease)
        try:
            self.member = join(self.session, self.name, facts)
        except RunError as error:
            raise UserError(f"{error} (--name)") from None
        if self.options.keeps:
            self._keep_checkpoints()
        threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()
        threading.Thread(target=self._watch_run, name="run", daemon=True).start()
        # The agent is the root of the processes here.
        watch = NodeWatch(self.name, self.health, self._tell_health, logs_of=self.folder, own="the rollout shim", root=os.getppid())
        watch.start()
        self._say(f"joined run '{self.options.of_run}' at {self.options.host}:{port}")

    def _tell_health(self, reading: NodeReading) -> None:
        assert self.session is not None
        with contextlib.suppress(RunError, UserError, LookupError):  # The next one is told.
            self.store.put(HEALTH + self.name, json.dumps(reading.to_json()).encode(), self.session.lease)

    def _watch_lease(self) -> None:
        assert self.session is not None
        while not self.ended.wait(_LOOK_S):
            if self.session.is_over:
                self.end(AGAIN, "its lease in the store is over, so the run goes on without it")

    def _watch_run(self) -> None:
        """Ends this life if its key is gone, or if no controller has led the run for too long."""
        assert self.member is not None
        waiting = Deadline(float(self.options.join_timeout))
        while not self.ended.wait(min(1.0, self.lease_s / 6)):
            with contextlib.suppress(RunError):  # The lease ends if the store stays away.
                own = find_member(self.store, self.name)
                is_there = own is not None and own.revision == self.member.revision
                if self.store.get(LEADER) is not None:
                    waiting = Deadline(float(self.options.join_timeout))
                elif self.options.again and self.token is None and self.store.get(ENDED) is not None:
                    self.end(RELEASED, "the run has ended")
                elif waiting.passed or (self.is_leaving and self.token is None):
                    self.end(RELEASED if self.is_leaving else 1, f"no controller leads run '{self.options.of_run}'")
                if not is_there and not self.is_leaving and not self.is_released:
                    self.end(AGAIN, "the run has dropped it")

    def leave(self) -> None:
        """Joins no further iteration; the second time, ends at once."""
        if self.is_leaving or self.token is None:
            self.end(RELEASED, "it leaves")
            return
        self.is_leaving = True
        if self.is_of_data:
            # They save the step that they are in, and the run goes on without this pod.
            self._say("leaves after this step")
            self.shims["trainer"].signal(signal.SIGTERM)
        else:
            self._say("leaves after this iteration")
        # Not in a signal's handler, which may have interrupted a call of the store.
        threading.Thread(target=lambda: leave(self.store, self.name), name="leave", daemon=True).start()

    def end(self, status: int, why: str) -> None:
        """Ends this life: at once if another begins, so that it answers no call any more."""
        with self.lock:
            if not self.ended.is_set():
                self._say(f"ends: {why}")
                self.status = status
                self.ended.set()
        if status == AGAIN:
            # The workers die with this process.
            os._exit(AGAIN)

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        for shim in self.shims.values():
            shim.close()
        if self.session is not None:
            self.session.close()

    def _say(self, what: str) -> None:
        logger.warning("pod %s %s", self.name, what)
        print(f"pod {self.name} {what}", flush=True)

    # -- calls -------------------------------------------------------------------------------------------------------------

    def methods(self) -> dict[str, Method]:
        passed_on = {name: self._fenced(name, "rollout") for name in _OF_ROLLOUT} | {name: self._fenced(name, "trainer") for name in _OF_TRAINER}
        own: dict[str, Method] = {
            "describe": lambda meta, blobs, progress: (describe_machine(), {}), "setup": self.setup, "release": self.release,
            "receive_model": self.receive_model, "receive_file": self.receive_file, "stacks": self.stacks, "step_times": self.step_times,
        }  # fmt: skip
        return {**own, **passed_on}

    def setup(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Takes this life for the controller with ``token``, with the recipe ``config`` and the files of its ``functions``, whose import paths these are.
        ``target``: of ranks of a run without a rollout, as of ``Joining``. The reply says whether it ``reaches_folder``, that of the run, as ``proof`` shows.
        Raises ``PeerDied`` if it is another life that is meant, or another controller has it."""
        token = [int(each) for each in meta["token"]]
        with self.lock:
            if self.member is None or token[1] != self.member.revision:
                raise PeerDied(self.name, "setup", f"pod {self.name} has another life now")
            if self.token is None:
                self.token = token
            elif token[0] > self.token[0]:
                threading.Thread(target=self.end, args=(AGAIN, "another controller leads the run")).start()
                raise PeerDied(self.name, "setup", f"pod {self.name} works for an earlier controller; it joins again")
            else:
                raise PeerDied(self.name, "setup", f"pod {self.name} was set up before")
        for name in ("pod", "model"):
            _empty(self.folder / name)
        config = parse_yaml(str(meta["config"]), "the recipe of the run")
        target = str(meta.get("target", ""))
        if not target:
            take_functions(config, self.folder / "functions", meta.get("functions", {}), blobs)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
        self.is_of_data = bool(target)
        roles: tuple[Role, ...] = ("trainer",) if target else ("rollout", "trainer")
        may_train = bool(target) or load_config(self.folder / "config.yaml").pods.trainer_count > 1
        for role in roles:
            options = argparse.Namespace(
                role=role, run=str(self.folder), pod_id=secrets.token_hex(6), credential=self.options.credential, pod_number=int(meta["number"]),
                join="", member="", lease=self.lease_s, threads=int(self.options.threads), deadline=float(meta["deadline_s"]), faults=self.options.faults,
                tls=self.options.tls, target=target,
            )  # fmt: skip
            self.shims[role] = Shim(options)
            if role == "rollout" or may_train:
                self.shims[role].prepare()
        if meta.get("keeps_checkpoints"):
            self._keep_checkpoints()
        self._say(f"{'is ready to train' if target else 'draws samples'} as pod {meta['number']}")
        return {"reaches_folder": has_proof(str(meta.get("folder", "")), str(meta.get("proof", "")))}, {}

    def _keep_checkpoints(self) -> None:
        """Publishes the keeper of this pod, for this life of it."""
        if self.keeper is None:
            assert self.session is not None
            self.keeper = JoinedKeeper(self.name, self.options.host, asks_owner(int(self.options.keeper)), self.session)

    def receive_model(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Takes the files of the model's folder but its weights, of which files with the digests ``weights`` follow (``receive_file``). Raises ``RunError`` for
        a file that would not be in its folder."""
        self._check(meta, "receive_model")
        folder = self.folder / "model"
        _empty(folder)
        for name, content in blobs.items():
            if Path(name).name != name:
                raise RunError(f"'{name}' is not the name of a file of a model")
            (folder / name).write_bytes(content)
        self.weights.expect(meta.get("weights", {}))
        return {}, {}

    def receive_file(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Takes a part of a file of the model's folder, see ``KeptWeights.receive``. The reply has the ``held_bytes``."""
        self._check(meta, "receive_file")
        return {"held_bytes": self.weights.receive(meta, blobs["part"], self.folder / "model")}, {}

    def stacks(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The ``stacks`` of all processes of this pod, by their names."""
        self._check(meta, "stacks")
        return {"stacks": named_stacks(self.folder / STACKS_FOLDER, self.folder, "the rollout shim")}, {}

    def step_times(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The ``step_times`` of the trainer's ranks of this pod, also while a call of them is in progress; none where they do not run."""
        self._check(meta, "step_times")
        return {"step_times": [each.to_json() for each in self.shims["trainer"].step_times()]}, {}

    def release(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Ends this life; ``again``: another may join. The reply says whether the pod ``left`` by itself."""
        self._check(meta, "release")
        status, why = (AGAIN, "the run has dropped it") if meta["again"] else (RELEASED, "it has left" if self.is_leaving else "the run has ended")
        self.is_released = True
        threading.Timer(0.5, self.end, (status, why)).start()  # After the reply.
        return {"left": self.is_leaving}, {}

    def _fenced(self, name: str, role: Role) -> Method:
        """The call ``name`` of the shim of ``role`` for the controller that holds the token. One whose lease is over answers nothing, neither progress nor a
        result."""

        def call(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
            self._check(meta, name)
            if name == "start_ranks":
                self._say(f"trains with rank{'s' if len(meta['ranks']) > 1 else ''} {', '.join(map(str, meta['ranks']))}")

            def report(update: dict[str, object]) -> None:
                self._check(meta, name)
                progress(update)

            own = {key: value for key, value in meta.items() if key != "token"}
            if own.get("serves"):
                own["serves"] = {**own["serves"], "host": self.options.host}
            of_shim = name if role == "rollout" else _OF_TRAINER[name]
            # A pod that has ranks alone answers with these.
            reply = self.shims.get(role, self.shims["trainer"]).methods()[of_shim]({**own, **self._own(name)}, blobs, report)
            self._check(meta, name)
            return reply

        return call

    def _own(self, name: str) -> Mapping[str, str]:
        """What a call names that is elsewhere on this machine."""
        own_store = str(self.folder / "pod" / "store.sqlite")
        if name in ("receive_early", "receive_weights"):
            return {"store": self.options.join, "own_store": own_store}
        if name == "register":
            return {"store": own_store}
        return {"folder": str(self.folder / "model")} if name == "start_engine" else {}

    def _check(self, meta: Meta, name: str) -> None:
        """Raises ``PeerDied`` for a call of another controller or to another life, and where this one is over."""
        if self.session is None or self.session.is_over:
            raise PeerDied(self.name, name, f"the lease of pod {self.name} is over")
        if self.token is None or list(meta["token"]) != self.token:
            raise PeerDied(self.name, name, f"pod {self.name} was fenced: a call has token {meta['token']}, and this life {self.token}")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)


def has_proof(folder: str, proof: str) -> bool:
    """Returns whether ``folder`` is that of the run here too: whether the file that the run has written there has the text ``proof``."""
    try:
        return bool(proof) and (Path(folder) / "pod" / FOLDER_PROOF).read_text(encoding="ascii") == proof
    except (OSError, ValueError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--run", "--of-run", "--member", "--agent", "--join", "--host", "--credential"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--threads"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--lease", "--join-timeout"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--again", action="store_true", help="an earlier life of the same command has joined")
    parser.add_argument("--trains", type=int, default=1)
    parser.add_argument("--keeper", type=int, default=-1)
    parser.add_argument("--keeps", type=int, default=0)
    parser.add_argument("--faults", default="")
    parser.add_argument("--health", default="{}")
    add_tls(parser)
    options = parser.parse_args()
    setup("rollout_shim", Path(options.run) / "logs")
    log_uncaught()
    try:
        status = serve(options)
    except UserError as error:
        logger.error("%s", error)
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        status = error.exit_code
    # Calls that still run are in daemon threads, which are not joined.
    sys.stdout.flush()
    os._exit(status)


def serve(options: argparse.Namespace) -> int:
    """Joins the run and answers its calls. Returns the exit status of this life."""
    try:
        from tandem.runtime.rpc.http_server import HttpServer
    except ImportError:
        raise UserError("a pod that joins a run needs starlette and uvicorn; install them with: pip install 'tandem-rl[serve]'") from None
    tls = pod_tls(options)
    life = JoiningShim(options)
    point = FaultPlan.parse(options.faults).point("rollout_shim", Path(options.run)) if options.faults else no_fault
    credential = read_credential(Path(options.credential))
    server = HttpServer(life.methods(), credential, name=f"pod {options.member}", host=options.host, port=options.port, fault_point=point, tls=tls)
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: life.leave())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        life.join(server.port)
        while not life.ended.wait(1.0):
            pass
        server.close()
    finally:
        life.close()
    return life.status


if __name__ == "__main__":
    main()
