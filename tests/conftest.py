"""Triton decides when it is first imported, by whomever, whether its programs are made for a device or for its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
