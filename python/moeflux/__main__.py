"""The process of the command `moeflux`, also as `python -m moeflux`: from before anything of it is imported until
after its last word, a Ctrl-C is a line and status 130."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["program"]

INTERRUPTED = 130


def program() -> int:
    """Runs the command line of this process and returns its exit status."""
    try:
        _open_standard_streams()
        from moeflux.cli import main

        status = main()
    except BaseException as error:
        if not _comes_of_ctrl_c(error):
            raise
        status = INTERRUPTED
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("moeflux: interrupted", file=sys.stderr)
    # What was to be done is done: nothing is left to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _comes_of_ctrl_c(error: BaseException | None) -> bool:
    """An import that is interrupted may end in another error: that of a module of which half is missing."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _open_standard_streams() -> None:
    """Who starts it may have closed the standard streams. Then a file of ours would get their number and what is meant
    for a terminal be written into it; so a device takes the place. What is read from a closed input, or written to a
    closed output, is an error as it would be of the system. What is said to a closed stderr is said to nobody."""
    missing = {0: os.O_WRONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}  # the wrong way round, but for stderr
    for number, mode in missing.items():
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free: this one
    # Python has none for those that were closed.
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    sys.exit(program())
