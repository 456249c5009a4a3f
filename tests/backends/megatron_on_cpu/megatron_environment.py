"""Makes an environment in which Megatron-Core runs on a CPU, for tests: ``python tests/backends/megatron_on_cpu/megatron_environment.py FOLDER``.

FOLDER (for ``TANDEM_SIDECARS``) gets an environment ``megatron`` that has the packages of the one that ``tandem sidecar install megatron`` made, and runs
``megatron_cpu_shim`` when its interpreter starts. The sidecar's own environment is not changed, and nothing of Tandem knows of the shim.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tandem.backends.environment import FOLDER, RECORD, folder_of, python_of
from tandem.types import UserError


def make(folder: Path) -> Path:
    """Makes the environment in ``folder`` unless it is there. Returns ``folder``. Raises ``UserError`` if the sidecar's environment is missing."""
    real, shimmed = python_of("megatron"), folder / "megatron"
    if (shimmed / RECORD).exists():
        return folder
    packages = subprocess.run(
        [str(real), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    ).stdout.strip()
    subprocess.run([str(real), "-m", "venv", "--without-pip", str(shimmed)], check=True)
    site = next(shimmed.glob("lib/python*/site-packages"))
    lines = [packages, str(Path(__file__).resolve().parent), "import megatron_cpu_shim"]
    (site / "megatron_on_cpu.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (shimmed / RECORD).write_text(json.dumps(json.loads((folder_of("megatron") / RECORD).read_text(encoding="utf-8"))), encoding="utf-8")
    return folder


if __name__ == "__main__":
    try:
        print(f"{FOLDER}={os.fspath(make(Path(sys.argv[1]).resolve()))}")
    except UserError as error:
        sys.exit(str(error))
