"""Experiment trackers, each in a process of its own that follows the files of a run. Imports no torch."""
