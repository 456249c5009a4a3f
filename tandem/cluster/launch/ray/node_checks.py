"""What every node of a Ray cluster that exists is asked before a run is placed on it. Runs in a process that is connected to Ray."""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tandem
from tandem.types import UserError

_ANSWER_S = 60.0
_CLOSE = 0.25
"""Share of the limit within which an offset must be known; else the node is asked again, by a process that is there already."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a node must have. ``folders``: of the run, and in which the command was given. ``ports``: that the processes of the run take, wherever they are
    placed and whenever they move, each with its host; without one it is the address of the node. ``max_clock_offset_s``: between any two nodes; 0: clocks are
    not compared."""

    folders: tuple[str, ...]
    ports: tuple[tuple[str, int], ...] = ()
    max_clock_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """``missing``: a folder that is not there, empty without one. ``taken``: why ports cannot be taken. ``offset_s``, ``error_s``: how far its clock is
    ahead of that of this machine, and by how much that may be wrong."""

    version: str
    missing: str
    taken: tuple[str, ...]
    offset_s: float = 0.0
    error_s: float = 0.0


def check_nodes(nodes: Sequence[Mapping[str, Any]], asked: Asked) -> None:
    """Raises ``UserError`` for a node of ``nodes``, as Ray lists them, that the run cannot be placed on."""
    answers = _ask(nodes, asked)
    names = {node["NodeID"]: str(node["NodeName"]) for node in nodes}
    ours = tandem.__version__
    for identity, answer in answers.items():
        where = f"node '{names[identity]}' of the Ray cluster"
        if answer.version != ours:
            raise UserError(f"{where} has Tandem {answer.version}, and this machine {ours}; install the same version on all nodes")
        if answer.missing:
            raise UserError(f"{where} has no folder '{answer.missing}'; all nodes of a run share its folder, under the same path")
    _check_ports([(names[identity], answer.taken) for identity, answer in answers.items()])
    if asked.max_clock_offset_s and len(nodes) > 1:
        _check_clocks([(names[identity], answer) for identity, answer in _closer(nodes, asked, answers).items()], asked.max_clock_offset_s)


def _check_ports(taken: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raises ``UserError`` if a node cannot take a port of the run: Ray may place the process that needs it there, now or when it moves. ``taken``: why not, of
    each node, with its name."""
    for reason in (text for _, texts in taken for text in texts):
        nodes = sorted(name for name, texts in taken if reason in texts)
        raise UserError(f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} of the Ray cluster, on which the run may be placed: {reason}")


def _closer(nodes: Sequence[Mapping[str, Any]], asked: Asked, answers: Mapping[str, _Answer]) -> Mapping[str, _Answer]:
    """Returns the ``answers`` with offsets that are known well: the first ones had to wait for processes to start."""
    closer = dict(answers)
    for node in nodes:
        if closer[node["NodeID"]].error_s > _CLOSE * asked.max_clock_offset_s:
            closer |= _ask([node], asked)
    return closer


def _check_clocks(answers: Sequence[tuple[str, _Answer]], limit_s: float) -> None:
    """Raises ``UserError`` for a clock of ``answers``, each with the name of its node, that differs from the median one. Of two that differ it is not known
    which is wrong, so the line names both."""
    from tandem.config.cluster import ClusterConfig
    from tandem.runtime.health.compare import clock_findings
    from tandem.runtime.health.node_report import NodeReport

    middle_s = statistics.median_low(answer.offset_s for _, answer in answers)
    first, middle = next(each for each in answers if each[1].offset_s == middle_s)
    config = replace(ClusterConfig(), max_clock_offset_s=limit_s)
    for name, answer in answers:
        report = NodeReport(name, clock_offset_s=middle_s - answer.offset_s, clock_error_s=answer.error_s + middle.error_s)
        for finding in clock_findings(report, first, config):
            raise UserError(finding.text)


def _ask(nodes: Sequence[Mapping[str, Any]], asked: Asked) -> dict[str, _Answer]:
    """Returns what each node answers, by its identity: names need not be unique. All are asked at once."""
    folders, ports = asked.folders, asked.ports

    # A function within a function is sent as code: a node may have a Tandem that does not have this module.
    def facts() -> tuple[str, str, tuple[str, ...], float]:
        import tandem
        from tandem.types import UserError

        taken: tuple[str, ...] = ()
        for host, port in ports:
            from tandem.runtime.rpc.listener import listen

            try:
                listen(host or ray.util.get_node_ip_address(), port).close()
            except UserError as error:
                taken = (*taken, str(error))
        missing = next((folder for folder in folders if not os.path.isdir(folder)), "")  # noqa: PTH112
        return tandem.__version__, missing, taken, time.time()

    probe, waiting = ray.remote(facts), {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        waiting[probe.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()] = node
    began, ends = time.time(), time.monotonic() + _ANSWER_S
    answers: dict[str, _Answer] = {}
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=max(0.0, ends - time.monotonic()))
        if not ready:
            name = next(iter(waiting.values()))["NodeName"]
            raise UserError(f"node '{name}' of the Ray cluster did not answer within {_ANSWER_S:.0f} s; end it, or try again")
        node, answered = waiting.pop(ready[0]), time.time()
        try:
            version, missing, taken, there_s = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            why = next((line.strip() for line in reversed(str(error).splitlines()) if "Error" in line), type(error).__name__)
            fix = f"install version {tandem.__version__} there, in the Python of its Ray"
            raise UserError(f"node '{node['NodeName']}' of the Ray cluster cannot run Tandem ({why}); {fix}") from None
        answers[node["NodeID"]] = _Answer(version, missing, taken, there_s - (began + answered) / 2, (answered - began) / 2)
    return answers
