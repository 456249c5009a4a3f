"""Shifts the wall clock of a Python process by the seconds in the file that TANDEM_TEST_CLOCK names, whenever that changes; for tests of clocks that jump.

Python imports a module of this name when it starts, if its folder is on the path.
"""

import contextlib
import mmap
import os
import struct
import time

_PATH = os.environ.get("TANDEM_TEST_CLOCK", "")
if _PATH:
    with contextlib.suppress(OSError, ValueError), open(_PATH, "rb") as _file:
        _shift = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
        _time, _time_ns = time.time, time.time_ns
        time.time = lambda: _time() + struct.unpack("<d", _shift[:8])[0]
        time.time_ns = lambda: _time_ns() + int(struct.unpack("<d", _shift[:8])[0] * 1e9)
