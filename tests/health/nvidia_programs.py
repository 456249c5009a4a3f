"""``nvidia-smi`` and ``dmesg`` as programs that print recorded output, which a test changes: what the driver of a machine without GPUs does not say."""

import os
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "runtime" / "recorded"


class NvidiaPrograms:
    """The programs in ``folder``, to be put in front of the ``PATH``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._smi, self._log = folder / "smi.xml", folder / "log.txt"
        # The GPU that is whole, of the two.
        text = (RECORDED / "nvidia-smi-550.xml").read_text()
        self.healthy = text[: text.index("</gpu>") + len("</gpu>")] + "\n</nvidia_smi_log>\n"
        self.smi(self.healthy)
        self.log()
        for name, shown in (("nvidia-smi", self._smi), ("dmesg", self._log)):
            program = folder / name
            program.write_text(f"#!/bin/sh\nexec cat {shown}\n")
            program.chmod(0o755)

    @property
    def path(self) -> str:
        return f"{self.folder}:{os.environ['PATH']}"

    def smi(self, text: str) -> None:
        _replace(self._smi, text)

    def log(self, *lines: str) -> None:
        _replace(self._log, "".join(f"{line}\n" for line in lines))


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)
