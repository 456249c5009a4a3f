"""Makes the helpers of the rooms next door importable."""

import sys
from pathlib import Path

for _room in (".", "../observability"):
    sys.path.append(str((Path(__file__).parent / _room).resolve()))
