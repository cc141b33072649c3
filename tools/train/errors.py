"""What a user did wrong, as one sentence. `__main__` prints it and exits with status 2."""

from __future__ import annotations


class TrainingError(Exception):
    pass
