"""A loaded model: `load` opens a store and brings its dense weights into memory; `Model` makes sessions."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import numpy as np

from moeflux import _core
from moeflux._core import Cancel
from moeflux.errors import ArgumentError, BudgetError, Error, StateError, found, refusals
from moeflux.living import Living
from moeflux.log import LOG
from moeflux.machine.cuda_kernels import make_kernels
from moeflux.machine.memory import resident
from moeflux.models.hub import find_model
from moeflux.models.variants import Variant
from moeflux.progress import Logged
from moeflux.runtime.held import Memory, Slots
from moeflux.runtime.logits import Logits
from moeflux.runtime.look_ahead import LookAheadNotes
from moeflux.runtime.options import LoadOptions, resolved, whole_number, words_of
from moeflux.runtime.plan import DEFAULT_CONTEXT, LOADED, make_plan, price, pricing
from moeflux.runtime.plan_table import ENGINE_PARTS, SESSION_PARTS, Plan
from moeflux.runtime.recording import Activations, Counting, Recording
from moeflux.runtime.tokens import Tokens, token_array
from moeflux.session import Session
from moeflux.sizes import size_text
from moeflux.stores.store import Store, open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moeflux.text.chat import ChatFormat
    from moeflux.text.conversation import Conversation
    from moeflux.text.model_text import ModelText
    from moeflux.text.sampling import Sampling
    from moeflux.text.tokenizer import Tokenizer

__all__ = ["Memory", "Model", "Slots", "load"]

LOADING = threading.RLock()
Work = Sequence[tuple[Session, Tokens] | tuple[Session, Tokens, np.ndarray | None]]
"""Sessions and their tokens, and the hidden rows of these where a model has not the first layers."""


class Model:
    """A model is immutable and shared. Any number of sessions, in any threads, may use it; their calls take turns.

    `close`, or the end of its `with`, gives its memory back; so does the end of the last reference to it or to one of
    its sessions.
    """

    def __init__(self, store: Store, engine: _core.Engine, plan: Plan | None = None, precision: str = "auto") -> None:
        # What decides about the bits of a result, besides the weights, the tokens and a session's kv_dtype.
        self.arithmetic = f"{engine.describe().partition(',')[0]}, {precision}"
        self.variant: Variant = store.variant
        self.path: Path = store.path
        self.fingerprint: str = store.fingerprint
        self.expert_bytes: int = store.directory.experts.bytes
        self._recorded = threading.Lock()  # while somebody records its routing
        self._open: _core.Engine | None = engine  # None: closed
        self._sessions: Living[Session, None] = Living()
        self._plan = plan
        self._notes = LookAheadNotes(self.variant.name)

    # ---- Being open ---------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> _core.Engine:
        engine = self._open  # another thread may close it now
        if engine is None:
            raise StateError(f"{self.path}: expected a model that is open, found it closed")
        return engine

    @property
    def closed(self) -> bool:
        return self._open is None

    @property
    def ready(self) -> bool:
        """Whether calls go through now: over several machines, not while one of them is started again."""
        return True

    @property
    def layers(self) -> tuple[int, int]:
        """The layers that it has: the first, and one past the last. `moeflux.load(..., layers=...)` says which."""
        return self._engine.layers

    @property
    def width(self) -> int:
        """Numbers of a hidden row."""
        return self._engine.width

    def close(self) -> None:
        """Closes the model's sessions and gives all memory back, as the end of its `with` does. Calls under way in
        other threads are finished first. Whatever evaluates afterwards gets StateError."""
        if self._open is not None:
            LOG.info("%s: closed", self.path)
        self._open = None
        for session, _ in self._sessions.items():
            session.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- Sessions and memory ------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that the model was loaded by: where every byte goes."""
        if self._plan is None:
            raise StateError("plan: expected a model that moeflux.load made, found one made by hand")
        return self._plan

    def session(self, max_context: int | None = None, kv_dtype: str | None = None) -> Session:
        """A new timeline. It keeps keys and values of up to `max_context` tokens, as "f32" or "bf16".

        Both default to what the plan has. All sessions share the memory that the plan has for them, and what the budget
        has left: keys and values take it as positions are used, 256 at a time, and give it back when they are not. So
        there may be more sessions than planned, or longer ones. BudgetError when the session could not be filled even
        if the others were empty. When it finds no memory later, `prefill` or `step` is a BudgetError, and the session
        is as it was.
        """
        if max_context is None and self._plan:
            max_context = self._plan.context
        if kv_dtype is None:
            kv_dtype = self._plan.kv_dtype if self._plan else "f32"
        if kv_dtype not in words_of("kv_dtype"):
            raise ArgumentError(f'kv_dtype: expected "f32", "bf16" or "q8", found {kv_dtype!r:.40}')
        rows = whole_number("max_context", max_context, self.variant.max_context) or 0
        with refusals(f"session of {rows or self.variant.max_context} tokens"), pricing(self._plan):
            core = self._engine.session(rows, kv_dtype)
            session = Session(self, core, kv_dtype, self._plan, self._notes, self._sessions)
        if self.closed:  # meanwhile, by another thread
            session.close()
        return session

    @overload
    def evaluate(
        self, work: Work, logits: Literal["last"] = "last", *, cancel: Cancel | None = None
    ) -> list[Logits]: ...
    @overload
    def evaluate(self, work: Work, logits: Literal["all"], *, cancel: Cancel | None = None) -> list[np.ndarray]: ...
    @overload
    def evaluate(self, work: Work, logits: Literal["none"], *, cancel: Cancel | None = None) -> None: ...
    def evaluate(
        self, work: Work, logits: str = "last", *, cancel: Cancel | None = None
    ) -> list[Logits] | list[np.ndarray] | None:
        """Evaluates tokens of several sessions in one go: `work` is a (session, tokens) for each. Every session is
        then where its own `prefill` of these tokens would have taken it, to the same bits.

        All tokens go through a matrix together, and an expert is read once for all of them, so eight sessions cost much
        less than eight calls. The result has, in the same order, the logits of each session's last token; with
        logits="all" those of all its tokens, float32 [tokens, vocab]; with "none" nothing, and the sessions have none.
        The `stats` of each session are those of the whole call, but for `tokens`, which are its own.

        What fails leaves each session where it was: a session that is in use, twice in the work or of another model, an
        empty pool (BudgetError), a read, a device, `cancel` or Ctrl-C. With recurrent layers, going back takes what it
        takes in `prefill`. The error names the sessions that cannot, and these are unusable until they are cleared or
        restored. Logits that are not finite break their session alone: the call raises an Error that names it, and
        the others have gone on.

        Of a model without the first layers, `work` has (session, tokens, hidden) for each: the hidden rows of these
        tokens that `evaluate_hidden` of the layers before gave.
        """
        if logits not in ("last", "all", "none"):
            raise ArgumentError(f'logits: expected "last", "all" or "none", found {logits!r:.40}')
        vocab = self.variant.vocab_size
        if logits == "last" and (made := self._evaluate_step(work, cancel)) is not None:
            return made
        with refusals("evaluate"):
            checked = [_checked(place, each) for place, each in enumerate(work)]
        rows = sum(len(each.ids) for each in checked) if logits == "all" else 0
        with refusals(f"evaluate: logits of {rows} tokens x {vocab}"):
            every = [np.empty((len(each.ids), vocab), np.float32) for each in checked if rows]
        serials = self._evaluate(_with_room(checked, every), logits != "none", cancel)
        if logits == "all":
            return every
        if logits == "last":
            return [each.session._logits(serial) for each, serial in zip(checked, serials, strict=True)]
        return None

    def make_decoder(self, rows: int = 0) -> Any:
        """What evaluates requests side by side, as `moeflux.serving.protocols.Decoder` has it."""
        return _core.Decoder(self._engine, rows)

    def evaluate_hidden(self, work: Work, *, cancel: Cancel | None = None) -> list[np.ndarray]:
        """As `evaluate`, with a model that has not the last layers: instead of logits, it has the hidden rows of all
        tokens for each session, float32 [tokens, width]. They are for the model that has the layers behind these."""
        with refusals("evaluate_hidden"):
            checked = [_checked(place, each) for place, each in enumerate(work)]
        with refusals(f"evaluate_hidden: rows of {sum(len(each.ids) for each in checked)} tokens x {self.width}"):
            every = [np.empty((len(each.ids), self.width), np.float32) for each in checked]
        if self.layers[1] == self.variant.num_layers:
            raise StateError("evaluate_hidden: expected a model without the last layer, found one that has logits")
        self._evaluate(_with_room(checked, every), False, cancel)
        return every

    def _evaluate_step(self, work: Work, cancel: Cancel | None) -> list[Logits] | None:
        """If each session has one token, as in a list of (session, [token]). The device waits for all that is done here
        for each of them."""
        engine = self._open
        if not isinstance(engine, _core.Engine):  # over several machines or GPUs, or closed, which is told elsewhere
            return None
        try:  # no `with`: it would take microseconds
            serials = engine.evaluate_step(work, Session, cancel)
        except BudgetError as error:
            price(error, self._plan)
            raise
        if serials is None:
            return None
        vocab = self.variant.vocab_size
        made = [Logits(piece[0], vocab, serial) for piece, serial in zip(work, serials, strict=True)]
        self._notes.note(made[0]._session._core)
        return made

    def _evaluate(self, pieces: Sequence[_Given], logits: bool, cancel: Cancel | None) -> list[int]:
        """Returns the serials of the sessions' logits."""
        try:
            done = self._engine.evaluate(pieces, logits, cancel)
        except BudgetError as error:
            price(error, self._plan)
            raise
        self._notes.note(pieces[0][0])
        broken = [f"work[{place}]: {failure}" for place, (_, failure) in enumerate(done) if failure]
        if broken:
            raise Error("; ".join([*broken, "the other sessions have gone on"]))
        return [serial for serial, _ in done]

    @property
    def memory(self) -> Memory:
        """What is really held, beside what was planned."""
        held = self._engine.memory
        now = resident()
        return Memory(
            planned=dict(self._plan.parts) if self._plan else {},
            held={name: getattr(held, field) for name, field in (ENGINE_PARTS | SESSION_PARTS).items()},
            budget=self._plan.budget_bytes if self._plan else None,
            resident=now.now,
            peak=now.peak,
            device_planned=dict(self._plan.device_parts) if self._plan else {},
            device_held=self._engine.held_by_device,
            device_budget=self._plan.device_budget_bytes if self._plan else None,
            slots={where: Slots(count, filled) for where, count, filled in self._engine.slots},
        )

    def chat(self, *, system: str | None = None, thinking: bool | None = None, **options: Any) -> Conversation:
        """A conversation in a session of its own. `thinking` says whether the model should think before it answers, if
        its template lets one choose. `options` are those of moeflux.text.conversation.Conversation."""
        from moeflux.text.conversation import Conversation

        return Conversation(self, system=system, thinking=thinking, **options)

    def trace(self) -> Recording:
        """Records which experts the router picks, for use with `with`. See moeflux.runtime.recording."""
        return Recording(self._engine, self._recorded, self.variant, self.fingerprint, self.expert_bytes)

    def count_experts(self) -> Counting:
        """Counts how often the router picks each expert, for use with `with`. See moeflux.runtime.recording."""
        return Counting(self._engine, self._recorded)

    def observe_activations(self) -> Activations:
        """Adds up the squares of what each matrix is multiplied with, for use with `with`: what `moeflux convert
        --calibrate` goes by. DeviceError where the host does not see them, which is everywhere but on the CPU."""
        return Activations(self._engine, self._recorded, self.path)

    # ---- Text: from the other files of the folder, read when they are first asked for ------------------------------

    @cached_property
    def _text(self) -> ModelText:
        from moeflux.text.model_text import ModelText

        return ModelText(self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer. Without one, tokens go in and out."""
        return self._text.has_tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def chat_format(self) -> ChatFormat | None:
        """How the model wants conversations written; None when it has no template."""
        return self._text.chat_format

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""
        return self._text.end_tokens

    @property
    def default_sampling(self) -> Sampling:
        """How the makers of the model want its tokens chosen."""
        return self._text.default_sampling

    def __repr__(self) -> str:
        lossy = "".join(f", LOSSY: {sentence}" for sentence in self.variant.lossy)
        engine = self._open
        return f"Model({self.variant.name}, {'closed' if engine is None else engine.describe()}{lossy})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model cannot be pickled: open the store in the other process with moeflux.load")


def load(
    name: str | Path | None = None,
    *,
    on_progress: Callable[[int, int], object] | None = None,
    **options: Unpack[LoadOptions],
) -> Model:
    """Opens a model for evaluation. `name` is a folder (a packed store, or MLX as it is), a GGUF file, or a repository
    on huggingface.co as owner/name, which is downloaded once; of its GGUF files, one is named as owner/name:Q4_K_M or
    as owner/name/FILE.gguf. @revision may follow. Without a name, the built-in model opens.

    memory        the most that this process may have in physical memory: bytes, or "8GB", "8GiB"; BudgetError below the
                  floor. "auto": what is free now, less a reserve, within the limits of control groups. None: no limit;
                  every expert gets a slot
    context       tokens that a session has room for; by default the model's own limit, at most 32768, and less if
                  experts need the memory
    sessions      how many sessions of a whole context the plan has room for. More may be made: all share that room and
                  what the budget has left, and take of it what they use
    kv_dtype      type of keys and values: "f32", "bf16" at half the memory, or "q8" at a quarter: codes of 8 bits with
                  a scale for each head of a row. LOSSY: the last two; `moeflux eval` measures what they cost
    backend       "cpu", "metal" (Apple silicon), "cuda" (NVIDIA), or "auto": what MOEFLUX_BACKEND says, else the GPU
                  where it works
    device        which of several GPUs, by the number that the driver gives it; by default the first, 0
    threads       CPU threads that compute; by default one per core
    isa           instruction set of the CPU kernels, one of `moeflux.available_isas()`; by default MOEFLUX_ISA, else
                  the best
    precision     of activations that meet quantised matrices. "auto": where the codes of these are whole numbers, a CPU
                  (AVX2, AVX-512, AMX, NEON) makes activations whole numbers of 16 bits, with a unit for each group of
                  columns that shares a scale. That is some eighty times finer than bf16. Elsewhere they are float32, as
                  they are for codes E4M3 (FP8, MXFP8). Where there is AMX, attention over bf16 rows takes queries and
                  weights as sums of two bf16 numbers, 16 bits.
                  "exact": float32 everywhere
    readers       threads that read experts from disk; by default what `moeflux doctor` found best for it, else 4, or
                  up to 12 where a GPU has memory of its own and there are as many cores
    expert_slots  experts held in memory; by default as many as the budget has room for. This changes the speed and not
                  one bit of the result
    device_memory where a GPU has memory of its own, the most of it that the model may take: bytes, "24GB"; "auto": what
                  is free there, less a margin; None: no limit. Then `memory` is for the host's memory alone
    host_slots    there, experts held in the host's memory, from where they are copied when the GPU needs them; by
                  default as many as `memory` has room for
    ring_depth    expert batches that may be in flight
    chunk         tokens in a chunk of prefill, at most; by default 512, 4096 on a GPU that holds all experts, or fewer
                  or more as the budget allows
    reads         how experts are read: "direct", past the page cache; "buffered", through it, which is memory that
                  nobody counts and everybody can have. "auto": direct, if the file system can, when not every expert
                  has a slot (unless doctor found buffered reads faster) or when the experts would crowd out others
    cache         which expert goes when a slot is needed: the one unused for longest ("lru"), the one used least
                  ("lfu"), or every one as soon as it is computed ("none")
    look_ahead    read what the next layer will likely need while this one computes: "on", "off", or "auto": while
                  tokens come faster with it than without
    cpu_experts   with host slots, whether the CPU computes experts of a token that lie there, so that they need not be
                  moved to the GPU: "off"; "all"; "auto": where that is faster than the bus, as many as it can while
                  the others are moved. How fast both are is measured when the model is loaded. The CPU has the bits
                  of the GPU
    speculate     evaluate the tokens that are likely to come next together with the one before them. Those that come
                  are then there already. "lookup": what followed the last tokens where they stood before in the text;
                  "mtp": what the model's own layer for that says, if `moeflux convert --mtp` has kept it; "auto": that
                  layer, or lookup without it, as many drafts as bring tokens fastest; "off", the default
    verify_reads  compare every expert with the SHA-256 in moeflux.json whenever it is read: IoError when it differs
    layers        (first, last): only the layers from the first to the one before the last, or to the end if that is 0.
                  Such a model takes and gives hidden rows: see `Model.evaluate_hidden`. By default all layers
    experts_per_token   LOSSY: another number of experts than the model's own
    on_progress   called now and then with (done, total) of the bytes that loading reads; when it returns False, loading
                  ends with a StateError

    Only `isa`, `precision`, `kv_dtype` and the lossy option may change a result. With these the same, the same tokens
    give the same bits, whatever the other options are and however the tokens are cut into calls and chunks: `step` is a
    prefill of one token, and a prefill that was stopped and goes on ends where the unbroken one does. A large chunk
    reads an expert once for many tokens. A small chunk needs less scratch and notices Ctrl-C sooner.
    """
    asked = resolved(options)
    _held = _core.held_device(asked["backend"], asked["device"])
    if asked["backend"] == "auto" and (failure := _core.device_failure()):
        LOG.warning("%s", failure)
        warnings.warn(failure, stacklevel=2)
    started = time.perf_counter()
    folder = find_model(name, Logged())
    experts = asked["experts_per_token"]
    with refusals(f"loading {folder}"), LOADING, open_store(folder, experts_per_token=experts) as store:
        checksums = _checksums(store) if asked["verify_reads"] else None
        plan = make_plan(store, asked)
        _log_plan(plan, asked)
        units = _core.kernels_to_compile(
            store.directory,
            backend=asked["backend"],
            device=asked["device"],
            speculate=asked["speculate"],
            layers=asked["layers"] or (0, 0),
            kv_dtype=asked["kv_dtype"],
        )
        make_kernels(units, plan.threads)
        engine = _core.Engine(
            store.directory,
            backend=asked["backend"],
            device=asked["device"],
            isa=asked["isa"] or "",
            precision=asked["precision"],
            threads=plan.threads,
            readers=plan.readers,
            expert_slots=plan.slots,
            host_slots=plan.host_slots,
            ring_depth=whole_number("ring_depth", asked["ring_depth"], 16) or 2,
            chunk=plan.chunk,
            session_bytes=plan.session_limit,
            host_session_bytes=plan.host_session_limit,
            reads=plan.reads,
            cache=asked["cache"],
            look_ahead=asked["look_ahead"],
            cpu_experts=asked["cpu_experts"],
            speculate=asked["speculate"],
            layers=asked["layers"] or (0, 0),
            checksums=checksums,
            on_progress=on_progress,
        )
        LOADED.add(engine, plan)
        LOG.info("%s: loaded in %.2f s: %s", folder, time.perf_counter() - started, engine.describe())
        return Model(store, engine, plan, asked["precision"])


class _Piece(NamedTuple):
    """Of some work: a session, which is open, its tokens, and their hidden rows."""

    session: Session
    core: _core.Session
    ids: np.ndarray
    hidden: np.ndarray | None


_Given = tuple[_core.Session, "np.ndarray", "np.ndarray | None", "np.ndarray | None"]
"""As the engine takes a piece of work: with room for what all of its tokens yield, and their hidden rows."""


def _with_room(checked: Sequence[_Piece], every: Sequence[np.ndarray]) -> list[_Given]:
    """With `every`, if that has a place for each."""
    return [(each.core, each.ids, every[place] if every else None, each.hidden) for place, each in enumerate(checked)]


def _checked(place: int, piece: object) -> _Piece:
    try:
        if not (isinstance(piece, (tuple, list)) and len(piece) in (2, 3) and isinstance(piece[0], Session)):
            raise ArgumentError(f"expected a session and its tokens, found {found(piece)}")
        hidden = piece[2] if len(piece) == 3 else None
        if not (hidden is None or isinstance(hidden, np.ndarray)):
            raise ArgumentError(
                f"expected a session and its tokens, and hidden rows in an array, found {found(hidden)}"
            )
        return _Piece(piece[0], piece[0]._core, token_array(piece[1]), hidden)
    except Error as error:
        error.args = (f"work[{place}]: {error}",)
        raise


def _log_plan(plan: Plan, asked: LoadOptions) -> None:
    """Logs the plan, and what it has less of than was hoped for."""
    budget = "no limit" if plan.budget_bytes is None else f"{size_text(plan.budget_bytes)} ({plan.budget_source})"
    LOG.info(
        "%s: plan: %s of %s, %d of %d experts in memory, %d x %d tokens",
        *(plan.model, size_text(plan.host_bytes), budget, plan.slots, plan.experts, plan.sessions, plan.context),
    )
    if plan.device_parts:
        LOG.info(
            "%s: plan: %s of the device's memory (%s), %d experts in host slots below those",
            *(plan.model, size_text(plan.device_bytes), plan.device_budget_source, plan.host_slots),
        )
    LOG.debug("%s: the whole plan:\n%s", plan.model, plan)
    if asked["reads"] == "auto" and plan.reads == "buffered" and plan.slots < plan.experts:
        LOG.info("%s: reads fall back to the page cache: %s", plan.model, plan.reads_reason)
    if asked["context"] is None and plan.context < DEFAULT_CONTEXT:
        LOG.info("%s: the context is %d tokens, which is what memory or the model allows", plan.model, plan.context)


def _checksums(store: Store) -> dict[int, list[str]]:
    return store.description.expert_sha256 if store.description else {}
