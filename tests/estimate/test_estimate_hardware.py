"""Hardware files: what comes with Tandem, what a user adds, and what is refused."""

from pathlib import Path

import pytest
import yaml

from tandem.estimate.hardware.hardware import FIGURES
from tandem.estimate.hardware.load import FOLDER, hardware_of_device, known_hardware, load_hardware, source_of
from tandem.types.errors import UserError

GIVEN = yaml.safe_load((FOLDER / "A100-80GB.yaml").read_text(encoding="utf-8"))


def file(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump({**GIVEN, **changes}), encoding="utf-8")
    return str(path)


def test_each_kind_of_gpu_has_a_file_whose_figures_have_sources() -> None:
    assert {"H100-80GB", "H200", "A100-80GB", "B200", "MI300X", "L40S", "H100-96GB-500W"} <= set(known_hardware())
    for name in known_hardware():
        hardware = load_hardware(name)
        assert hardware.name == name and source_of(hardware, "peak_flops") and source_of(hardware, "memory_bandwidth")
        assert 0.4 < hardware.product_rate("bf16") / hardware.peak_flops["bf16"] < 1.0
        assert hardware.memory_bandwidth > hardware.link_bandwidth >= hardware.network_bandwidth


def test_gpus_of_a_node_without_a_switch_reach_each_other_over_the_links_between_them() -> None:
    hardware = load_hardware("MI300X")
    assert [hardware.group_bandwidth(*group) for group in ((8, 1), (2, 1), (4, 2))] == pytest.approx([4.48e11, 6.4e10, 1.92e11])
    assert hardware.group_bandwidth(2, 8) == hardware.network_bandwidth and load_hardware("H200").group_bandwidth(2, 1) == 4.5e11


def test_products_without_a_measured_rate_reach_the_share_that_bf16_reaches(tmp_path: Path) -> None:
    assert load_hardware("A100-80GB").product_rate("fp16") == pytest.approx(271.2e12)
    # Nothing is published of products in int8: they reach the share of fp8 where that is measured, otherwise of bf16.
    assert load_hardware("H100-80GB").product_rate("int8") == load_hardware("H100-80GB").product_rate("fp8")
    assert load_hardware("A100-80GB").product_rate("int8") == pytest.approx(2 * 271.2e12)
    assert load_hardware(file(tmp_path, product_flops={}, sources=dict.fromkeys(FIGURES, "-"))).product_rate("bf16") == pytest.approx(0.8 * 312e12)


def test_a_user_adds_a_file_and_a_figure_of_it_is_read_back(tmp_path: Path) -> None:
    hardware = load_hardware(file(tmp_path, name="mine", memory_bytes=2**34))
    assert (hardware.name, hardware.memory_bytes, hardware.group_bandwidth(8, 1), hardware.group_bandwidth(2, 8)) == ("mine", 2**34, 3e11, 2.5e10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": 1}, "unknown key 'memory'"),
        ({"memory_bytes": 0}, "'memory_bytes' is 0; it must be more than 0"),
        ({"memory_bandwidth": "fast"}, "'memory_bandwidth'"),
        ({"peak_flops": {"bf17": 1.0}}, "'peak_flops.bf17' is not a precision"),
        ({"peak_flops": {"fp32": 1.0}}, "'peak_flops.bf16' is missing"),
        ({"product_flops": {"bf16": 1e15}}, "'product_flops.bf16' is 1e+15, more than"),
        ({"attention_flops": {"forward": 1e14}}, "'attention_flops.backward' is missing"),
        ({"attention_flops": {"sideways": 1e14}}, "'attention_flops.sideways' is not a pass"),
        ({"price_per_hour": -1.0}, "'price_per_hour' is -1"),
        ({"sources": {}}, "'sources.peak_flops' is missing"),
        ({"sources": {**GIVEN["sources"], "name": "me"}}, "'sources.name' is the source of no figure"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_line_that_names_it(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    path = file(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        load_hardware(path)
    assert said in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("given", "near"), [("H100", "H100-80GB"), ("h200x", "H200"), ("mi300", "MI300X"), ("A100-40GB", "A100-80GB")])
def test_an_unknown_gpu_is_answered_with_the_nearest_known_one(given: str, near: str) -> None:
    with pytest.raises(UserError, match=f"GPU '{given}' is unknown; did you mean '{near}'"):
        load_hardware(given)


def test_a_name_like_no_other_is_answered_with_all_of_them() -> None:
    with pytest.raises(UserError, match="known here: A100-80GB, B200"):
        load_hardware("qqq")
    with pytest.raises(UserError, match=r"hardware file 'mine\.yaml' does not exist"):
        load_hardware("mine.yaml")


@pytest.mark.parametrize(
    ("name", "rate"),
    [("NVIDIA H200", 989.5), ("NVIDIA H200 NVL", 835.5), ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA A100-SXM4-80GB", 312.0)],
)
def test_hardware_is_found_by_what_torch_calls_the_device(name: str, rate: float) -> None:
    hardware = hardware_of_device(name)
    assert hardware is not None and hardware.peak_flops["bf16"] == pytest.approx(rate * 1e12)


def test_an_unknown_device_has_no_hardware_file() -> None:
    assert hardware_of_device("NVIDIA GeForce RTX 2080") is None
