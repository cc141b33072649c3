"""A loaded model: `load` opens a store and brings its dense weights into memory; `Model` makes sessions."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from moeflux import _core
from moeflux.errors import StateError
from moeflux.remembered import remembered
from moeflux.session import Session
from moeflux.store import Store, open_store
from moeflux.trace import Recording
from moeflux.variants import Variant

if TYPE_CHECKING:
    from moeflux.chat import ChatFormat
    from moeflux.conversation import Conversation
    from moeflux.sampling import Sampling
    from moeflux.tokenizer import Tokenizer

__all__ = ["Model", "load"]


class Model:
    """Immutable and shared: any number of sessions, in any threads, may use one model; their calls take turns."""

    def __init__(self, store: Store, engine: _core.Engine) -> None:
        self.variant: Variant = store.variant
        self.path: Path = store.path
        self.fingerprint: str = store.fingerprint
        self.expert_bytes: int = store.directory.experts.bytes
        self._recorded = threading.Lock()  # while somebody records its routing
        self._engine = engine

    def session(self, max_context: int | None = None, kv_dtype: str = "f32") -> Session:
        """A new timeline. Keys and values of up to `max_context` tokens are kept, as "f32" or "bf16".

        Without `max_context`: the model's own limit, at most 32768. The system gives memory as positions are used.
        """
        if kv_dtype not in ("f32", "bf16"):
            raise StateError(f'kv_dtype: expected "f32" or "bf16", found {kv_dtype!r:.40}')
        return Session(self, self._engine.session(_asked("max_context", max_context), kv_dtype), kv_dtype)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held now, by what they are for: by the model, and by the sessions there are."""
        held = self._engine.memory
        return {
            "dense weights": held.dense_weights,
            "expert slots": held.expert_slots,
            "scratch": held.scratch,
            "read buffers": held.read_buffers,
            "sessions": held.sessions,
        }

    def chat(self, *, system: str | None = None, thinking: bool | None = None, **options: Any) -> Conversation:
        """A conversation in a session of its own. `thinking`: whether it should think before it answers, where its
        template lets one choose. `options` are those of moeflux.conversation.Conversation."""
        from moeflux.conversation import Conversation

        return Conversation(self, system=system, thinking=thinking, **options)

    def trace(self) -> Recording:
        """Records which experts the router picks, for use with `with`. See moeflux.trace."""
        return Recording(self)

    # ---- Text: from the other files of the folder, read when they are first asked for ------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from moeflux.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.path)

    @cached_property
    def chat_format(self) -> ChatFormat | None:
        """How it wants conversations written; None when it has no template."""
        from moeflux.chat import ChatFormat

        return ChatFormat.from_folder(self.path, self.tokenizer)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        from moeflux.tokenizer import end_tokens

        return end_tokens(self.path, self.tokenizer)

    @cached_property
    def usual_sampling(self) -> Sampling:
        """As those who made the model want its tokens chosen."""
        from moeflux.sampling import Sampling

        return Sampling.usual(self.path)

    def __repr__(self) -> str:
        lossy = "".join(f", LOSSY: {sentence}" for sentence in self.variant.lossy)
        return f"Model({self.variant.name}, {self._engine.describe()}{lossy})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model cannot be pickled: open the store in the other process with moeflux.load")


def load(
    path: str | Path,
    *,
    backend: str = "auto",
    threads: int | None = None,
    isa: str | None = None,
    readers: int | None = None,
    expert_slots: int | None = None,
    ring_depth: int = 2,
    chunk: int | None = None,
    reads: Literal["auto", "direct", "buffered"] = "auto",
    cache: Literal["lru", "lfu", "none"] = "lru",
    look_ahead: Literal["auto", "on", "off"] = "auto",
    verify_reads: bool = False,
    experts_per_token: int | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> Model:
    """Opens the store at `path` (packed, or a stock MLX folder) for evaluation.

    threads       that compute; all cores by default
    isa           CPU kernels: "portable", "avx2", "avx512" or "neon"; the best one by default (or MOEFLUX_ISA)
    readers       threads that read experts from disk; what `moeflux doctor` found best for this disk, else 4
    expert_slots  experts held in memory; all of them by default. Fewer changes the speed and not one bit of the result
    ring_depth    expert batches in flight
    chunk         most tokens of a prefill step; 512 by default
    reads         of experts: "direct", past the page cache; "buffered", through it; "auto": direct where the file
                  system can, when not every expert has a slot or the experts exceed half of the memory that is free;
                  buffered where `moeflux doctor` found that faster
    cache         which expert goes when a slot is needed: the one unused for longest ("lru"), the one used least
                  ("lfu"), or every one as soon as it is computed ("none")
    look_ahead    read what the next layer will likely need while this one computes: "on", "off", or "auto": while
                  tokens come faster with it than without
    verify_reads  every expert against the SHA-256 in moeflux.json, whenever it is read: IoError when it differs
    experts_per_token   LOSSY: another number of experts than the model's own
    on_progress   (done, total) of the bytes that are read at once, now and then; when it returns False, StateError

    Of all these only `isa` (and the lossy one) may change a result. With the same kernels the same tokens give the same
    bits, whatever the rest, and however they are cut into calls and chunks: `step` is a prefill of one token, and a
    prefill that was stopped and goes on ends where the unbroken one does. A large chunk reads an expert once for many
    tokens; a small one needs less scratch and hears of Ctrl-C sooner.
    """
    with open_store(path, experts_per_token=experts_per_token) as store:
        known = remembered(store.expert_files[0])
        if known and readers is None:
            readers = known.readers
        if known and reads == "auto" and known.reads == "buffered":
            reads = "buffered"  # where direct reads are better "auto" takes them, but when everything has a slot
        engine = _core.Engine(
            store.directory,
            backend=backend,
            isa=isa or "",
            threads=_asked("threads", threads),
            readers=_asked("readers", readers),
            expert_slots=_asked("expert_slots", expert_slots),
            ring_depth=_asked("ring_depth", ring_depth),
            chunk=_asked("chunk", chunk),
            reads=_word("reads", reads),
            cache=_word("cache", cache),
            look_ahead=_word("look_ahead", look_ahead),
            checksums=_checksums(store) if verify_reads else None,
            on_progress=on_progress,
        )
        return Model(store, engine)


def _word(name: str, word: str) -> str:
    """Text as the engine wants it, which knows the words there are."""
    if not isinstance(word, str):
        raise StateError(f"{name}: expected a word, found {word!r:.40}")
    return word


def _checksums(store: Store) -> dict[int, list[str]]:
    return store.description.expert_sha256 if store.description else {}


def _asked(name: str, count: int | None) -> int:
    """A number as the engine wants it: 0 where the choice is left to it. What is too large, it says itself."""
    if count is None:
        return 0
    if isinstance(count, bool) or not hasattr(count, "__index__") or not 1 <= operator.index(count) < 1 << 31:
        raise StateError(f"{name}: expected a whole number of at least 1, found {count!r:.40}")
    return operator.index(count)
