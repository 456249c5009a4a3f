"""Which cases run with the reference kernels, which take five times as long as those of the compiler."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest

Settings = dict[str, Any]
REFERENCE_IS_SLOW = [pytest.param("reference", marks=pytest.mark.full), "auto"]
"""For a test that takes ten seconds with the reference kernels."""


def with_kernels(cases: Mapping[str, Any], *, quick: Collection[str]) -> pytest.MarkDecorator:
    """Returns parameters ``kernels`` and ``settings``: each of ``cases`` with both sets of kernels. With the reference kernels those in ``quick``
    alone are part of every run of the tests, the others are marked ``full``."""
    assert set(quick) <= set(cases), quick
    return pytest.mark.parametrize(
        ("kernels", "settings"),
        [
            pytest.param(kernels, settings, id=f"{kernels}-{name}", marks=pytest.mark.full if kernels == "reference" and name not in quick else ())
            for kernels in ("reference", "auto")
            for name, settings in cases.items()
        ],
    )


def named(*cases: Settings) -> dict[str, Settings]:
    """Returns the cases by a name made of their settings."""
    return {",".join(f"{key.replace('enable_', '')}={value}" for key, value in settings.items()): settings for settings in cases}
