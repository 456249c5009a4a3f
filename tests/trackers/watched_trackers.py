"""Trackers of a user, each with a fault."""

import time


class Raises:
    """Cannot begin."""

    def begin(self, facts, first_step):
        raise OSError("no route to the tracker")


class Hangs:
    """Never returns from its first row."""

    def begin(self, facts, first_step):
        pass

    def samples(self, step, rows):
        pass

    def log(self, step, metrics):
        time.sleep(3600)
