"""What a user gets by installing: one version, types, importable names, and stubs that tell the truth."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moeflux
from moeflux import _core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(moeflux.__file__).parent


def test_one_version() -> None:
    written = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert written is not None
    assert moeflux.__version__ == _core.__version__ == importlib.metadata.version("moeflux") == written[1]
    assert f"\nversion: {written[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n### {written[1]}" in (ROOT / "docs" / "versions.md").read_text()


def test_the_module_runs_as_a_program() -> None:
    run = subprocess.run([sys.executable, "-m", "moeflux", "--version"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"moeflux {moeflux.__version__}, commit ")


def test_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_core.pyi").exists()


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm on this machine to look into the module with")
def test_the_module_shows_its_entry_alone() -> None:
    """Symbols that it exports are merged with those of other libraries in the process under the same names."""
    show = ["nm", "-gU"] if sys.platform == "darwin" else ["nm", "-D", "--defined-only"]
    shown = subprocess.run([*show, _core.__file__], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[-1].removeprefix("_PyInit").removeprefix("PyInit") for line in shown] == ["__core"]


def test_what_is_named_beside_the_classes_is_a_module() -> None:
    program = "import moeflux; print(moeflux.builtin.path().name, moeflux.ops.Ops(isa='portable', threads=1))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("builtin_model Ops(cpu: portable, 1 thread)\n", "")


def test_type_checkers_know_the_names_that_there_are() -> None:
    text = (PACKAGE / "__init__.pyi").read_text()
    space: dict[str, object] = {}
    exec(text, space)
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname or alias.name for node in imports for alias in node.names} == set(moeflux.__all__)
    assert space["__all__"] == moeflux.__all__ and set(moeflux.__all__) <= set(dir(moeflux))
    assert all(space[name] is getattr(moeflux, name) for name in moeflux.__all__)
    with pytest.raises(AttributeError, match="module 'moeflux' has no attribute 'nothing'"):
        moeflux.nothing  # noqa: B018


@pytest.mark.parametrize("home", sorted({home.partition(":")[0] for home in moeflux._HOMES.values()}))
def test_any_module_may_be_the_first(home: str) -> None:
    """No module needs another to have been imported before it."""
    subprocess.run([sys.executable, "-c", f"import {home}"], check=True)


def modules() -> list[str]:
    files = (file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))
    names = (".".join(("moeflux", *file.with_suffix("").parts)) for file in files)
    return sorted({name.removesuffix(".__init__") for name in names} - {"moeflux.__main__"})


@pytest.mark.parametrize("name", modules())
def test_every_public_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert len(set(public)) == len(public)
    assert [each for each in public if not hasattr(module, each)] == []


# ---- The stub ---------------------------------------------------------------------------------------------------


def signatures(stub: str) -> dict[str, str]:
    """Qualified name -> "class Base", or the names of the arguments. Types and texts vary with the generator."""
    found: dict[str, str] = {}

    def walk(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = f"class {', '.join(ast.unparse(base) for base in node.bases)}"
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                kinds = [ast.unparse(each) for each in node.decorator_list if "overload" not in ast.unparse(each)]
                text = " ".join([*kinds, *(each.arg for each in (*node.args.args, *node.args.kwonlyargs))])
                found[prefix + node.name] = (
                    f"{found[prefix + node.name]}; {text}" if prefix + node.name in found else text
                )

    walk(ast.parse(stub).body, "")
    return found


def test_the_stub_is_what_the_module_is(tmp_path: Path) -> None:
    """When this fails: `make stubs`."""
    command = [sys.executable, "-m", "pybind11_stubgen", "moeflux._core", "--exit-code", "-o", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = signatures((tmp_path / "moeflux" / "_core.pyi").read_text())
    assert "QuantFormat.affine" in made
    assert signatures((PACKAGE / "_core.pyi").read_text()) == made


def test_signatures_tell_stubs_apart() -> None:
    one = "class A(B):\n  def f(self, x: int) -> int: ...\n  @property\n  def p(self) -> str: ...\n"
    assert signatures(one) == {"A": "class B", "A.f": "self x", "A.p": "property self"}
    for old, new in (("(B)", ""), ("x: int", "y: int"), ("def p", "def q"), ("@property", "@staticmethod")):
        assert signatures(one.replace(old, new)) != signatures(one)


# ---- The build --------------------------------------------------------------------------------------------------


def test_the_set_up_installs_what_the_build_requires() -> None:
    """tools/setup.sh names the build requirements again, because an editable install builds without isolation."""
    required = re.search(r"^requires = \[(.+)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert required is not None
    for requirement in re.findall(r'"([^"]+)"', required[1]):
        for script in ("setup.sh", "sanitize.sh"):
            assert f'"{requirement}"' in (ROOT / "tools" / script).read_text(), f"{script} lacks {requirement}"
