# What type checkers know of `import moeflux`; at run time __init__.py imports the same names when they are asked for.

from moeflux import builtin, ops
from moeflux._core import QuantFormat, StepStats, __version__
from moeflux._core import isas as available_isas
from moeflux.errors import BudgetError, DeviceError, Error, FormatError, IoError, StateError
from moeflux.model import Memory, Model, load
from moeflux.plan import Plan
from moeflux.sampling import Sampling
from moeflux.session import Logits, Session
from moeflux.snapshot import Snapshot
from moeflux.store import Store, open_store
from moeflux.variants import PRESETS, Variant

__all__ = [
    "PRESETS",
    "BudgetError",
    "DeviceError",
    "Error",
    "FormatError",
    "IoError",
    "Logits",
    "Memory",
    "Model",
    "Plan",
    "QuantFormat",
    "Sampling",
    "Session",
    "Snapshot",
    "StateError",
    "StepStats",
    "Store",
    "Variant",
    "__version__",
    "available_isas",
    "builtin",
    "load",
    "open_store",
    "ops",
]
