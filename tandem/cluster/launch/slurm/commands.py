"""The commands of Slurm that the launcher calls, and what it reads of their output. Imports nothing of a run."""

import difflib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.types import RunError, UserError

_ANSWER_S = 60.0
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED", "STOPPED")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING")


@dataclass(frozen=True, slots=True)
class Job:
    """A job that Slurm still knows. ``state``: Slurm's word. ``nodes``: their names, empty while it waits. ``used`` and ``limit``: of its time.
    ``exit_status``: of its batch script, 0 before its end."""

    state: str
    nodes: str
    used: str
    limit: str
    reason: str
    exit_status: int

    @property
    def is_queued(self) -> bool:
        return self.state in _QUEUED

    @property
    def is_running(self) -> bool:
        return self.state in _RUNNING


def check_installed() -> None:
    """Raises ``UserError`` where the commands of Slurm are not."""
    for name in ("sbatch", "sinfo", "scancel", "scontrol"):
        if shutil.which(name) is None:
            raise UserError(f"no '{name}' on the PATH, so there is no Slurm here; give the command on a login node of the cluster, or without '--on slurm'")


def ask(*command: str, stdin: str | None = None) -> str:
    """Returns what a command of Slurm prints. Raises ``UserError`` with its first line if it refuses."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise RunError(f"Slurm did not answer '{command[0]}' within {_ANSWER_S:.0f} s; try again when its controller is back ('scontrol ping')") from None
    except FileNotFoundError:
        raise UserError(f"no '{command[0]}' on the PATH, so there is no Slurm here; give the command on a login node of the cluster") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise UserError(f"Slurm refused: {'; '.join(lines[:2])}")
    return done.stdout


def check_place(partition: str, nodes: int, key: str = "slurm", what: str = "") -> None:
    """Raises ``UserError`` for a partition that does not exist or is not up, or that has fewer ``nodes``. ``partition``: empty for the default one. ``key``:
    the section that asks; ``what``: what asks for so many nodes, if that is not its key ``nodes``."""
    found = _partitions()
    default = next((name for name in found if name.endswith("*")), "")
    there = {name.removesuffix("*"): facts for name, facts in found.items()}
    name = partition or default.removesuffix("*")
    if not name:
        raise UserError(f"this cluster has no default partition; set {key}.partition to one of {', '.join(sorted(there))}")
    for each in name.split(","):
        if each not in there:
            near = difflib.get_close_matches(each, there, n=1, cutoff=0.6)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(there)[:20])}"
            raise UserError(f"'{key}.partition' is '{each}', which this cluster does not have; {hint}")
    if not any(there[each][0] == "up" for each in name.split(",")):
        raise UserError(f"partition '{name}' is {there[name.split(',')[0]][0]}; choose another {key}.partition, or wait until it is up ('sinfo')")
    most = max(there[each][1] for each in name.split(","))
    if nodes > most:
        asked = what or f"'{key}.nodes' is {nodes}"
        raise UserError(f"{asked}, and partition '{name}' has {most}; lower it, or choose another {key}.partition")


def check_nodelist(listed: str, nodes: int, key: str = "slurm") -> None:
    """Raises ``UserError`` for a list of nodes that names one twice, names one that is not there, or has fewer than ``nodes``."""
    if not listed:
        return
    names = node_names(listed)
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise UserError(f"'{key}.nodelist' is '{listed}', which names '{twice}' twice; name each node once")
    there = set(ask("sinfo", "--noheader", "--Node", "--format=%N").split())
    if (unknown := next((name for name in names if name not in there), None)) is not None:
        raise UserError(f"'{key}.nodelist' has '{unknown}', which this cluster does not have; 'sinfo --Node' lists its nodes")
    if len(names) > nodes:
        # sbatch would raise the number of nodes.
        raise UserError(f"'{key}.nodelist' has {len(names)} nodes, and '{key}.nodes' is {nodes}; name as many, or raise {key}.nodes")


def check_gpus(partition: str, gpus_per_node: str, nodes: int, key: str = "slurm") -> None:
    """Raises ``UserError`` where fewer than ``nodes`` nodes have as many GPUs as ``gpus_per_node`` asks for, such as ``8`` or ``h100:8``."""
    if not gpus_per_node:
        return
    kind, _, number = gpus_per_node.rpartition(":")
    if not number.isdigit():
        raise UserError(f"'{key}.gpus_per_node' is '{gpus_per_node}'; write a number, or a type and a number, as h100:8")
    places = ["--partition", partition] if partition else []
    has = [_gpus(line, kind) for line in ask("sinfo", "--noheader", "--Node", *places, "--format=%N|%G").splitlines()]
    if (fit := sum(count >= int(number) for count in has)) < nodes:
        where, wanted = f"partition '{partition}'" if partition else "this cluster", f"{number} GPUs" + (f" of type '{kind}'" if kind else "")
        raise UserError(
            f"'{key}.gpus_per_node' is '{gpus_per_node}', and {fit} nodes of {where} have {wanted} (the most is {max(has, default=0)}), where "
            f"{nodes} are asked for; lower it, or choose another {key}.partition ('sinfo --format=%N,%G')"
        )


def _gpus(line: str, kind: str) -> int:
    """Returns how many GPUs of ``kind``, empty for any, a line of sinfo says that a node has, as in ``n1|gpu:h100:8(S:0-1)``."""
    found = re.findall(r"gpu(?::([^:,()]+))??:(\d+)", line.partition("|")[2])
    return sum(int(number) for name, number in found if kind in ("", name))


def try_script(script: str) -> None:
    """Raises ``UserError`` for a script whose job Slurm would refuse. Nothing is submitted."""
    ask("sbatch", "--test-only", stdin=script)


def _partitions() -> Mapping[str, tuple[str, int]]:
    """Returns of each partition, whose name ends with a star if it is the default one, its state and the number of its nodes."""
    lines = (line.split("|") for line in ask("sinfo", "--noheader", "--summarize", "--format=%P|%a|%D").splitlines())
    found: dict[str, tuple[str, int]] = {}
    for name, state, nodes in (line for line in lines if len(line) == 3):
        found[name] = (state.strip(), found.get(name, ("", 0))[1] + int(nodes))
    return found


def submit(script: str) -> str:
    """Returns the id of the job that runs ``script``."""
    return ask("sbatch", "--parsable", stdin=script).strip().partition(";")[0]


def find_job(job: str) -> Job | None:
    """Returns the job of this id; ``None`` once Slurm has forgotten it (``MinJobAge``)."""
    try:
        text = ask("scontrol", "show", "job", "--oneliner", job)
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    # Of a heterogeneous job one line for each part; the first is the one with the batch script.
    parts = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]
    facts = next((each for each in parts if each.get("JobId") == job.partition("_")[0]), parts[0] if parts else {})
    nodes = ",".join(listed for each in parts if (listed := each.get("NodeList", "").replace("(null)", "")))
    return Job(
        facts.get("JobState", ""), nodes, facts.get("RunTime", ""), facts.get("TimeLimit", ""), facts.get("Reason", ""),
        int(facts.get("ExitCode", "0:0").partition(":")[0]),
    )  # fmt: skip


def node_names(listed: str) -> list[str]:
    """Returns the names in a list of nodes such as ``n[1-3]``."""
    return ask("scontrol", "show", "hostnames", listed).split()


def node_address(name: str) -> str:
    """Returns the address at which Slurm reaches a node."""
    words = ask("scontrol", "show", "node", "--oneliner", name).split()
    return next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), name)
