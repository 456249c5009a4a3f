"""A module that opens a device file, which the fork server is to take for that of a GPU."""

import os
import sys

OPENED = os.open("/dev/zero", os.O_RDONLY)
sys.modules["__main__"].DEVICES = ("/dev/zero",)  # type: ignore[attr-defined]
