"""The process of the command `moeflux`, also as `python -m moeflux`. From before its first import until after its last
output, a Ctrl-C gives one line and status 130."""

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
    # The work is done: nothing is left to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _comes_of_ctrl_c(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error. An interrupted import may end in another one: half of a module is missing."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _open_standard_streams() -> None:
    """Opens a device in place of each standard stream that is closed. Otherwise a file of ours would get the number of
    the stream, and text meant for a terminal would be written into it. Reading a closed input or writing to a closed
    output is an error, as it would be of the system. Text for a closed stderr goes nowhere."""
    missing = {0: os.O_WRONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}  # the wrong way round, except for stderr
    for number, mode in missing.items():
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free: this one
    # Python has no stream for those that were closed.
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


if __name__ == "__main__":
    sys.exit(program())
