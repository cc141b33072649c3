# What type checkers know of `import moeflux`; at run time __init__.py imports the same names when they are asked for.

from moeflux import ops, oracle, serving
from moeflux._core import Cancel, QuantFormat, StepStats, __version__
from moeflux._core import isas as available_isas
from moeflux.conversion.convert import convert
from moeflux.conversion.synth import synth
from moeflux.conversion.verify import verify
from moeflux.errors import (
    ArgumentError,
    BudgetError,
    BufferTooSmall,
    Cancelled,
    DeviceError,
    Error,
    FormatError,
    IoError,
    NotFoundError,
    PeerError,
    Refused,
    SnapshotError,
    StateError,
)
from moeflux.loading import load
from moeflux.model import Memory, Model
from moeflux.models import builtin, layers
from moeflux.models.config import variant_from_config
from moeflux.models.presets import PRESETS
from moeflux.models.variants import Variant
from moeflux.runtime.logits import Logits
from moeflux.runtime.options import LoadOptions
from moeflux.runtime.plan import plan
from moeflux.runtime.plan_table import Plan
from moeflux.runtime.snapshot import Snapshot
from moeflux.session import Session
from moeflux.stores.storage import ConvertFormat
from moeflux.stores.store import Store, open_store
from moeflux.text.conversation import Conversation, Part, Reply
from moeflux.text.generate import Completion, Generation, GenerationStats, Piece
from moeflux.text.sampling import Sampling

__all__ = [
    "PRESETS",
    "ArgumentError",
    "BudgetError",
    "BufferTooSmall",
    "Cancel",
    "Cancelled",
    "Completion",
    "Conversation",
    "ConvertFormat",
    "DeviceError",
    "Error",
    "FormatError",
    "Generation",
    "GenerationStats",
    "IoError",
    "LoadOptions",
    "Logits",
    "Memory",
    "Model",
    "NotFoundError",
    "Part",
    "PeerError",
    "Piece",
    "Plan",
    "QuantFormat",
    "Refused",
    "Reply",
    "Sampling",
    "Session",
    "Snapshot",
    "SnapshotError",
    "StateError",
    "StepStats",
    "Store",
    "Variant",
    "__version__",
    "available_isas",
    "builtin",
    "convert",
    "layers",
    "load",
    "open_store",
    "ops",
    "oracle",
    "plan",
    "serving",
    "synth",
    "variant_from_config",
    "verify",
]
