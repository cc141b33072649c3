# Made by `make stubs` from the built module; a test compares it with the module.
"""
The C++ core of moeflux.
"""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import os
import typing

__all__: list[str] = [
    "ActivationMoments",
    "Batch",
    "Cancel",
    "Decoder",
    "DecoderEvent",
    "DeferredRing",
    "DraftGovernor",
    "Engine",
    "ExpertFormats",
    "ExpertLayout",
    "Experts",
    "FarPlace",
    "FaultPlan",
    "FileReader",
    "Footprint",
    "GgufFile",
    "GgufTensor",
    "HeldDevice",
    "Lease",
    "LookAheadGovernor",
    "OpTime",
    "Ops",
    "PrefillGovernor",
    "QuantFormat",
    "ReadBandwidth",
    "ReadBatch",
    "ReadPool",
    "RoutingCounts",
    "RoutingTrace",
    "SafetensorsFile",
    "Sampler",
    "Session",
    "SlotCache",
    "SnapshotSpan",
    "SnapshotWire",
    "StatePieces",
    "StepStats",
    "StoreDirectory",
    "Tensor",
    "TensorEntry",
    "ThreadPool",
    "Xxh64",
    "best_drafts",
    "chosen_backend",
    "chosen_reads",
    "count_routing",
    "cuda_compile",
    "cuda_facts",
    "cuda_kernel_files",
    "cuda_kernel_text",
    "cuda_make",
    "cuda_names",
    "cuda_to_compile",
    "cuda_units",
    "dequantize",
    "device_failure",
    "device_footprint",
    "device_memory",
    "footprint",
    "forget_a_copy",
    "has_own_memory",
    "held_device",
    "isas",
    "kernels_to_compile",
    "metal_compile",
    "metal_facts",
    "metal_shader",
    "metal_shader_files",
    "observe_activations",
    "open_gguf",
    "open_mlx",
    "open_packed",
    "parse_json",
    "parse_snapshot_wire",
    "planned_store",
    "probe_expert_reads",
    "probe_file_reads",
    "quantize",
    "read_json",
    "read_variant",
    "record_routing",
    "replay",
    "required_tensors",
    "sampler_bytes",
    "slot_bytes",
    "snapshot_wire_header",
    "snapshot_wire_layout",
    "state_pieces",
    "supports_direct",
    "testing",
    "variant_identity",
]

class QuantFormat:
    """
    How the numbers of one matrix are stored: affine groups, codes that are floats, GGUF's blocks, or plain elements.
    """
    @staticmethod
    def affine(bits: int, group_size: int, scale_type: str = "BF16") -> QuantFormat: ...
    @staticmethod
    def block_types() -> list[str]: ...
    @staticmethod
    def blocks(name: str) -> QuantFormat: ...
    @staticmethod
    def float_types() -> list[str]: ...
    @staticmethod
    def floats(name: str) -> QuantFormat: ...
    @staticmethod
    def mxfp4() -> QuantFormat: ...
    @staticmethod
    def plain(element: str) -> QuantFormat: ...
    def __eq__(self, arg0: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    def columns_of(self, elements: int) -> int: ...
    def fits(self, columns: int) -> bool: ...
    def row_bytes(self, columns: int) -> int: ...
    def scale_row_bytes(self, columns: int) -> int: ...
    def weight_row_bytes(self, columns: int) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def element(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def has_float_codes(self) -> bool: ...
    @property
    def has_scales(self) -> bool: ...
    @property
    def is_affine(self) -> bool: ...
    @property
    def is_blocks(self) -> bool: ...
    @property
    def is_mxfp4(self) -> bool: ...
    @property
    def is_quantised(self) -> bool: ...
    @property
    def scale_type(self) -> str: ...
    @property
    def whole_columns(self) -> int: ...

class SnapshotSpan:
    """
    One state of one layer in a snapshot.
    """

    __hash__: typing.ClassVar[None] = None  # type: ignore[assignment]
    def __eq__(self, arg0: object) -> bool: ...
    def __repr__(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def part(self) -> str:
        """
        k, v, latent, rope_k, conv or recurrent
        """

class SnapshotWire:
    """
    Where everything lies in a snapshot of wire format 1 or 2.
    """

    __hash__: typing.ClassVar[None] = None  # type: ignore[assignment]
    def __eq__(self, arg0: object) -> bool: ...
    @property
    def bytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def length_offsets(self) -> list[int]:
        """
        Where the i32 number of positions of each full layer lies.
        """
    @property
    def positions(self) -> int: ...
    @property
    def spans(self) -> list[SnapshotSpan]: ...
    @property
    def version(self) -> int: ...

class TensorEntry:
    """
    Where one tensor lies in its file.
    """
    def __repr__(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def offset(self) -> int:
        """
        Where it begins, from the start of the file.
        """
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...

class SafetensorsFile:
    """
    The checked directory of a safetensors file.
    """
    @staticmethod
    def of_bytes(data: typing.Any, where: str) -> SafetensorsFile:
        """
        The directory of a file that lies in memory. `where` is its path, and begins messages.
        """
    def __init__(self, path: os.PathLike[str] | str | bytes) -> None: ...
    @property
    def header_bytes(self) -> int:
        """
        Where the data starts.
        """
    @property
    def metadata(self) -> dict[str, str]: ...
    @property
    def path(self) -> typing.Any: ...
    @property
    def tensors(self) -> dict[str, typing.Any]:
        """
        TensorEntry by name.
        """

class ExpertFormats:
    """
    The formats of the three matrices of every routed expert.
    """
    def __eq__(self, arg0: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, gate: QuantFormat, up: QuantFormat, down: QuantFormat) -> None: ...
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    @property
    def down(self) -> QuantFormat: ...
    @property
    def gate(self) -> QuantFormat: ...
    @property
    def up(self) -> QuantFormat: ...

class ExpertLayout:
    """
    Where the pieces of one routed expert lie.
    """
    def __init__(
        self, hidden: int, intermediate: int, gate: QuantFormat, up: QuantFormat, down: QuantFormat
    ) -> None: ...
    @property
    def bytes(self) -> int:
        """
        The bytes of one expert.
        """
    @property
    def formats(self) -> ExpertFormats: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def pieces(self) -> list[typing.Any]:
        """
        (name, offset, bytes, dtype, shape) of each piece, in order.
        """

class Tensor:
    """
    A tensor of a store: an ordered list of byte ranges, row-major.
    """
    def __repr__(self) -> str: ...
    @property
    def added(self) -> float:
        """
        What is added to each number of a vector, once it is in f32.
        """
    @property
    def dtype(self) -> str: ...
    @property
    def is_table(self) -> bool:
        """
        Whether its rows are read one by one and never all in memory.
        """
    @property
    def is_vector(self) -> bool:
        """
        Whether this is a tensor of its own and no part of a matrix.
        """
    @property
    def negated_exp(self) -> bool:
        """
        Whether what is stored of a vector is -exp(x), in place of x.
        """
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...
    @property
    def spans(self) -> list[typing.Any]:
        """
        (file, offset, bytes) of each range.
        """
    @property
    def step(self) -> int:
        """
        Of the stored numbers, every so many are its own.
        """

class StoreDirectory:
    """
    What a store holds and where, checked against its variant.
    """
    def expert_spans(self, layer: int, expert: int) -> list[typing.Any]:
        """
        (file, offset, bytes) of each piece of the expert, in layout order, or of each row of a piece.
        """
    def experts_of(self, layer: int) -> ExpertLayout:
        """
        The layout of the experts of a layer.
        """
    def part(self, first: int, last: int) -> StoreDirectory:
        """
        The same of some layers, the first and one past the last; 0: to the end. They are numbered from 0 on, and the names of their tensors stay as they are.
        """
    @property
    def as_published(self) -> bool:
        """
        Whether it is a checkpoint as Hugging Face lays it out.
        """
    @property
    def expert_files(self) -> list[int]:
        """
        The files that hold experts, by index.
        """
    @property
    def experts(self) -> ExpertLayout:
        """
        The layout of the experts; of a layer with the largest ones, where layers differ.
        """
    @property
    def files(self) -> list[typing.Any]:
        """
        Absolute paths. Spans refer to them by index.
        """
    @property
    def formats(self) -> dict[str, typing.Any]:
        """
        QuantFormat of every matrix, by its base name.
        """
    @property
    def ignored(self) -> list[str]:
        """
        Names of tensors that are there and deliberately not used.
        """
    @property
    def layers_differ(self) -> bool:
        """
        Whether layers have experts in different formats.
        """
    @property
    def tensors(self) -> dict[str, typing.Any]:
        """
        Tensors by canonical name, without the routed experts.
        """

class GgufTensor:
    """
    Where one tensor lies in which file.
    """
    def __repr__(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def file(self) -> int:
        """
        Index into GgufFile.files.
        """
    @property
    def offset(self) -> int:
        """
        Where it begins, from the start of its file.
        """
    @property
    def shape(self) -> tuple[typing.Any, ...]:
        """
        Its sizes, the slowest first.
        """
    @property
    def type(self) -> str: ...

class GgufFile:
    """
    The checked directory of a model in a GGUF file, or in several that are its parts.
    """
    def __init__(self, path: os.PathLike[str] | str | bytes) -> None: ...
    def value(self, key: str) -> typing.Any:
        """
        The value of a key, made anew: a number, bool, str, or a list of them. None without one.
        """
    @property
    def files(self) -> list[typing.Any]: ...
    @property
    def header_bytes(self) -> int:
        """
        Of all files, without their tensors.
        """
    @property
    def keys(self) -> list[typing.Any]:
        """
        The keys of its values, sorted.
        """
    @property
    def tensors(self) -> dict[str, typing.Any]:
        """
        GgufTensor by name.
        """

class FaultPlan:
    """
    For tests: the read that goes wrong, and how.
    """
    def __init__(self, kind: str, at: int, lasting: bool = False) -> None: ...
    def release(self) -> None:
        """
        Lets reads go on that are held.
        """
    @property
    def calls(self) -> int: ...

class FileReader:
    """
    For tests: a file that experts are read from.
    """
    def __init__(
        self, path: os.PathLike[str] | str | bytes, mode: str = "buffered", fault: FaultPlan | None = None
    ) -> None: ...
    def check_unchanged(self) -> None: ...
    def read(self, offset: int, bytes: int, misalign: int = 0, bounce: int = 1048576) -> bytes:
        """
        Reads to a place `misalign` bytes after a block's start.
        """
    @property
    def bytes(self) -> int: ...
    @property
    def counts(self) -> tuple[int, int]:
        """
        (calls, bytes): how often the system was called, and what it gave.
        """

class FarPlace:
    """
    For tests: a place that no read reaches.
    """
    def __init__(self, threads: int, bytes: int) -> None: ...
    def data(self, place: int, bytes: int) -> bytes: ...
    def end(self, index: int, well: bool = True) -> None:
        """
        Lets a copy arrive, or fail.
        """
    def end_all(self) -> None:
        """
        Lets all arrive, from now on at once.
        """
    @property
    def begun(self) -> int:
        """
        How many copies to it have begun.
        """

class ReadPool:
    """
    For tests: threads that read.
    """
    def __init__(self, threads: int, bounce: int = 0, place: FarPlace | None = None) -> None: ...
    @property
    def memory(self) -> int: ...
    @property
    def stats(self) -> dict[str, typing.Any]: ...

class ReadBatch:
    """
    For tests: reads that are waited for together.
    """
    def __init__(self) -> None: ...
    def add(self, reader: FileReader, offset: int, bytes: int) -> None: ...
    def add_carried(self, reader: FileReader, offset: int, bytes: int, place: int) -> None: ...
    def cancel(self) -> None: ...
    def data(self, index: int) -> bytes: ...
    def promote(self) -> None: ...
    def submit(self, pool: ReadPool, priority: str = "demand") -> None: ...
    def wait(self) -> bool: ...
    @property
    def done(self) -> bool: ...

class Lease:
    """
    For tests: keeps a slot from being used for another expert.
    """
    def release(self) -> None: ...
    def write(self, data: str) -> None: ...
    @property
    def data(self) -> bytes: ...
    @property
    def expert(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def state(self) -> str: ...

class SlotCache:
    """
    For tests: experts in a fixed number of slots.
    """
    def __init__(
        self, layers: int, experts: int, slots: int, slot_bytes: int = 0, policy: str = "lru", ageing_period: int = 0
    ) -> None: ...
    def acquire(self, layer: int, expert: int) -> tuple[typing.Any, ...]:
        """
        (lease, "ready", "loading" or "missing")
        """
    def contains(self, layer: int, expert: int) -> bool: ...
    def drop(self, layer: int, expert: int) -> bool: ...
    def drop_all(self) -> None: ...
    def failed(self, lease: Lease) -> None: ...
    def guess(self, layer: int, expert: int, keep: int = 0) -> typing.Any: ...
    def loaded(self, lease: Lease) -> None: ...
    def share(self, lease: Lease) -> typing.Any: ...
    @property
    def leased(self) -> int: ...
    @property
    def spare(self) -> int: ...
    @property
    def stats(self) -> dict[str, typing.Any]: ...

class Experts:
    """
    For tests: experts of a store, read into slots.
    """
    def __init__(
        self,
        store: StoreDirectory,
        slots: int,
        threads: int = 2,
        mode: str = "buffered",
        policy: str = "lru",
        fault: FaultPlan | None = None,
        check: typing.Any = None,
    ) -> None: ...
    def check_unchanged(self) -> None: ...
    def collect(self) -> None: ...
    def contains(self, layer: int, expert: int) -> bool: ...
    def demand(self, layer: int, expert: int, parts: int = 1) -> tuple[typing.Any, ...]: ...
    def dismiss(self, layer: int, expert: int) -> None: ...
    def done(self, lease: Lease) -> bool: ...
    def drop_all(self) -> None: ...
    def give_up(self) -> None: ...
    def guess(self, layer: int, expert: int, keep: int = 0, parts: int = 1) -> bool: ...
    def wait(self, lease: Lease) -> None: ...
    @property
    def bounce(self) -> int: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def counts(self) -> tuple[int, int]: ...
    @property
    def offsets(self) -> list[int]: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def spare(self) -> int: ...
    @property
    def stats(self) -> dict[str, typing.Any]: ...

class testing:
    """
    What only tests do: another machine in place of this one, and what goes wrong.
    """
    class Faults:
        """
        What goes wrong: the op, the copy outside of batches and the expert read that fail. And the device: one that works on a thread of its own (`deferred`), or one that has memory of its own as well (`apart`). And drafts of this `text`, each of them `right` with this probability, in place of those that the model would make.
        """
        def __init__(
            self,
            *,
            fail_at_op: int = -1,
            fault: FaultPlan | None = None,
            deferred: bool = False,
            apart: bool = False,
            fail_at_copy: int = -1,
            text: collections.abc.Sequence[int] = [],
            right: float = 1.0,
        ) -> None: ...

    @staticmethod
    def device_footprint(
        faults: testing.Faults,
        store: StoreDirectory,
        *,
        backend: str = "auto",
        readers: int = 0,
        expert_slots: int = 0,
        host_slots: int = 0,
        ring_depth: int = 2,
        chunk: int = 0,
        reads: str = "auto",
        cache: str = "lru",
        cpu_experts: str = "off",
        speculate: str = "off",
        layers: tuple[int, int] = (0, 0),
        verify_reads: bool = False,
        max_context: int = 0,
        kv_dtype: str = "f32",
        max_checkpoints: int = 4,
    ) -> Footprint:
        """
        Like device_footprint, for a device with these faults.
        """
    @staticmethod
    def emulate_amx(int16: int, attention: int) -> None:
        """
        Adds `amx` with the kernels at these addresses, if only the tiles are missing. It must be called before anybody has asked for the instruction sets that there are.
        """
    @staticmethod
    def engine(
        faults: testing.Faults,
        store: StoreDirectory,
        *,
        backend: str = "auto",
        device: int = 0,
        isa: str = "",
        precision: str = "auto",
        threads: int = 0,
        readers: int = 0,
        expert_slots: int = 0,
        host_slots: int = 0,
        ring_depth: int = 2,
        chunk: int = 0,
        session_bytes: int = 0,
        host_session_bytes: int = 0,
        reads: str = "auto",
        cache: str = "lru",
        look_ahead: str = "auto",
        cpu_experts: str = "off",
        speculate: str = "off",
        layers: tuple[int, int] = (0, 0),
        checksums: collections.abc.Mapping[int, collections.abc.Sequence[str]] | None = None,
        on_progress: collections.abc.Callable[..., typing.Any] | None = None,
        time_ops: bool = False,
    ) -> Engine:
        """
        Like Engine, but with these faults.
        """
    @staticmethod
    def footprint(
        faults: testing.Faults,
        store: StoreDirectory,
        *,
        backend: str = "auto",
        readers: int = 0,
        expert_slots: int = 0,
        host_slots: int = 0,
        ring_depth: int = 2,
        chunk: int = 0,
        reads: str = "auto",
        cache: str = "lru",
        cpu_experts: str = "off",
        speculate: str = "off",
        layers: tuple[int, int] = (0, 0),
        verify_reads: bool = False,
        max_context: int = 0,
        kv_dtype: str = "f32",
        max_checkpoints: int = 4,
    ) -> Footprint:
        """
        Like footprint, for a device with these faults.
        """
    @staticmethod
    def missing_of_amx() -> str:
        """
        What this machine lacks for the kernels of AMX: nothing, `tiles`, or something else.
        """
    @staticmethod
    def ops(
        faults: testing.Faults,
        backend: str = "cpu",
        isa: str = "",
        threads: int = 0,
        timed: bool = False,
        exact: bool = False,
    ) -> Ops:
        """
        Like Ops, but with these faults.
        """
    @staticmethod
    def set_cuda_libraries(driver: str, compiler: str) -> None:
        """
        Opens other libraries in place of NVIDIA's driver and of NVRTC, or with empty names the machine's own.
        """
    @staticmethod
    def set_metal_device(make: int, preferred: bool = False, max_work: float = 20000000000.0) -> None:
        """
        Sets a function that makes devices, by its address, or with 0 the machine's own.
        """
    @staticmethod
    def sha256(parts: collections.abc.Sequence[bytes]) -> str:
        """
        Of these bytes, one after the other.
        """
    @staticmethod
    def steps_ahead(engine: Engine) -> tuple[int, int]:
        """
        How many steps were recorded before they were asked for, and how many of them were then.
        """

class OpTime:
    """
    What the ops of one kind took together. See core/op_time.h.
    """
    @property
    def bytes(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def op(self) -> str: ...
    @property
    def products(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def shape(self) -> str: ...

class ThreadPool:
    """
    For tests: the threads that ops are divided over.
    """
    def __init__(self, threads: int) -> None: ...
    def run(self, units: int, fail_at: int = -1, in_steps: bool = False) -> list[int]:
        """
        Runs the units, and returns how often each ran. In steps: begun first, and finished then.
        """
    @property
    def threads(self) -> int: ...

class Ops:
    """
    The ops of a backend, one at a time. See moeflux.ops.Ops.
    """
    def __init__(
        self, backend: str = "cpu", isa: str = "", threads: int = 0, timed: bool = False, exact: bool = False
    ) -> None: ...
    def append(
        self, x: numpy.typing.NDArray[typing.Any], cache: numpy.typing.NDArray[typing.Any], first: int
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def attention(
        self,
        q: numpy.typing.NDArray[typing.Any],
        k: numpy.typing.NDArray[typing.Any],
        v: numpy.typing.NDArray[typing.Any],
        scale: float,
        sinks: typing.Any = None,
        window: int = 0,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def attention_scores(
        self, q: numpy.typing.NDArray[typing.Any], k: numpy.typing.NDArray[typing.Any], scale: float
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def attention_softmax(self, scores: numpy.typing.NDArray[typing.Any]) -> numpy.typing.NDArray[typing.Any]: ...
    def attention_values(
        self, scores: numpy.typing.NDArray[typing.Any], v: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def bias_add(
        self, x: numpy.typing.NDArray[typing.Any], bias: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def chosen_expert_ffn(
        self,
        x: numpy.typing.NDArray[typing.Any],
        experts: collections.abc.Sequence[tuple[typing.Any, typing.Any, typing.Any]],
        ids: numpy.typing.NDArray[typing.Any],
        intermediate: int,
        biases: tuple[
            numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]
        ]
        | None = None,
        clamped: tuple[float, float] | None = None,
        geglu: bool = False,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def combine(
        self,
        residual: typing.Any,
        outputs: numpy.typing.NDArray[typing.Any],
        weights: numpy.typing.NDArray[typing.Any],
        shared: typing.Any,
        shared_gate: typing.Any,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def conv1d(
        self,
        x: numpy.typing.NDArray[typing.Any],
        state: numpy.typing.NDArray[typing.Any],
        weight: numpy.typing.NDArray[typing.Any],
        dilation: int = 1,
    ) -> tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]: ...
    def delta_gates(
        self,
        alpha: numpy.typing.NDArray[typing.Any],
        b: numpy.typing.NDArray[typing.Any],
        a_log: numpy.typing.NDArray[typing.Any],
        dt_bias: numpy.typing.NDArray[typing.Any],
    ) -> tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]: ...
    def describe(self) -> str: ...
    def digit_exp(self, x: numpy.typing.NDArray[typing.Any]) -> numpy.typing.NDArray[typing.Any]: ...
    def digit_expert_ffn(
        self,
        x: numpy.typing.NDArray[typing.Any],
        experts: collections.abc.Sequence[tuple[typing.Any, typing.Any, typing.Any]],
        jobs: collections.abc.Sequence[tuple[int, collections.abc.Sequence[int]]],
        k: int,
        intermediate: int,
        biases: tuple[
            numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]
        ]
        | None = None,
        clamped: tuple[float, float] | None = None,
        geglu: bool = False,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def digit_expert_seconds(
        self,
        x: numpy.typing.NDArray[typing.Any],
        experts: collections.abc.Sequence[tuple[typing.Any, typing.Any, typing.Any]],
        intermediate: int,
        together: int,
    ) -> float:
        """
        How long all of these experts take for a row, so many at a time. For benches.
        """
    def doubled(self, x: numpy.typing.NDArray[typing.Any], count: int) -> tuple[typing.Any, ...]:
        """
        x doubled `count` times in one batch, how many of two waits threw an error, and the text of the last error.
        """
    def embed(self, table: typing.Any, ids: numpy.typing.NDArray[typing.Any]) -> numpy.typing.NDArray[typing.Any]: ...
    def expert_ffn(
        self,
        x: numpy.typing.NDArray[typing.Any],
        experts: collections.abc.Sequence[tuple[typing.Any, typing.Any, typing.Any]],
        jobs: collections.abc.Sequence[tuple[int, collections.abc.Sequence[int]]],
        k: int,
        intermediate: int,
        biases: tuple[
            numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]
        ]
        | None = None,
        clamped: tuple[float, float] | None = None,
        geglu: bool = False,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def gated_delta(
        self,
        q: numpy.typing.NDArray[typing.Any],
        k: numpy.typing.NDArray[typing.Any],
        v: numpy.typing.NDArray[typing.Any],
        decay: numpy.typing.NDArray[typing.Any],
        beta: numpy.typing.NDArray[typing.Any],
        state: numpy.typing.NDArray[typing.Any],
        tiled: bool = False,
    ) -> tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]: ...
    def gated_rms_norm(
        self,
        x: numpy.typing.NDArray[typing.Any],
        z: numpy.typing.NDArray[typing.Any],
        weight: numpy.typing.NDArray[typing.Any],
        eps: float,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def gather_rows(
        self, rows: numpy.typing.NDArray[typing.Any], ids: numpy.typing.NDArray[typing.Any], position: int, unit: int
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def geglu(
        self, gate: numpy.typing.NDArray[typing.Any], up: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def hyper_add(
        self,
        x: numpy.typing.NDArray[typing.Any],
        y: numpy.typing.NDArray[typing.Any],
        gates: numpy.typing.NDArray[typing.Any],
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def hyper_mix(
        self, normed: numpy.typing.NDArray[typing.Any], gates: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def hyper_norm(
        self, x: numpy.typing.NDArray[typing.Any], weight: numpy.typing.NDArray[typing.Any], eps: float
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def index_scores(
        self,
        q: numpy.typing.NDArray[typing.Any],
        keys: numpy.typing.NDArray[typing.Any],
        weights: typing.Any,
        scale: float,
        first_position: int,
        unit: int,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def index_select(
        self, scores: numpy.typing.NDArray[typing.Any], count: int, first_position: int, unit: int
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def layer_norm(
        self,
        x: numpy.typing.NDArray[typing.Any],
        weight: numpy.typing.NDArray[typing.Any],
        bias: numpy.typing.NDArray[typing.Any],
        eps: float,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def matmul(
        self, products: collections.abc.Sequence[tuple[numpy.typing.NDArray[typing.Any], typing.Any, bool]]
    ) -> list[numpy.typing.NDArray[typing.Any]]: ...
    def mla_attention(
        self,
        q_latent: numpy.typing.NDArray[typing.Any],
        q_pe: numpy.typing.NDArray[typing.Any],
        latent: numpy.typing.NDArray[typing.Any],
        k_pe: numpy.typing.NDArray[typing.Any],
        scale: float,
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def ngram_gate(
        self,
        key: numpy.typing.NDArray[typing.Any],
        query: numpy.typing.NDArray[typing.Any],
        value: numpy.typing.NDArray[typing.Any],
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def residual_add(
        self, x: numpy.typing.NDArray[typing.Any], y: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def rms_norm(
        self, x: numpy.typing.NDArray[typing.Any], weight: numpy.typing.NDArray[typing.Any], eps: float
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def rms_norm_heads(
        self, x: numpy.typing.NDArray[typing.Any], weight: typing.Any, eps: float, scale: float
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def rope(
        self, x: numpy.typing.NDArray[typing.Any], angles: numpy.typing.NDArray[typing.Any], interleaved: bool
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def route_grouped(
        self,
        logits: numpy.typing.NDArray[typing.Any],
        bias: numpy.typing.NDArray[typing.Any],
        k: int,
        groups: int,
        groups_kept: int,
        normalize: bool,
        scaling: float,
    ) -> tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]: ...
    def route_softmax(
        self,
        logits: numpy.typing.NDArray[typing.Any],
        k: int,
        groups: int,
        groups_kept: int,
        normalize: bool,
        scaling: float,
        factors: typing.Any = None,
    ) -> tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]: ...
    def scale(self, x: numpy.typing.NDArray[typing.Any], factor: float) -> numpy.typing.NDArray[typing.Any]: ...
    def shortlist(
        self, logits: numpy.typing.NDArray[typing.Any], factor: float
    ) -> list[
        tuple[
            int,
            int,
            numpy.typing.NDArray[numpy.float64],
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.int32],
            numpy.typing.NDArray[numpy.float32],
        ]
    ]: ...
    def sigmoid_gate(
        self, x: numpy.typing.NDArray[typing.Any], gate: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def silu(self, x: numpy.typing.NDArray[typing.Any], factor: float) -> numpy.typing.NDArray[typing.Any]: ...
    def soft_cap(self, x: numpy.typing.NDArray[typing.Any], cap: float) -> numpy.typing.NDArray[typing.Any]: ...
    def swiglu(
        self, gate: numpy.typing.NDArray[typing.Any], up: numpy.typing.NDArray[typing.Any]
    ) -> numpy.typing.NDArray[typing.Any]: ...
    def take_times(self) -> list[OpTime]:
        """
        The times of each kind of op since the last call.
        """
    def top_k(
        self, logits: numpy.typing.NDArray[typing.Any], k: int
    ) -> tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]: ...
    @property
    def isa(self) -> str:
        """
        The instruction set of the CPU kernels; empty where none run.
        """

class HeldDevice:
    """
    A device that stays open as long as this lives.
    """

class StepStats:
    """
    What evaluating tokens has cost: in the last call, or in all calls since the session was made.
    """
    def __repr__(self) -> str: ...
    @property
    def accepted(self) -> int:
        """
        How many of them came.
        """
    @property
    def arrived_seconds(self) -> float:
        """
        The part of compute_seconds in experts as they arrived.
        """
    @property
    def beside_seconds(self) -> float:
        """
        The part of compute_seconds in the shared expert and experts in slots, during the reads.
        """
    @property
    def bytes_copied(self) -> int:
        """
        Bytes of experts copied from there to the device.
        """
    @property
    def bytes_read(self) -> int:
        """
        Bytes of expert reads, including those of the look-ahead.
        """
    @property
    def compute_seconds(self) -> float:
        """
        How long recording and running ops took.
        """
    @property
    def drafted(self) -> int:
        """
        Tokens evaluated because they were likely to come next.
        """
    @property
    def drafts_pay(self) -> bool | None:
        """
        Whether tokens came faster with them when that was last compared; None before that.
        """
    @property
    def expert_hits(self) -> int:
        """
        Experts found in a slot, or on their way into one. Where the host does not know the choice of several rows, each row's counts.
        """
    @property
    def expert_misses(self) -> int:
        """
        Experts that had to be brought and were not on their way.
        """
    @property
    def experts_on_cpu(self) -> int:
        """
        Those of host_hits that the CPU computed.
        """
    @property
    def host_hits(self) -> int:
        """
        Those of them that were in slots of the host's memory, or on their way there.
        """
    @property
    def look_ahead_pays(self) -> bool | None:
        """
        Whether steps were faster with it when they were last compared; None before that.
        """
    @property
    def look_ahead_precision(self) -> float:
        """
        The share of the look-ahead's reads that was wanted, or 0 if it read none.
        """
    @property
    def look_ahead_reads(self) -> int:
        """
        Experts whose reads the look-ahead began.
        """
    @property
    def look_ahead_recall(self) -> float:
        """
        The share of the experts to be read that was foreseen, or 0 if none had to be read.
        """
    @property
    def look_ahead_used(self) -> int:
        """
        How many of these experts their layer's router picked.
        """
    @property
    def look_ahead_wasted_bytes(self) -> int:
        """
        Bytes read for the experts that it did not pick.
        """
    @property
    def ngram_hits(self) -> int:
        """
        Rows of n-gram tables found in memory, or on their way there.
        """
    @property
    def ngram_misses(self) -> int:
        """
        Rows of n-gram tables that had to be read and were not on their way.
        """
    @property
    def read_busy_seconds(self) -> float:
        """
        How long at least one expert read was under way.
        """
    @property
    def read_wait_seconds(self) -> float:
        """
        How long the call stood still for expert reads.
        """
    @property
    def router_seconds(self) -> float:
        """
        The part of compute_seconds until the routers have spoken.
        """
    @property
    def seconds(self) -> float:
        """
        How long the whole call took.
        """
    @property
    def submissions(self) -> int:
        """
        How many batches the backend was given.
        """
    @property
    def tokens(self) -> int: ...
    @property
    def waits(self) -> int:
        """
        How many times the host waited for a batch.
        """

class Footprint:
    """
    Bytes of memory by what they are for: planned, or held. See moeflux.h.
    """
    @property
    def checkpoints(self) -> int: ...
    @property
    def dense_weights(self) -> int: ...
    @property
    def engine(self) -> int: ...
    @property
    def expert_slots(self) -> int: ...
    @property
    def host_slots(self) -> int: ...
    @property
    def loading(self) -> int: ...
    @property
    def ngram_rows(self) -> int: ...
    @property
    def read_buffers(self) -> int: ...
    @property
    def recurrent(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def scratch(self) -> int: ...
    @property
    def sessions(self) -> int: ...
    @property
    def tables(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def total(self) -> int: ...

class Cancel:
    """
    Gives up the call of `prefill`, `step` or `evaluate` that it was passed to. Once set, it stays set. `set` may be called from any thread, or from a signal handler.
    """
    def __init__(self) -> None: ...
    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def set_after(self, seconds: float) -> None:
        """
        Sets it so many seconds from now, or earlier if it was to be set earlier.
        """

class StatePieces:
    """
    What a session remembers. It may be used, in any thread, until the call that gave it returns.
    """
    def list(self) -> list[typing.Any]:
        """
        (layer, name, dtype, shape) of each piece, in layer order.
        """
    def read(self, index: int, begin: int, to: typing.Any) -> None:
        """
        Fills memory with the bytes of a piece from `begin` on.
        """
    def write(self, index: int, begin: int, data: typing.Any) -> None:
        """
        Replaces the bytes of a piece from `begin` on.
        """

class Xxh64:
    """
    XXH64 with the seed 0, in the manner of hashlib: a quick sum against damage.
    """
    def __init__(self) -> None: ...
    def hexdigest(self) -> str: ...
    def update(self, data: typing.Any) -> None: ...

class Session:
    """
    One timeline of tokens. See moeflux.Session.
    """
    def argmax(self, serial: int | None = None) -> int:
        """
        The likeliest token. With `serial`, StateError if these are not the logits of that.
        """
    def checkpoint(self) -> None: ...
    def clear(self) -> None: ...
    def fill_state(
        self,
        position: int,
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        fill: collections.abc.Callable[..., typing.Any],
    ) -> None:
        """
        Calls fill(StatePieces), which must write all of them: the state after these tokens.
        """
    def foresees(self, token: int) -> bool:
        """
        Whether a call before has evaluated this token as the next one.
        """
    def fork(self, position: int | None = None) -> Session: ...
    def logits(
        self, out: numpy.typing.NDArray[typing.Any] | None, vocab: int
    ) -> numpy.typing.NDArray[numpy.float32]: ...
    def make_room(self, tokens: int) -> None:
        """
        Takes memory for the rows of so many more tokens, for the next call.
        """
    def prefill(
        self,
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        on_progress: collections.abc.Callable[..., typing.Any] | None,
        all_logits: numpy.typing.NDArray[typing.Any] | None,
        vocab: int,
        cancel: Cancel | None = None,
    ) -> tuple[int, int]:
        """
        Evaluates tokens. Returns how many, and the serial of the logits that they left.
        """
    def read_state(self) -> list[typing.Any]:
        """
        (layer, name, copy) of every piece of state, in layer order.
        """
    def restore(
        self,
        position: int,
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        tensors: collections.abc.Sequence[numpy.typing.NDArray[typing.Any]],
    ) -> None: ...
    def rewind(self, position: int, exact: bool = True) -> int: ...
    def set_max_checkpoints(self, count: int) -> None: ...
    def show_state(self, show: collections.abc.Callable[..., typing.Any]) -> None:
        """
        Calls show(StatePieces), which may read them.
        """
    def step(self, token: int, cancel: Cancel | None = None, serial: int | None = None) -> int:
        """
        Evaluates one token. Returns the serial of its logits.
        """
    def top_k(self, k: int) -> tuple[typing.Any, ...]: ...
    @property
    def checkpoints(self) -> list[int]: ...
    @property
    def exact_from(self) -> int: ...
    @property
    def last(self) -> StepStats: ...
    @property
    def layers(self) -> tuple[int, int]:
        """
        Those of its engine.
        """
    @property
    def logits_serial(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def total(self) -> StepStats: ...

class Engine:
    """
    A loaded model. See moeflux.Model.
    """
    def __init__(
        self,
        store: StoreDirectory,
        *,
        backend: str = "auto",
        device: int = 0,
        isa: str = "",
        precision: str = "auto",
        threads: int = 0,
        readers: int = 0,
        expert_slots: int = 0,
        host_slots: int = 0,
        ring_depth: int = 2,
        chunk: int = 0,
        session_bytes: int = 0,
        host_session_bytes: int = 0,
        reads: str = "auto",
        cache: str = "lru",
        look_ahead: str = "auto",
        cpu_experts: str = "off",
        speculate: str = "off",
        layers: tuple[int, int] = (0, 0),
        checksums: collections.abc.Mapping[int, collections.abc.Sequence[str]] | None = None,
        on_progress: collections.abc.Callable[..., typing.Any] | None = None,
        time_ops: bool = False,
    ) -> None:
        """
        With `checksums`, {layer: SHA-256 of each expert}, every expert is verified when it is read. `layers`: the first that it has, and one past the last; 0: to the end.
        """
    def describe(self) -> str: ...
    def evaluate(
        self,
        work: collections.abc.Sequence[
            tuple[
                Session,
                typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
                numpy.typing.NDArray[typing.Any] | None,
                numpy.typing.NDArray[typing.Any] | None,
            ]
        ],
        logits: bool,
        cancel: Cancel | None = None,
    ) -> list[tuple[int, str]]:
        """
        Evaluates (session, tokens, out, hidden) together: `out` is room for the logits of all tokens, or, without the last layer, for hidden rows; `hidden` are those of the layer before, if there is one. Returns (the serial of its logits, what is wrong with it) for each session.
        """
    def evaluate_step(self, work: typing.Any, kind: type, cancel: Cancel | None = None) -> list[int] | None:
        """
        As `evaluate` of [(session, [token]), ...] with sessions of Python, which are of this class: returns the serials of their logits. None if the work is anything else.
        """
    def session(self, max_context: int = 0, kv_dtype: str = "f32", max_checkpoints: int = 4) -> Session: ...
    def take_op_times(self) -> list[OpTime]: ...
    @property
    def held(self) -> int:
        """
        The same, counted where memory is given out.
        """
    @property
    def held_by_device(self) -> int:
        """
        The part of `held` that is in a device's own memory.
        """
    @property
    def layers(self) -> tuple[int, int]:
        """
        The model's layers that it has: the first, and one past the last.
        """
    @property
    def memory(self) -> Footprint:
        """
        What is held now, by what it is for.
        """
    @property
    def sessions(self) -> int: ...
    @property
    def slots(self) -> list[tuple[str, int, int]]:
        """
        Of experts, the uppermost first: in whose memory they are, how many there are, and how many have one now.
        """
    @property
    def width(self) -> int:
        """
        Numbers of a hidden row.
        """

class Sampler:
    """
    Chooses the tokens of one answer. See moeflux.sampling.
    """
    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        logit_bias: collections.abc.Mapping[int, float],
        seed: int,
        vocab_size: int,
        prompt: numpy.typing.NDArray[typing.Any],
        isa: str = "",
    ) -> None: ...
    def choose(
        self,
        logits: numpy.typing.NDArray[typing.Any],
        allowed: numpy.typing.NDArray[typing.Any] | None = None,
        log_probabilities: int | None = None,
    ) -> tuple[typing.Any, ...]:
        """
        (token, its log probability, those of the likeliest): from logits that lie anywhere.
        """
    def choose_listed(
        self,
        logits: numpy.typing.NDArray[typing.Any],
        sums: numpy.typing.NDArray[typing.Any],
        greatests: numpy.typing.NDArray[typing.Any],
        tokens: numpy.typing.NDArray[typing.Any],
        values: numpy.typing.NDArray[typing.Any],
    ) -> int | None:
        """
        For tests: by what Ops.shortlist gives for the logits, which are looked at as far as it asks. None where that does not tell.
        """
    def choose_of(
        self,
        session: Session,
        allowed: numpy.typing.NDArray[typing.Any] | None = None,
        log_probabilities: int | None = None,
    ) -> tuple[typing.Any, ...]:
        """
        The same from a session's logits, where the engine left them.
        """
    @property
    def chosen_from_shortlists(self) -> int:
        """
        How many tokens were chosen by what a device had found, without the logits.
        """
    @property
    def shortlist_factor(self) -> float:
        """
        By what logits are weighed, over ln 2; 0 where a choice looks at all of them.
        """

class ActivationMoments:
    """
    Sums of squares of what matrices meet. See moeflux.measure.calibrate.
    """
    def __init__(self, engine: Engine) -> None: ...
    def dense(self) -> dict[str, typing.Any]:
        """
        {name of a matrix: (rows, sums of squares f64 [columns])}
        """
    def experts(self) -> list[typing.Any]:
        """
        [(layer, rows, sums f64 [hidden] of gate and up, rows i64 [experts], sums f64 [experts, intermediate] of down)]
        """

class DecoderEvent:
    """
    What a step of a Decoder did for one request. There are several of one that has several tokens.
    """
    @property
    def error(self) -> str:
        """
        Why it failed. Of a request that goes on budget: there was no memory for its rows, and it is tried again.
        """
    @property
    def evaluated(self) -> int:
        """
        Tokens of the prompt.
        """
    @property
    def finish(self) -> str:
        """
        end, length, context or failed; empty: it goes on.
        """
    @property
    def id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def stats(self) -> StepStats:
        """
        Of the engine's last call before the token was chosen.
        """
    @property
    def token(self) -> int | None:
        """
        That was chosen; one that ends the answer is not evaluated.
        """
    @property
    def top(self) -> list[tuple[int, float]]:
        """
        The likeliest tokens and their log probabilities, best first.
        """

class Decoder:
    """
    Requests that are answered side by side. A request has its session and its sampler to itself until it is over or removed.
    """
    def __init__(self, engine: Engine, rows: int = 0) -> None: ...
    def add(
        self,
        session: Session,
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        sampler: Sampler,
        stop_tokens: collections.abc.Sequence[int],
        max_tokens: int,
        logprobs: int | None = None,
        borders: collections.abc.Sequence[int] = [],
        masked: bool = False,
        stepwise: bool = False,
    ) -> int:
        """
        Returns an id, greater than those before. Checkpoints are made at the positions `borders`. A masked request waits for `set_mask` before each choice. A stepwise one has one token a step, even where more were foreseen.
        """
    def end_ahead(self, at_once: bool = False) -> None:
        """
        No further step is begun. The one under way is given up, if that is to be `at_once`.
        """
    def go_ahead(self) -> bool:
        """
        Makes further steps before they are asked for, until one brings anything but tokens. False, and there are none, where somebody has to do something between steps: when a prompt is read, or somebody answers who is masked or stepwise. Until all that came of them was taken, no session of a request may be used.
        """
    def remove(self, id: int) -> bool:
        """
        Returns whether the session is free now; otherwise it is when the step under way is over.
        """
    def set_mask(self, id: int, bits: numpy.typing.NDArray[typing.Any] | None) -> None:
        """
        For one choice, uint32 [ceil(vocab / 32)]; None: every token is allowed.
        """
    def step(self, cancel: Cancel | None = None) -> list[DecoderEvent]:
        """
        Evaluates and chooses for all. Returns what became of each request that got further. Where steps are made ahead, it returns what came of them since the last time, and waits for one.
        """
    @property
    def is_ahead(self) -> bool:
        """
        Whether a step is made ahead, or something came of one that `step` has not returned.
        """
    @property
    def prompt_rows(self) -> int:
        """
        How many tokens of a step prompts may take while others go on with their answers.
        """
    @prompt_rows.setter
    def prompt_rows(self, arg1: int) -> None: ...
    @property
    def rows(self) -> int:
        """
        The most tokens of one step.
        """

class Batch:
    """
    For tests: a batch that ends when it is told to.
    """
    def __init__(self) -> None: ...
    def finish(self, error: str = "") -> None: ...

class DeferredRing:
    """
    For tests: batches in flight, and the slots they lease.
    """
    def __init__(self, depth: int, slots: int = 8) -> None: ...
    def collect(self) -> None: ...
    def destroy(self) -> None: ...
    def drain(self) -> None: ...
    def pop(self) -> None: ...
    def push(self, batch: Batch, experts: collections.abc.Sequence[int]) -> None: ...
    @property
    def empty(self) -> bool: ...
    @property
    def leased(self) -> int: ...
    @property
    def waits(self) -> int: ...

class DraftGovernor:
    """
    For tests: decides how many tokens to draft.
    """
    def __init__(self) -> None: ...
    def add(self, seconds: float, tokens: int, drafted: int) -> None:
        """
        A call has ended.
        """
    def add_outcome(self, longest: int, drafted: int, came: int) -> None:
        """
        So many of those came true and then, if there were more, one did not.
        """
    def drafts(self, longest: int = 4) -> int:
        """
        How many a session is to draft, of whose last ones one fewer than `longest` came true.
        """
    @property
    def pays(self) -> bool | None: ...

class LookAheadGovernor:
    """
    For tests: decides whether steps of one token look ahead.
    """
    def __init__(self) -> None: ...
    def add(self, seconds: float, wait: float, busy: float) -> None: ...
    @property
    def on(self) -> bool: ...
    @property
    def pays(self) -> bool | None: ...

class PrefillGovernor:
    """
    For tests: decides whether calls of several tokens look ahead.
    """
    def __init__(self) -> None: ...
    def add(self, misses: int, guesses: int, used: int) -> None: ...
    @property
    def on(self) -> bool: ...

class ReadBandwidth:
    """
    A buffer that is larger than every cache, to measure how fast it is read.
    """
    def __init__(self, max_threads: int, part: int = 268435456) -> None: ...
    def measure(self, threads: int) -> float:
        """
        Bytes per second of `threads` threads together.
        """

class RoutingTrace:
    """
    What routers picked. See moeflux.Model.trace.
    """
    def __init__(self, engine: Engine) -> None: ...
    def content(self) -> tuple[typing.Any, ...]:
        """
        ids, u16 [tokens, layers, k], and the number of tokens of each pass.
        """
    @property
    def layers(self) -> list[int]: ...
    @property
    def tokens(self) -> int: ...

class RoutingCounts:
    """
    How often routers picked each expert. See moeflux.Model.count_experts.
    """
    def __init__(self, engine: Engine) -> None: ...
    def counts(self) -> numpy.typing.NDArray[numpy.int64]:
        """
        i64 [layers, experts]
        """
    @property
    def layers(self) -> list[int]: ...

def best_drafts(
    seconds: typing.Annotated[collections.abc.Sequence[float | None], "FixedSize(5)"],
    chances: typing.Annotated[collections.abc.Sequence[float], "FixedSize(4)"],
    least: int = 0,
) -> int:
    """
    For tests: how many drafts bring most tokens a second. `seconds`: of a call with 0 to 4 drafts, None where nobody knows. `chances`: how often each comes true where those before it have.
    """

def chosen_backend(name: str) -> str:
    """
    The device that `auto` means here. Any other name stays as it is.
    """

def chosen_reads(
    asked: str, *, streams: bool, direct_works: bool, buffered_is_faster: bool, crowds_out: bool
) -> tuple[str, str]:
    """
    How experts are read, "direct" or "buffered", and why.
    """

def count_routing(engine: Engine, counts: RoutingCounts | None) -> None:
    """
    Counts in `counts` what the engine's routers pick from now on. None ends it.
    """

def cuda_compile(name: str, architecture: str, options: collections.abc.Sequence[str] = []) -> tuple[bytes, str]:
    """
    What NVRTC makes of a kernel, or of all of a file, for an architecture such as `sm_90a`, and what it says about it. It needs neither GPU nor driver.
    """

def cuda_facts() -> tuple[str, list[tuple[str, str]]]:
    """
    The name of the GPU, and facts about it as label and text. DeviceError when there is none.
    """

def cuda_kernel_files() -> dict[str, list[str]]:
    """
    The files of kernels, and the kernels in each.
    """

def cuda_kernel_text(file: str) -> str:
    """
    The text of a file of kernels as the compiler gets it.
    """

def cuda_make(unit: str) -> None:
    """
    Compiles a unit for the GPU of this machine, and keeps what comes of it.
    """

def cuda_names() -> list[str]:
    """
    The names of the GPUs that the driver shows, in the order of their numbers. DeviceError when there is none.
    """

def cuda_to_compile(units: collections.abc.Sequence[str]) -> list[str]:
    """
    Of these units, those that are not yet compiled for the GPU of this machine. None if there is no GPU, or nobody to compile them.
    """

def cuda_units(file: str) -> list[str]:
    """
    What of a file is compiled at a time for a model: the file, or each of its kernels.
    """

def dequantize(
    words: numpy.typing.NDArray[typing.Any],
    scales: numpy.typing.NDArray[typing.Any],
    biases: numpy.typing.NDArray[typing.Any],
    format: QuantFormat,
    columns: int,
    threads: int = 0,
) -> numpy.typing.NDArray[numpy.float32]:
    """
    The float32 numbers that an affine matrix stands for: code * scale + bias.
    """

def device_failure() -> str:
    """
    Why `auto` is not the device that this machine should have. Empty when it is, or when there is no such device.
    """

def device_footprint(
    store: StoreDirectory,
    *,
    backend: str = "auto",
    readers: int = 0,
    expert_slots: int = 0,
    host_slots: int = 0,
    ring_depth: int = 2,
    chunk: int = 0,
    reads: str = "auto",
    cache: str = "lru",
    cpu_experts: str = "off",
    speculate: str = "off",
    layers: tuple[int, int] = (0, 0),
    verify_reads: bool = False,
    max_context: int = 0,
    kv_dtype: str = "f32",
    max_checkpoints: int = 4,
) -> Footprint:
    """
    The part of it that is in a device's own memory; nothing where it shares the host's.
    """

def device_memory(backend: str, device: int = 0) -> int | None:
    """
    How many bytes the buffers of a model may have on this device. None: as much as the host has.
    """

def footprint(
    store: StoreDirectory,
    *,
    backend: str = "auto",
    readers: int = 0,
    expert_slots: int = 0,
    host_slots: int = 0,
    ring_depth: int = 2,
    chunk: int = 0,
    reads: str = "auto",
    cache: str = "lru",
    cpu_experts: str = "off",
    speculate: str = "off",
    layers: tuple[int, int] = (0, 0),
    verify_reads: bool = False,
    max_context: int = 0,
    kv_dtype: str = "f32",
    max_checkpoints: int = 4,
) -> Footprint:
    """
    What an engine opened with these options and one such session will hold. Takes no memory and opens no file.
    """

def forget_a_copy(kind: str) -> None:
    """
    For tests: what the engine does when a copy is forgotten, on a device with memory of its own.
    """

def has_own_memory(backend: str) -> bool:
    """
    Whether the device has memory of its own.
    """

def held_device(backend: str, device: int) -> HeldDevice:
    """
    Opens the device once for all that follows: planning, compiling and loading. Nothing if it does not open.
    """

def isas() -> list[str]:
    """
    The instruction sets whose kernels run here, the best first.
    """

def kernels_to_compile(
    store: StoreDirectory,
    *,
    backend: str = "auto",
    device: int = 0,
    speculate: str = "off",
    layers: tuple[int, int] = (0, 0),
    kv_dtype: str = "f32",
) -> list[str]:
    """
    What must be compiled for the device before this model runs there: units, by their names. For `cuda_make`.
    """

def metal_compile(file: str) -> int:
    """
    Compiles a shader file, makes every kernel ready, and returns how many there are.
    """

def metal_facts() -> tuple[str, list[tuple[str, str]]]:
    """
    The name of the GPU, and facts about it as label and text. DeviceError when there is none.
    """

def metal_shader(file: str) -> str:
    """
    The text of a shader file as the driver gets it.
    """

def metal_shader_files() -> list[str]: ...
def observe_activations(engine: Engine, store: StoreDirectory, moments: ActivationMoments | None) -> None:
    """
    Adds to `moments` what the matrices of the engine, which was opened from `store`, meet from now on. None ends it.
    """

def open_gguf(file: GgufFile, variant_json: str) -> StoreDirectory:
    """
    The model of a GGUF file as a store.
    """

def open_mlx(folder: os.PathLike[str] | str | bytes, variant_json: str) -> StoreDirectory:
    """
    Opens a folder of MLX safetensors in place.
    """

def open_packed(
    weights_dir: os.PathLike[str] | str | bytes,
    experts_dir: os.PathLike[str] | str | bytes,
    variant_json: str,
    experts: ExpertFormats | None = None,
) -> StoreDirectory:
    """
    Opens a packed store. `experts_dir` holds the layer files. Without `experts`, the store is one of the older tools.
    """

def parse_json(text: str | bytes, where: str = "text", without: collections.abc.Set[str] = set()) -> typing.Any:
    """
    The value of a JSON text (str or UTF-8 bytes), read strictly. Members named in `without` are checked, but None.
    """

def parse_snapshot_wire(data: typing.Any, variant_json: str, where: str = "snapshot") -> SnapshotWire:
    """
    Checks every field of a snapshot of wire format 1 or 2, and returns its layout.
    """

def planned_store(variant_json: str, format: QuantFormat) -> StoreDirectory:
    """
    A packed store that nobody has made yet, with every matrix in that format.
    """

def probe_expert_reads(
    store: StoreDirectory, mode: str, readers: int, seconds: float, seed: int, rooms: int = 0
) -> tuple[typing.Any, ...]:
    """
    (reads, bytes, seconds) of random reads of a store's experts, into so many rooms in turn.
    """

def probe_file_reads(
    path: os.PathLike[str] | str | bytes, piece_bytes: int, mode: str, readers: int, seconds: float, seed: int
) -> tuple[typing.Any, ...]:
    """
    (reads, bytes, seconds) of random reads of a file's pieces.
    """

def quantize(
    array: numpy.typing.NDArray[typing.Any],
    format: QuantFormat,
    threads: int = 0,
    importance: typing.Annotated[numpy.typing.ArrayLike, numpy.float32] | None = None,
) -> tuple[typing.Any, ...]:
    """
    Quantises float32, float16 or uint16 (raw bf16) rows: (words, scales, biases), (words, scales) of MXFP4, or (blocks,). Affine without `importance`, float32 [columns], is MLX's.
    """

def read_json(path: os.PathLike[str] | str | bytes) -> typing.Any:
    """
    The content of a JSON file, read strictly.
    """

def read_variant(text: str, where: str = "variant", version: int = 2) -> typing.Any:
    """
    The fields of Variant.to_json(), read and checked. `version` is that of moeflux.json.
    """

def record_routing(engine: Engine, trace: RoutingTrace | None) -> None:
    """
    Records in `trace` what the engine's routers pick from now on. None ends it.
    """

def replay(
    ids: typing.Annotated[numpy.typing.ArrayLike, numpy.uint16],
    experts: int,
    policy: str,
    slots: int,
    ring_depth: int = 2,
) -> tuple[int, int]:
    """
    (hits, misses) that a policy, or the optimum, has when these tokens are decoded.
    """

def required_tensors(variant_json: str) -> list[typing.Any]:
    """
    (name, logical shape, whether a matrix, whether a table of rows) of everything but the routed experts. A matrix has its base name. Latent attention is in stacks where it may have either form.
    """

def sampler_bytes(vocab_size: int) -> int:
    """
    How much memory a Sampler of such a vocabulary has at most.
    """

def slot_bytes(store: StoreDirectory) -> int:
    """
    What one expert takes in memory.
    """

def snapshot_wire_header(variant_json: str, version: int) -> bytes:
    """
    The header of a snapshot of this variant.
    """

def snapshot_wire_layout(variant_json: str, version: int, positions: int) -> SnapshotWire:
    """
    The layout of a snapshot after `positions` tokens.
    """

def state_pieces(text: str) -> list[typing.Any]:
    """
    (layer, name, whether it has rows, shape of a row or of all of it, positions that share a row, how many of the last rows are seen at most or 0) of each piece of a session's state.
    """

def supports_direct(path: os.PathLike[str] | str | bytes) -> bool:
    """
    Whether the file's file system has direct reads.
    """

def variant_identity(text: str) -> dict[str, typing.Any]:
    """
    The fields that fingerprints are made of: those of version 1, if it can describe the variant. A layer that drafts is none of them.
    """

__commit__: str

__version__: str
