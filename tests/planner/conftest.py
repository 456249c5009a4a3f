"""The helpers of these tests are modules beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
