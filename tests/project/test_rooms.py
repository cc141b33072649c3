"""Who may lean on whom in the package: its rooms from the roof to the ground, every import pointing down, no circles.

An import counts wherever it stands: at the top, in a function, or for type checkers alone. One that is not at the top
is listed with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

GROUND = {"_core", "errors", "log", "sizes", "files", "progress", "living"}
"""What every room but the oracle may use."""

FACE = {"model", "session"}
BELOW_THE_FACE = {"serving", "text", "runtime", "routing", "machine", "stores", "models", "oracle", "ops"}

# Room, or module beside the rooms -> what it may import besides the ground, and besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {"__init__", "replicas", "cluster", "serve", "measure", "conversion"} | FACE | BELOW_THE_FACE,
    "replicas": {"cluster", "serve", "serving", "runtime", "machine", "stores"} | FACE,
    "serve": {"serving", "text", "runtime", "models"} | FACE,
    "measure": {"conversion"} | FACE | BELOW_THE_FACE,
    "conversion": {"stores", "models"},
    "loading": {"cluster", "model", "runtime"},
    "cluster": {"runtime", "machine", "stores", "models"} | FACE,
    "model": {"session", "text", "runtime", "machine", "stores", "models"},
    "session": {"text", "runtime"},
    "serving": {"text", "runtime", "models"},
    "text": {"runtime", "machine", "models"},
    "runtime": {"routing", "machine", "stores", "models"},
    "routing": {"machine", "stores"},
    "machine": {"models"},
    "stores": {"models"},
    "oracle": {"models"},
    "models": set(),
    "ops": set(),
}
# Of the ground, and of those who may not use all of it.
MAY_USE_OF_THE_GROUND: dict[str, set[str]] = {
    "_core": {"errors"},  # its errors are classes of Python
    "errors": set(),
    "sizes": {"errors"},
    "files": {"_core", "errors"},
    "log": set(),
    "living": set(),
    "progress": {"log", "sizes"},
    "oracle": set(),
    "__main__": set(),
}
ORACLE_LIBRARIES = {"numpy"}

STARTS_AT_ONCE = "help, a wrong call and a Ctrl-C need neither NumPy nor the core: a command imports what it runs"
WITHOUT_TEXT = "tokenizers and Jinja take 50 ms and 10 MB, which who evaluates tokens does not need"
ONLY_WHEN_USED = "heavy, or not there on every machine"
BESIDE_A_GPU = "a thread opens the GPU meanwhile, which takes as long"
FOR_TYPES = "of type checkers, which have it; Python has Unpack itself from 3.11 on"
A_PROCESS = (
    "encoder.py is also the program of a process that has nothing of the package: its folder is on the path there"
)
# Room, or module beside the rooms -> the room, module or package that it imports elsewhere than at the top -> why.
# `*`: anything.
LATE: dict[str, dict[str, str]] = {
    "__main__": {"cli": "the process catches a Ctrl-C before it imports anything"},
    "cli": {"*": STARTS_AT_ONCE},
    "loading": {
        "cluster": STARTS_AT_ONCE,
        "model": BESIDE_A_GPU,
        "runtime": BESIDE_A_GPU,
        "_core": BESIDE_A_GPU,
        "typing_extensions": FOR_TYPES,
    },
    "cluster": {"ray": ONLY_WHEN_USED, "cryptography": ONLY_WHEN_USED, "typing_extensions": FOR_TYPES},
    "replicas": {"ray": ONLY_WHEN_USED},
    "model": {"text": WITHOUT_TEXT, "typing_extensions": FOR_TYPES},
    "session": {"text": WITHOUT_TEXT},
    "runtime": {"typing_extensions": FOR_TYPES},
    "measure": {"typing_extensions": FOR_TYPES, "matplotlib": ONLY_WHEN_USED},
    "files": {"numpy": STARTS_AT_ONCE},
    "progress": {"rich": ONLY_WHEN_USED},
    "models": {"huggingface_hub": ONLY_WHEN_USED},
    "text": {"renderer": A_PROCESS, "text.renderer": A_PROCESS},
}


@dataclass(frozen=True)
class Import:
    module: str  # dotted, without "moeflux.": "text.chat"
    target: str  # the same for modules of the package, else the name of another package
    ours: bool
    late: bool

    @property
    def room(self) -> str:
        return self.module.split(".")[0]

    @property
    def target_room(self) -> str:
        return self.target.split(".")[0]


def imports(package: Path, name: str = "moeflux") -> Iterator[Import]:
    names = {".".join(file.relative_to(package).with_suffix("").parts) for file in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in names} | {"_core", "__init__"}
    for file in sorted(package.rglob("*.py")):
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        # What it is relative to: the package it lies in, which for an __init__ is itself.
        here = (name, *module.split(".")[:-1])
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            for imported in _imported(node, here):
                ours = f"{imported}.".startswith(f"{name}.")
                target = imported.removeprefix(name).removeprefix(".")
                while ours and target and target not in modules:
                    target = target.rpartition(".")[0]
                yield Import(
                    module.removesuffix(".__init__"),
                    (target or "__init__") if ours else imported.split(".")[0],
                    ours,
                    node not in tree.body,
                )


def _imported(node: ast.AST, here: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
    base = ".".join(part for part in (base, node.module) if part)
    return [f"{base}.{alias.name}" for alias in node.names]


def faults(package: Path) -> list[str]:
    """One sentence for each import that must not be."""
    found = []
    for each in imports(package):
        reason = _direction(each) or _time(each)
        if reason:
            found.append(f"{each.module} imports {each.target}: {reason}")
    return found + [f"circle: {' -> '.join(circle)}" for circle in _circles(imports(package))]


def _direction(each: Import) -> str:
    room, target = each.room, each.target_room
    if not each.ours:
        foreign = target not in sys.stdlib_module_names and target not in ORACLE_LIBRARIES
        return "the oracle is an independent opinion" if room == "oracle" and foreign else ""
    if room in ("__init__", target):
        return ""
    if room not in MAY_IMPORT and room not in MAY_USE_OF_THE_GROUND:
        return "the room is not in the table"
    allowed = MAY_IMPORT.get(room, set()) | MAY_USE_OF_THE_GROUND.get(room, GROUND)
    return "" if target in allowed else f"{room} may lean on {', '.join(sorted(allowed)) or 'nothing'}"


def _time(each: Import) -> str:
    if not each.late or (not each.ours and each.target in sys.stdlib_module_names):
        return ""
    if LATE.get(each.room, {}).keys() & {"*", each.target, each.target_room}:
        return ""
    return "expected at the top of the file, or in the table of late imports with a reason"


def _circles(found: Iterable[Import]) -> list[list[str]]:
    """The circles of modules, within rooms and across them: one for each module that the search comes back to."""
    below: dict[str, set[str]] = {}
    for each in found:
        if each.ours and each.target not in (each.module, "__init__"):
            below.setdefault(each.module, set()).add(each.target)
    circles: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            circles.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(below.get(module, ())):
                walk(target, [*path, module])
            done.add(module)

    for module in sorted(below):
        walk(module, [])
    return circles


# ---- The package ------------------------------------------------------------------------------------------------


def test_imports_point_down() -> None:
    assert faults(ROOT / "python" / "moeflux") == []


def test_the_trainer_has_no_circles() -> None:
    found = list(imports(ROOT / "tools" / "train", "tools.train"))
    assert len([each for each in found if each.ours]) > 30
    assert _circles(found) == []


def test_the_tables_name_what_there_is() -> None:
    package = ROOT / "python" / "moeflux"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert MAY_IMPORT.keys() | MAY_USE_OF_THE_GROUND.keys() == (there | {"_core"}) - {"__init__"}
    late = {(each.room, name) for each in imports(package) if each.late for name in (each.target, each.target_room)}
    unused = [
        (room, name) for room, names in LATE.items() for name in names if name != "*" and (room, name) not in late
    ]
    assert unused == []


def test_the_table_has_no_circles() -> None:
    def reach(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"circle: {' -> '.join((*path, room))}"
        for target in MAY_IMPORT.get(room, set()) | MAY_USE_OF_THE_GROUND.get(room, GROUND):
            if target != "__init__":
                reach(target, (*path, room))

    for room in MAY_IMPORT.keys() | MAY_USE_OF_THE_GROUND.keys():
        reach(room, ())


# ---- The test itself --------------------------------------------------------------------------------------------


def planted(package: Path, files: dict[str, str]) -> list[str]:
    for room in ("stores", "cli", "models", "text", "oracle"):
        (package / room).mkdir()
        (package / room / "__init__.py").touch()
    for path in ("errors.py", "stores/store.py", "models/variants.py", "session.py", "text/chat.py"):
        (package / path).touch()
    for path, text in files.items():
        (package / path).parent.mkdir(exist_ok=True)
        (package / path).write_text(f"{text}\n")
    return faults(package)


LATE_SENTENCE = "in the table of late imports"


@pytest.mark.parametrize(
    ("path", "line", "fault"),
    [
        ("oracle/ops.py", "import torch", "independent opinion"),
        ("oracle/ops.py", "from moeflux._core import quantize", "oracle may lean on"),
        ("oracle/ops.py", "from ..stores.store import open_store", "oracle may lean on"),
        ("oracle/ops.py", "def f():\n    from moeflux import stores", "oracle may lean on"),
        ("oracle/ops.py", "from moeflux import Variant", "oracle may lean on"),
        ("models/variants.py", "from moeflux.stores.store import Store", "models may lean on"),
        ("models/variants.py", "import moeflux", "models may lean on"),
        ("errors.py", "from moeflux.models.variants import Variant", "errors may lean on"),
        ("stores/store.py", "from moeflux.cli import main", "stores may lean on"),
        ("stores/store.py", "from .. import cli", "stores may lean on"),
        ("text/chat.py", "if TYPE_CHECKING:\n    from moeflux.session import Session", "text may lean on"),
        ("text/chat.py", "def f():\n    from moeflux.models.variants import Variant", LATE_SENTENCE),
        ("text/chat.py", "if TYPE_CHECKING:\n    from moeflux.models.variants import Variant", LATE_SENTENCE),
        ("text/chat.py", "def f():\n    import tokenizers", LATE_SENTENCE),
        ("attic/box.py", "from moeflux.errors import Error", "the room is not in the table"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, path: str, line: str, fault: str) -> None:
    (found,) = planted(tmp_path, {path: line})
    assert fault in found


@pytest.mark.parametrize("back", ["from moeflux.stores.store import b", "from .store import b"])
def test_a_planted_circle_is_found(tmp_path: Path, back: str) -> None:
    here = "from moeflux.stores.packed import a"
    (found,) = planted(tmp_path, {"stores/store.py": here, "stores/packed.py": back})
    assert found == "circle: stores.packed -> stores.store -> stores.packed"


def test_lawful_imports_pass(tmp_path: Path) -> None:
    files = {
        "oracle/rope.py": "import math\nimport numpy as np\nfrom moeflux.models.variants import Variant\n"
        "from moeflux.oracle import ops",
        "oracle/ops.py": "",
        "__init__.py": "from moeflux.session import Session",
        "__main__.py": "def program():\n    from moeflux.cli import main",
        "stores/store.py": "from moeflux import _core\nfrom moeflux.models.variants import Variant\nimport torch",
        "cli/make.py": "def f():\n    from moeflux.stores.store import open_store\n    import moeflux",
        "session.py": "if TYPE_CHECKING:\n    from moeflux.text.chat import Prompt",
        "text/chat.py": "def f():\n    import json",
    }
    assert planted(tmp_path, files) == []
