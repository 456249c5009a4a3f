"""CI installs what was locked."""

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_the_lock_has_hashes_of_every_pinned_version_but_torchs() -> None:
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("torch==")]
    locked = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text()):
        name, _, rest = block.partition("==")
        locked[name.replace("_", "-").lower()] = (rest.split()[0], re.findall(r"--hash=sha256:([0-9a-f]{64})", block))
    assert len(pinned) > 100 and len(locked) == len(pinned)
    for line in pinned:
        name, _, version = line.partition("==")
        found, hashes = locked[name.replace("_", "-").lower()]
        assert found == version and hashes, line
    assert "--require-hashes --no-deps -r requirements.lock" in (ROOT / ".ci" / "run").read_text()


def required(name: str, extras: Iterable[str], known: dict[str, Distribution]) -> set[str]:
    """Returns the names of all packages that ``name[extras]`` needs here, itself included."""
    wanted, seen = [(name, frozenset(extras))], set()
    while wanted:
        each = wanted.pop()
        if each in seen:
            continue
        seen.add(each)
        for line in known[each[0]].requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *each[1])):
                wanted.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return {name for name, _ in seen}


def test_everything_that_the_tests_install_is_pinned() -> None:
    (extras,) = re.findall(r"^EXTRAS := ([\w,-]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {canonicalize_name(found.metadata["Name"]): found for found in distributions()}
    names = required("tandem-rl", extras.split(","), known) - {"tandem-rl"}
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert len(names) > 150 and names - pinned == set()
