"""Makes this folder's helpers importable, and those for servers, gateways and runs on data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
for _room in ("serving", "gateway", "jobs", "health"):
    sys.path.append(str(Path(__file__).parents[1] / _room))
