"""Triton programs that run on the device, without launch code."""
