"""The bill of materials names what is installed."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sbom.py"


def test_the_bill_of_materials_has_every_needed_distribution_in_its_installed_version(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "sbom.json"), "--extras", "serve"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "sbom.json").read_text())
    found = {component["name"]: component["version"] for component in made["components"]}
    listed = subprocess.run([sys.executable, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, timeout=60, check=True)
    installed = {row["name"].lower().replace("_", "-").replace(".", "-"): row["version"] for row in json.loads(listed.stdout)}
    assert {"torch", "safetensors", "tokenizers", "pyyaml", "xxhash", "fastapi", "starlette", "sympy", "mpmath"} <= found.keys()
    assert found.items() <= installed.items() and "pytest" not in found
    refs = {entry["ref"] for entry in made["dependencies"]}
    assert refs == {*found, "tandem-rl"} and all(set(entry["dependsOn"]) <= refs for entry in made["dependencies"])
