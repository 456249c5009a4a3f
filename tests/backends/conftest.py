import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent / "megatron_on_cpu"):
    sys.path.insert(0, str(folder))
