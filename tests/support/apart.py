"""The test device that has memory of its own, and does its work late, in place of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from moeflux import _core


@contextmanager
def apart() -> Iterator[None]:
    """Engines that are made meanwhile have it, plans are of one, and so are single ops."""
    with pytest.MonkeyPatch.context() as patch:
        faults = partial(_core.testing.Faults, apart=True)
        patch.setattr(_core, "has_own_memory", lambda *_: True)
        for name in ("Engine", "Ops", "footprint", "device_footprint"):
            patch.setattr(_core, name, partial(getattr(_core.testing, name.lower()), faults()))
        patch.setattr(_core.testing, "Faults", faults)
        yield
