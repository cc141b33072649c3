"""Tells the logger when the engine finds out that looking ahead pays, or that it does not."""

from __future__ import annotations

import logging

from moeflux._core import Session, StepStats
from moeflux.log import LOG

__all__ = ["LookAheadNotes"]


class LookAheadNotes:
    """Of one model. A session of it comes by after each call. It logs a finding once, until another follows."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._pays: dict[str, bool] = {}

    def note(self, session: Session) -> None:
        if LOG.isEnabledFor(logging.INFO):
            self.note_stats(session.last)

    def note_stats(self, last: StepStats) -> None:
        """The same, of what is known of a call already."""
        if not LOG.isEnabledFor(logging.INFO):
            return
        for name, pays in (("look-ahead", last.look_ahead_pays), ("speculation", last.drafts_pay)):
            if pays is None or pays == self._pays.get(name):
                continue
            self._pays[name] = pays
            found = "on: steps are faster with it" if pays else "off: steps are no faster with it"
            LOG.info("%s: %s is %s", self._model, name, found)
