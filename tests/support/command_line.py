"""The commands that there are."""

from __future__ import annotations

import argparse

from moeflux import cli

__all__ = ["commands"]


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)
