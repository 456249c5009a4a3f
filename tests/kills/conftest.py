import sys
from pathlib import Path

HERE = Path(__file__).parent
for room in ("kills", "pod", "jobs", "serving"):
    sys.path.insert(0, str(HERE.parent / room))
