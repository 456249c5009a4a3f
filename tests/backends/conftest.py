"""Paths of helpers, also of another room."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE / "megatron_on_cpu"):
    sys.path.insert(0, str(folder))
sys.path.append(str(HERE.parent / "weight_transfer"))
