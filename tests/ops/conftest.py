"""The order in which instruction sets take turns."""

from __future__ import annotations

import pytest

from moeflux.ops import isas


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """They change before all other parameters, so that what a case expects is computed once for all of them."""
    if "kernels" in metafunc.fixturenames:
        metafunc.parametrize("kernels", isas(), indirect=True)
