"""Makes this folder's helpers importable, and those of the folders whose runs it watches."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "jobs", HERE.parent / "pod", HERE.parent / "cluster", HERE.parent):
    sys.path.append(str(folder))
