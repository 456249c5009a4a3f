"""What NVIDIA's driver says of GPUs, read from output in its formats.

`recorded/` has the whole output of driver 580 for an H200, without the numbers that name the card. Its other files follow what drivers 450 and 550 print, by
`nvsmi_device_v11.dtd` and `nvsmi_device_v12.dtd`, with the elements that are read; the lines of the kernel are those of NVIDIA's catalog of XID errors and of
public reports of them (open-gpu-kernel-modules 507, NVSentinel 155).
"""

from pathlib import Path

import pytest

from tandem.runtime.machine.nvidia_health import parse_smi, parse_xids
from tandem.types import RunError

RECORDED = Path(__file__).parent / "recorded"


def test_errors_throttling_and_lost_lanes_are_named_and_a_gpu_at_rest_has_none() -> None:
    healthy, broken = parse_smi((RECORDED / "nvidia-smi-550.xml").read_text())
    assert (healthy.bus, healthy.temperature_c, healthy.power_w, healthy.utilization_percent) == ("00000000:18:00.0", 31, 70.25, 0)
    # It rests at generation 1 of 5, which is no fault.
    assert healthy.link == (1, 16) and healthy.link_most == (5, 16) and healthy.faults() == []
    assert broken.uncorrected == 3 and broken.temperature_c == 92
    assert broken.faults() == [
        "3 uncorrected ECC errors", "a page is to be retired at the next reset", "the remapping of a row failed", "throttled: hardware slowdown",
        "throttled: hardware thermal slowdown", "PCIe has 8 of 16 lanes",
    ]  # fmt: skip


def test_what_an_h200_at_rest_answers_is_read_whole() -> None:
    (gpu,) = parse_smi((RECORDED / "nvidia-smi-580-h200.xml").read_text())
    assert (gpu.bus, gpu.name, gpu.temperature_c, gpu.power_w, gpu.utilization_percent) == ("00000000:00:06.0", "NVIDIA H200", 35, 78.21, 0)
    assert gpu.link == gpu.link_most == (5, 16) and gpu.uncorrected == 0 and gpu.faults() == []


def test_the_elements_of_older_drivers_are_read_and_what_a_gpu_does_not_have_is_unknown() -> None:
    old, consumer = parse_smi((RECORDED / "nvidia-smi-450.xml").read_text())
    assert old.faults() == ["1 uncorrected ECC errors", "a page is to be retired at the next reset", "throttled: software thermal slowdown"]
    assert old.power_w == 180.0
    assert (consumer.uncorrected, consumer.temperature_c, consumer.power_w, consumer.utilization_percent) == (None, None, None, None)
    assert consumer.faults() == []


@pytest.mark.parametrize("text", ["", "Unable to determine the device handle for GPU0000:2A:00.0: Unknown Error", "<html/>"])
def test_another_text_is_one_line(text: str) -> None:
    with pytest.raises(RunError, match="'nvidia-smi -q -x' gave "):
        parse_smi(text)


def test_the_errors_of_the_kernel_log_are_found_in_all_their_forms() -> None:
    found = list(parse_xids((RECORDED / "dmesg.txt").read_text().splitlines()))
    assert [(xid.bus, xid.number, xid.at_s, xid.is_fatal) for xid in found] == [
        ("0000:18:00", 31, 8123.410332, False), ("0000:2a:00", 48, 9001.000421, True), ("0000:2a:00", 79, 9107.771003, True),
        ("0000:b3:00.0", 79, 9843.308145, True), ("0000:3b:00", 119, None, True),
    ]  # fmt: skip
    assert found[2].describe() == "XID 79 of GPU 0000:2a:00 (the GPU has fallen off the bus): GPU has fallen off the bus."
    assert found[0].describe().startswith("XID 31 of GPU 0000:18:00: pid=41733, name=python, ")
