"""What this disk and this machine can do, measured with the engine's own reads: the content of `moeflux doctor`."""

from __future__ import annotations

from moeflux.remembered import Probe, remembered

__all__ = ["Probe", "remembered"]
