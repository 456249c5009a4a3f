"""What an engine's host adds between two steps, by the release of the engine. Imports no torch.

Scheduling, the inputs of the next step and the outputs of the last take a time for each sequence in it. A host that does this while the GPU computes the step
before adds nothing. The figures are published ones of decoding, all taken as proportional to the sequences.
"""

from collections.abc import Mapping

HIDDEN = "hidden"
SEQUENCE_S: Mapping[str, float] = {HIDDEN: 0.0, "vllm-0.8": 12.8e-6, "vllm-0.6": 21.5e-6, "vllm-0.5": 100e-6}
"""Seconds for a sequence of a step. ``hidden``: vLLM from 0.14 on, which schedules a step ahead by default, SGLang, and Tandem's engine, whose own host is
measured where it runs. ``vllm-0.8`` to 0.13, the engine V1 without that: 0.34, 0.78, 1.70 and 3.26 ms for 32, 64, 128 and 256 sequences, by which steps on two
A100s became shorter when scheduling ran beside them (github.com/vllm-project/vllm/pull/23914, gbs / tps). ``vllm-0.6``, with outputs beside the step: 5 to 6 ms
between two steps of 256 sequences (issue 10634 there). ``vllm-0.5``: 20 ms between two steps of 200 (issue 6801 there)."""
