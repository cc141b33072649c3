"""Lets asyncio programs await calls that compute for a long time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from moeflux.errors import refusals

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(call: Callable[[], T], cancel: Callable[[], object]) -> T:
    """Makes the call in a thread of the event loop's pool, and gives its result. When the task that awaits it is
    cancelled, `cancel` is called, and the task goes on only after the call has ended."""
    import asyncio

    with refusals("a call that is awaited"):
        work = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancel()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at: nobody else will
        raise
