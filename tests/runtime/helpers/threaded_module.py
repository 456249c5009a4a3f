"""Starts a thread when it is imported, after which a fork is not safe."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
