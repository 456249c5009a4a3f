"""The measured speed of the machine, from which a dry run predicts the time of a run."""

import pytest

from tandem.config.machine import MachineConfig
from tandem.estimate.time import Product
from tandem.jobs.checks.measured_speed import measure
from tandem.kernels.measure import MOST_ROWS
from tandem.types import UserError


def test_products_are_measured_and_large_ones_in_proportion() -> None:
    products = [Product(4, 8, 16), Product(MOST_ROWS * 1000, 8, 16), Product(64, 64, 64, trains=True)]
    speed = measure(products, "float32", "cpu", MachineConfig(threads=1))
    assert list(speed.seconds) == list(speed.cpu) == products and min(speed.seconds.values()) > 0 and speed.bytes_per_s > 0


def test_a_dtype_that_torch_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match="floatx"):
        measure([Product(1, 1, 1)], "floatx", "cpu", MachineConfig(threads=1))
