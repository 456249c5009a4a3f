"""Proofs with Megatron-Core itself, which are skipped by name where its environment is missing."""

import pytest

from tandem.backends.environment import installed

needs_megatron = pytest.mark.skipif(
    installed("megatron") is None, reason="the megatron sidecar has no environment here; make it with: tandem sidecar install megatron"
)
