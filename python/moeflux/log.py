"""What a service wants to know, under the logger `moeflux`: which models are loaded and closed, by which plan, and what
falls back to what. It is silent unless the program asks for it, as with logging.basicConfig(level="INFO")."""

from __future__ import annotations

import logging

__all__ = ["LOG"]

LOG = logging.getLogger("moeflux")
LOG.addHandler(logging.NullHandler())
