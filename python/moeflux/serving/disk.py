"""States of conversations that nobody used for a while, as files in a folder of their own.

A file is a saved session: safetensors with checksums and the fingerprint of the model. Its name is a keyed hash of the
tokens, so it says nothing about them, and nobody without the folder's key can try what they were. Files that are
damaged, or of another model, are left alone until they are old. Several processes may use a folder at the same time,
also on a disk that several machines share: each finds what the others have written.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moeflux import files
from moeflux._core import SafetensorsFile
from moeflux.errors import Error
from moeflux.log import LOG
from moeflux.runtime.state_file import load_state, save_state, state_file_bytes
from moeflux.serving.protocols import ServedModel, ServedSession

__all__ = ["DiskTier"]

KEY = "key"
KEY_BYTES = 32
LOOK_SECONDS = 2.0
"""How often it is looked for what others have written."""
NAME = re.compile(r"[0-9a-f]{64}\.session")

Made = TypeVar("Made")


@dataclass
class Stored:
    """A file, or one that is being written."""

    position: int  # 0: it is no state that could be read
    bytes: int
    used: float  # when it was written or last read; by a clock that nobody sets


class DiskTier:
    """Called by one thread. Reading and writing is done by another, one file at a time. Sessions are that thread's
    meanwhile, so that no copy of a state is ever in memory."""

    def __init__(
        self,
        folder: str | Path,
        model: ServedModel,
        identity: str,
        quota: int,
        age: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`identity` is of the model and its arithmetic: states of another one are not found. Files older than `age`
        seconds go, and those unused for longest when there are more than `quota` bytes. `wake` is called, in any
        thread, when something was read or written."""
        self.folder = files.make_private_folder(files.expanded(folder))
        self._model = model
        self._wake = wake
        self._quota = quota
        self._age = age
        self._root = hmac.new(self._key(), identity.encode(), "sha256").digest()
        self._stored: dict[str, Stored] = {}
        self._damaged: set[str] = set()  # files that are there and could not be read
        self._looked = 0.0  # when
        self._writing: list[Future[list[str]]] = []  # the names of those that could not be written
        self._thread = ThreadPoolExecutor(1, "moeflux-disk")
        self._look()

    # ---- What is there ------------------------------------------------------------------------------------------

    def _key(self) -> bytes:
        path = self.folder / KEY
        if files.exists(path) and files.size_of(path) != KEY_BYTES:
            LOG.warning("%s: expected a key of %d bytes, found another file: a new one is made", path, KEY_BYTES)
            files.remove(path)
        if not files.exists(path):
            files.write_atomically(path, [secrets.token_bytes(KEY_BYTES)], private=True, first=True)
        return files.read_bytes(path, KEY_BYTES)

    def _look(self) -> None:
        """Learns which states there are by the directory of each file, but for those that it knows. Old files go."""
        first, self._looked = self._looked == 0.0, time.monotonic()
        files.sweep(self.folder)
        found = [path for path in files.listed(self.folder) if not files.is_partial(path)]
        names = {path.name for path in found}
        self._damaged &= names
        if not self._writing:
            self._stored = {name: stored for name, stored in self._stored.items() if name in names}
        for path in found:
            if path.name == KEY or path.name in self._stored or path.name in self._damaged:
                continue
            if not NAME.fullmatch(path.name):
                if first:
                    LOG.warning("%s: expected saved states only, found something else, which is left alone", path)
                continue
            try:
                size, changed = files.size_and_time(path)
                unused = time.time() - changed / 1e9
                if unused < 0:  # the times of files are of the system's clock, which was set back
                    files.touch(path)
                    unused = 0.0
                self._stored[path.name] = Stored(0, size, time.monotonic() - unused)
                if unused > self._age:
                    LOG.info("%s: removed, unused for more than %.0f s", path.name, self._age)
                    del self._stored[path.name]
                    files.remove(path)
                    continue
                position = SafetensorsFile(path).metadata.get("position", "")
                if position.isascii() and position.isdigit() and len(position) < 10:
                    self._stored[path.name].position = int(position)
            except Error as error:
                LOG.warning("a saved state is ignored: %s", error)
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def bytes(self) -> int:
        return sum(stored.bytes for stored in list(self._stored.values()))  # another thread may ask

    @property
    def busy(self) -> bool:
        """Whether a state is being written. Its session's memory comes back when it is."""
        self._hear()
        return bool(self._writing)

    def _hear(self) -> None:
        """What became of what was to be written."""
        over = [written for written in self._writing if written.done()]
        self._writing = [written for written in self._writing if written not in over]
        for name in itertools.chain.from_iterable(written.result() for written in over):
            self._stored.pop(name, None)

    def find(self, ids: np.ndarray) -> int:
        """The longest part of a text, but for its last token, of which there is a state; 0 when there is none."""
        self._hear()
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._look()
        positions = sorted({each.position for each in self._stored.values() if 0 < each.position < len(ids)})
        names = self._names(ids, positions)
        return max((position for position, name in names.items() if name in self._stored), default=0)

    def has(self, ids: np.ndarray) -> bool:
        return self._names(ids, [len(ids)])[len(ids)] in self._stored

    def _names(self, ids: np.ndarray, positions: list[int]) -> dict[int, str]:
        """Of the files for the first so many tokens, ascending."""
        running, begin, names = hashlib.blake2b(key=self._root, digest_size=32), 0, {}
        for position in positions:
            running.update(ids[begin:position].astype("<i4").tobytes())
            names[position], begin = f"{running.copy().hexdigest()}.session", position
        return names

    # ---- Reading and writing ------------------------------------------------------------------------------------

    def fetch(self, session: ServedSession, ids: np.ndarray) -> Future[bool]:
        """Begins to bring a session, which has room for it, to the state behind these tokens. False when its file turns
        out to be none: then it is not looked for again, and goes when it is old."""
        name = self._names(ids, [len(ids)])[len(ids)]
        if name in self._stored:  # else somebody else has removed it meanwhile
            self._stored[name].used = time.monotonic()
        return self._begin(self._read, name, session, ids)

    def _read(self, name: str, session: ServedSession, ids: np.ndarray) -> bool:
        path = self.folder / name
        try:
            load_state(session._core, self._model.variant, self._model.fingerprint, path, ids)
            files.touch(path)
        except Error as error:
            LOG.warning("a saved state is ignored: %s", error)
            return False
        return True

    def forget(self, ids: np.ndarray) -> None:
        """The state behind these tokens could not be read."""
        name = self._names(ids, [len(ids)])[len(ids)]
        self._stored.pop(name, None)
        self._damaged.add(name)

    def save(self, session: ServedSession, positions: Sequence[int]) -> None:
        """Takes a session over. Begins to write its states at these positions, descending, to which it can go back, and
        closes it then. They are found from now on."""
        names = self._names(np.asarray(session.tokens, np.int32), sorted(positions))
        new: dict[int, str] = {}
        for position in positions:
            size = state_file_bytes(self._model.variant, self._model.fingerprint, session.kv_dtype, position)
            if names[position] not in self._stored and size <= self._quota:
                new[position] = names[position]
                self._make_room(size)
                self._damaged.discard(names[position])
                self._stored[names[position]] = Stored(position, size, time.monotonic())
        self._writing.append(self._begin(self._write, session, new))

    def _write(self, session: ServedSession, new: dict[int, str]) -> list[str]:
        """Returns the names of those that could not be written."""
        try:
            return [name for position, name in new.items() if not self._write_one(session, position, name)]
        finally:
            session.close()

    def _write_one(self, session: ServedSession, position: int, name: str) -> bool:
        try:
            session.rewind(position)
            save_state(session._core, self._model.variant, self._model.fingerprint, self.folder / name)
        except Error as error:
            LOG.warning("a state is not saved: %s", error)
            return False
        return True

    def _begin(self, task: Callable[..., Made], *arguments: Any) -> Future[Made]:
        begun = self._thread.submit(task, *arguments)
        begun.add_done_callback(lambda _: self._wake())
        return begun

    def _make_room(self, size: int) -> None:
        """Removes the states unused for longest until so many bytes more are within the quota."""
        oldest = sorted(self._stored, key=lambda name: self._stored[name].used)
        left = self._quota - self.bytes
        for name in oldest:
            if left >= size:
                return
            left += self._stored.pop(name).bytes
            self._begin(self._remove, name)

    def _remove(self, name: str) -> None:
        try:
            files.remove(self.folder / name)
        except Error as error:
            LOG.warning("a saved state stays: %s", error)

    def settle(self) -> None:
        """Waits until everything is written."""
        for written in self._writing:
            written.result()

    def close(self) -> None:
        """The same, for good."""
        self._thread.shutdown()
        self._hear()
