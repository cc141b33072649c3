"""Runs Mixture-of-Experts language models that are far larger than memory.

import moeflux
with moeflux.load("path/to/store") as model:
    print(model.session().complete("Once upon a time", max_tokens=40))
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The public names, and where each is made: `module:name`, or the module itself. One is imported when it is first asked
# for: the command `moeflux` comes through here before it can catch a Ctrl-C, and before it is known whether NumPy and
# the core are needed. Type checkers read __init__.pyi; a test holds the two to each other.
_HOMES = {
    "PRESETS": "moeflux.models.presets:PRESETS",
    "ArgumentError": "moeflux.errors:ArgumentError",
    "BudgetError": "moeflux.errors:BudgetError",
    "BufferTooSmall": "moeflux.errors:BufferTooSmall",
    "Cancel": "moeflux._core:Cancel",
    "Cancelled": "moeflux.errors:Cancelled",
    "Completion": "moeflux.text.generate:Completion",
    "Conversation": "moeflux.text.conversation:Conversation",
    "ConvertFormat": "moeflux.stores.storage:ConvertFormat",
    "DeviceError": "moeflux.errors:DeviceError",
    "Error": "moeflux.errors:Error",
    "FormatError": "moeflux.errors:FormatError",
    "Generation": "moeflux.text.generate:Generation",
    "GenerationStats": "moeflux.text.generate:GenerationStats",
    "IoError": "moeflux.errors:IoError",
    "LoadOptions": "moeflux.runtime.options:LoadOptions",
    "Logits": "moeflux.runtime.logits:Logits",
    "Memory": "moeflux.model:Memory",
    "Model": "moeflux.model:Model",
    "NotFoundError": "moeflux.errors:NotFoundError",
    "Part": "moeflux.text.conversation:Part",
    "PeerError": "moeflux.errors:PeerError",
    "Piece": "moeflux.text.generate:Piece",
    "Plan": "moeflux.runtime.plan_table:Plan",
    "QuantFormat": "moeflux._core:QuantFormat",
    "Refused": "moeflux.errors:Refused",
    "Reply": "moeflux.text.conversation:Reply",
    "Sampling": "moeflux.text.sampling:Sampling",
    "Session": "moeflux.session:Session",
    "Snapshot": "moeflux.runtime.snapshot:Snapshot",
    "SnapshotError": "moeflux.errors:SnapshotError",
    "StateError": "moeflux.errors:StateError",
    "StepStats": "moeflux._core:StepStats",
    "Store": "moeflux.stores.store:Store",
    "Variant": "moeflux.models.variants:Variant",
    "__version__": "moeflux._core:__version__",
    "available_isas": "moeflux._core:isas",
    "builtin": "moeflux.models.builtin",
    "convert": "moeflux.conversion.convert:convert",
    "layers": "moeflux.models.layers",
    "load": "moeflux.loading:load",
    "open_store": "moeflux.stores.store:open_store",
    "ops": "moeflux.ops",
    "oracle": "moeflux.oracle",
    "plan": "moeflux.runtime.plan:plan",
    "serving": "moeflux.serving",
    "synth": "moeflux.conversion.synth:synth",
    "variant_from_config": "moeflux.models.config:variant_from_config",
    "verify": "moeflux.conversion.verify:verify",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, original = _HOMES[name].partition(":")
    value = getattr(import_module(home), original) if original else import_module(home)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
