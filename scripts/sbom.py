"""Writes a software bill of materials (CycloneDX 1.6, JSON) of Tandem as it is installed here: every distribution that it needs, with its version
and licence.

    python scripts/sbom.py dist/sbom.cdx.json [--extras serve,s3]

A requirement whose marker does not apply, or that only another extra needs, is left out. Exits with 1 if a needed distribution is not installed.
"""

import argparse
import json
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "tandem-rl"


def closure(extras: set[str]) -> dict[str, tuple[Distribution, list[str]]]:
    """Returns, by canonical name, every needed distribution and the names of those that it needs. Raises ``PackageNotFoundError``."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    wanted: list[tuple[str, frozenset[str]]] = [(ROOT, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        name, asked = wanted.pop()
        if (name, asked) in seen:
            continue
        seen.add((name, asked))
        there = distribution(name)
        needs = [Requirement(text) for text in there.requires or ()]
        chosen = [r for r in needs if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in (*asked, ""))]
        names = found.setdefault(name, (there, []))[1]
        for requirement in chosen:
            needed = canonicalize_name(requirement.name)
            names.extend([needed] if needed not in names else [])
            wanted.append((needed, frozenset(requirement.extras)))
    return found


def component(name: str, there: Distribution) -> dict[str, Any]:
    licence = there.metadata.get("License-Expression") or there.metadata.get("License") or ""
    classifiers = [text.rpartition(" :: ")[2] for text in there.metadata.get_all("Classifier") or () if text.startswith("License ::")]
    # Some distributions put the whole text of their licence there.
    text = licence if licence and "\n" not in licence else next(iter(classifiers), "")
    entry: dict[str, Any] = {"type": "library", "bom-ref": name, "name": name, "version": there.version, "purl": f"pkg:pypi/{name}@{there.version}"}
    return {**entry, "licenses": [{"license": {"name": text}}]} if text else entry


def bill(extras: set[str]) -> dict[str, Any]:
    found = closure(extras)
    root, _ = found[ROOT]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"timestamp": datetime.now(UTC).isoformat(timespec="seconds"), "component": {**component(ROOT, root), "type": "application"}},
        "components": [component(name, there) for name, (there, _) in sorted(found.items()) if name != ROOT],
        "dependencies": [{"ref": name, "dependsOn": sorted(needs)} for name, (_, needs) in sorted(found.items())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--extras", default="", help="extras of Tandem to include, separated by commas")
    options = parser.parse_args()
    try:
        made = bill({extra for extra in options.extras.split(",") if extra})
    except PackageNotFoundError as error:
        print(f"the distribution '{error.name}' is not installed, so the bill would not be whole; install it first", file=sys.stderr)
        return 1
    options.target.parent.mkdir(parents=True, exist_ok=True)
    options.target.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.target}: {len(made['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
