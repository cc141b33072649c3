# Made by `make stubs` from the built module; a test compares it with the module.
"""
The C++ core of moeflux.
"""

from __future__ import annotations
import numpy
import numpy.typing
import os
import typing

__all__: list[str] = [
    "BudgetError",
    "DeviceError",
    "Error",
    "ExpertFormats",
    "ExpertLayout",
    "FormatError",
    "IoError",
    "QuantFormat",
    "SafetensorsFile",
    "StateError",
    "StoreDirectory",
    "Tensor",
    "TensorEntry",
    "dequantize",
    "open_mlx",
    "open_packed",
    "parse_json",
    "parse_variant",
    "quantize",
    "read_json",
]

class Error(RuntimeError):
    pass

class FormatError(Error):
    pass

class IoError(Error):
    pass

class DeviceError(Error):
    pass

class StateError(Error):
    pass

class BudgetError(Error):
    pass

class QuantFormat:
    """
    How the numbers of one matrix are stored: affine groups, or plain elements.
    """
    @staticmethod
    def affine(bits: int, group_size: int, scale_type: str = "BF16") -> QuantFormat: ...
    @staticmethod
    def plain(element: str) -> QuantFormat: ...
    def __eq__(self, arg0: QuantFormat) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
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
    def is_affine(self) -> bool: ...
    @property
    def scale_type(self) -> str: ...

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
        From the start of the file.
        """
    @property
    def shape(self) -> tuple: ...

class SafetensorsFile:
    """
    The checked directory of a safetensors file.
    """
    def __init__(self, path: os.PathLike | str | bytes) -> None: ...
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
    def tensors(self) -> dict:
        """
        TensorEntry by name.
        """

class ExpertFormats:
    """
    The formats of the three matrices of every routed expert.
    """
    def __eq__(self, arg0: ExpertFormats) -> bool: ...
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
        Of one expert.
        """
    @property
    def formats(self) -> ExpertFormats: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def pieces(self) -> list:
        """
        (name, offset, bytes, dtype, shape) of each, in order.
        """

class Tensor:
    """
    A tensor of a store: an ordered list of byte ranges, row-major.
    """
    def __repr__(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple: ...
    @property
    def spans(self) -> list:
        """
        (file, offset, bytes) of each range.
        """

class StoreDirectory:
    """
    What a store holds and where, checked against its variant.
    """
    def expert_spans(self, layer: int, expert: int) -> list:
        """
        (file, offset, bytes) of each piece of the expert, in layout order.
        """
    @property
    def experts(self) -> ExpertLayout: ...
    @property
    def files(self) -> list:
        """
        Absolute paths; spans refer to them by index.
        """
    @property
    def formats(self) -> dict:
        """
        QuantFormat of every matrix, by its base name.
        """
    @property
    def ignored(self) -> list[str]:
        """
        Tensors that are there and deliberately not used.
        """
    @property
    def tensors(self) -> dict:
        """
        Tensor by canonical name, routed experts aside.
        """

def dequantize(
    words: numpy.ndarray,
    scales: numpy.ndarray,
    biases: numpy.ndarray,
    format: QuantFormat,
    columns: int,
    threads: int = 0,
) -> numpy.typing.NDArray[numpy.float32]:
    """
    The float32 numbers that an affine matrix stands for: code * scale + bias.
    """

def open_mlx(folder: os.PathLike | str | bytes, variant_json: str) -> StoreDirectory:
    """
    A folder of MLX safetensors, in place.
    """

def open_packed(
    weights_dir: os.PathLike | str | bytes,
    experts_dir: os.PathLike | str | bytes,
    variant_json: str,
    experts: ExpertFormats | None = None,
) -> StoreDirectory:
    """
    A packed store. `experts_dir` holds the layer files; without `experts` it is one of the older tools.
    """

def parse_json(text: str, where: str = "text") -> typing.Any:
    """
    The value of a JSON text (str or UTF-8 bytes), read strictly.
    """

def parse_variant(text: str) -> typing.Any:
    """
    The fields of Variant.to_json() as the C++ core understands them.
    """

def quantize(array: numpy.ndarray, format: QuantFormat, threads: int = 0) -> tuple:
    """
    MLX's affine quantisation of float32, float16 or uint16 (raw bf16) rows: (words, scales, biases).
    """

def read_json(path: os.PathLike | str | bytes) -> typing.Any:
    """
    The content of a JSON file, read strictly.
    """

__version__: str
