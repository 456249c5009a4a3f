"""Section ``slurm``: what a run asks Slurm for."""

import re
from dataclasses import dataclass, field, fields, replace

from tandem.config.limits import check_at_least_one
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

_TEXTS = ("partition", "account", "qos", "time", "gpus_per_node", "mem", "constraint", "nodelist", "exclude", "reservation")
_OWN = (
    "job-name", "nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "signal", "requeue", "no-requeue", "chdir", "array", "wrap", "exclusive",
    "cpus-per-task", "parsable", "wait", "export", *(name.replace("_", "-") for name in _TEXTS),
)  # fmt: skip
"""Options of sbatch that the launcher or another key sets."""


@dataclass(frozen=True, slots=True)
class SlurmRolloutConfig:
    """Nodes of another kind than those of `slurm.nodes`, whose pods draw samples and do not train: with them the run is a heterogeneous job of two parts
    (`#SBATCH hetjob`). Time limit, account, quality of service and reservation are those of section `slurm`."""

    nodes: int = 0
    """Nodes of this kind, beside `slurm.nodes`. 0: none, and the job has one part."""
    partition: str = ""
    """Partition. Empty: that of section `slurm`."""
    cpus_per_task: int = 0
    """Cores of each node. 0: whole nodes (`--exclusive`)."""
    gpus_per_node: str = ""
    """GPUs of each node, as `8` or `l40s:8`. Empty: none."""
    mem: str = ""
    """Memory of each node, as `64G`. Empty: the cluster's default."""
    constraint: str = ""
    """Features that these nodes must have."""
    nodelist: str = ""
    """Names of nodes that are asked for."""
    exclude: str = ""
    """Names of nodes that are not taken."""


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """What `--on slurm` asks Slurm for, under the names of `sbatch`; no other launcher reads it. See `cluster/slurm.md`."""

    partition: str = ""
    """Partition. Empty: the cluster's default."""
    nodes: int = 1
    """Nodes. The first has the controller, the trainer and an engine; every further one is a pod that joins the run."""
    time: str = ""
    """Time limit, days first: `0-08:00:00` (YAML takes `8:00:00` for a number). Empty: the partition's."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    cpus_per_task: int = 0
    """Cores of each node. 0: whole nodes (`--exclusive`)."""
    gpus_per_node: str = ""
    """GPUs of each node, as `8` or `h100:8`."""
    mem: str = ""
    """Memory of each node, as `64G`. Empty: the cluster's default."""
    constraint: str = ""
    """Features that the nodes must have. A resumed run needs the kind of processor that it began on."""
    nodelist: str = ""
    """Names of nodes that are asked for."""
    exclude: str = ""
    """Names of nodes that are not taken."""
    reservation: str = ""
    """Reservation."""
    requeue: bool = True
    """The job is queued again after a failed node, a preemption or its time limit, and continues from the newest checkpoint."""
    signal_s: int = 120
    """Seconds before the time limit at which the run finishes its step, saves it and stops, as `--signal=B:USR1@120`. Slurm may be a minute early."""
    rollout: SlurmRolloutConfig = field(default_factory=SlurmRolloutConfig)
    """Nodes of another kind, which draw samples alone."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the run, on its first node, such as `module load gcc`."""
    options: tuple[str, ...] = ()
    """Further options of `sbatch`, such as `--mail-type=END`."""

    @property
    def all_nodes(self) -> int:
        """Returns how many nodes the job has in all of its parts."""
        return self.nodes + self.rollout.nodes

    @property
    def parts(self) -> tuple["SlurmConfig", ...]:
        """Returns what each part of the job asks for: one, or with ``rollout.nodes`` two, a heterogeneous job."""
        first = replace(self, rollout=SlurmRolloutConfig())
        if not self.rollout.nodes:
            return (first,)
        own = {each.name: getattr(self.rollout, each.name) for each in fields(SlurmRolloutConfig)}
        return first, replace(first, **{**own, "partition": self.rollout.partition or self.partition})

    def check(self) -> None:
        """Raises ``UserError`` for what could not be a line of a batch script, and for options that the launcher sets."""
        check_at_least_one("slurm", self, "nodes", "signal_s")
        if self.rollout.nodes < 0:
            raise UserError(f"'slurm.rollout.nodes' is {self.rollout.nodes}; give a number of nodes, or 0 for none of another kind")
        if not self.rollout.nodes:
            others = (each.name for each in fields(SlurmRolloutConfig) if each.name != "nodes")
            refuse_unread("slurm.rollout", self.rollout, "slurm.rollout.nodes is 0", *others, fix="set slurm.rollout.nodes")
        for key, part in (("slurm", self), ("slurm.rollout", self.rollout)):
            if part.cpus_per_task < 0:
                raise UserError(f"'{key}.cpus_per_task' is {part.cpus_per_task}; give a number of cores, or 0 for whole nodes")
            for name in _TEXTS:
                if not _is_word(text := getattr(part, name, "")) and text:
                    raise UserError(f"'{key}.{name}' is {text!r}; it must be one word without spaces, as sbatch takes it")
        if self.time.isdigit():
            raise UserError(
                f"'slurm.time' is '{self.time}', which may be minutes, or what YAML makes of HH:MM:SS; write the days first: 0-01:30:00 is an hour and a half"
            )
        for line in self.setup:
            if not line.isprintable():
                raise UserError(f"'slurm.setup' has {line!r}; each item must be one line of shell")
        for option in self.options:
            match = re.match(r"--([a-z][a-z-]*)(=|$)", option)
            if match is None or not option.isprintable():
                raise UserError(f"'slurm.options' has {option!r}; write options of sbatch in full, as --mail-type=END")
            if match[1] in _OWN:
                raise UserError(f"'slurm.options' has '{option}', which the launcher sets{_instead(match[1])}; leave it out")


def _is_word(text: str) -> bool:
    return text.isprintable() and not any(character.isspace() for character in text)


def _instead(option: str) -> str:
    key = option.replace("-", "_")
    return f" by slurm.{key}" if key in SlurmConfig.__dataclass_fields__ else ""
