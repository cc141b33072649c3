"""Checks a kernel's text without running it.

Clang compiles it as C++14 with the address spaces in the type system. The rest is found in the tokens: what Apple's
compiler refuses and clang does not, and what the emulator could not verify.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from emulator.build import DIALECT, ROOT, preprocessed, source
from emulator.compilers import BUILD, CompileError, Compiler, compiler
from emulator.tokens import KernelError, Token, closing, meaningful, tokens

ADDRESS_SPACES = {"device", "constant", "threadgroup", "thread"}
NOT_THERE = {
    "double": "there is no double",
    "new": "there is no new",
    "delete": "there is no delete",
    "virtual": "there are no virtual functions",
    "throw": "there are no exceptions",
    "try": "there are no exceptions",
    "goto": "there is no goto",
    "std": "the library's namespace is metal",
    "printf": "there is no printf",
    "INFINITY": "fast math may drop infinity: use FLT_MAX",
    "NAN": "fast math may drop NaN",
}
OF_THREE = re.compile(r"(packed_)?(float|half|bfloat|int|uint|short|ushort|char|uchar)3$|packed_\w+$")
DOUBLE_LITERAL = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?$")
WARNINGS = [
    *("-Wall", "-Wextra", "-Wconditional-uninitialized", "-Wshadow", "-Wimplicit-float-conversion"),
    *("-Wfloat-conversion", "-Wpre-c++17-compat", "-Werror"),
    *("-Wno-unused-function", "-Wno-unused-parameter", "-Wno-unused-const-variable"),
    *("-Wno-unneeded-internal-declaration", "-Wno-unknown-warning-option", "-Wno-unused-template"),
]


def faults(path: Path, by: Compiler | None = None) -> list[str]:
    """One sentence for each; none for a kernel in good order."""
    by = by or compiler()
    found = list(_token_faults(path, by))
    try:
        text = source(path, by).text
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            file = Path(folder) / "kernel.cpp"
            file.write_text(text)
            flags = [*DIALECT, f"-I{ROOT}", "-DMSL_ADDRESS_SPACES", "-O0", "-fno-sanitize=undefined", *WARNINGS]
            by.run(*flags, "-c", file, "-o", Path(folder) / "kernel.o")
    except (CompileError, KernelError) as error:
        found.append(str(error))
    return found


def _token_faults(path: Path, by: Compiler) -> Iterator[str]:
    text = [token for token in meaningful(tokens(preprocessed(path, by))) if token.file == str(path)]
    yield from _functions(text)
    for i, token in enumerate(text):
        if token.text in NOT_THERE and token.kind == "word":
            yield f"{token.place}: {NOT_THERE[token.text]}"
        elif token.kind == "word" and OF_THREE.match(token.text) and text[i + 1].text in ("*", "&"):
            yield f"{token.place}: {token.text}: vectors of three are padded in buffers, packed ones are not"
        elif token.kind == "number" and DOUBLE_LITERAL.match(token.text):
            yield f"{token.place}: {token.text}: a literal without f"
        elif token.text == "[" and text[i + 1].text in ("]", "&", "=") and not _is_extent(text, i):
            yield f"{token.place}: there are no lambdas"
        elif token.text in ("*", "&") and (fault := _without_address_space(text, i)):
            yield fault


def _is_extent(text: list[Token], i: int) -> bool:
    return text[i - 1].kind == "word" and text[i - 1].text != "return"


def _without_address_space(text: list[Token], i: int) -> str:
    """A declarator `TYPE * name` whose TYPE begins with none."""
    if text[i + 1].kind != "word" or text[i + 2].text not in (",", ")", "=", ";", "[["):
        return ""
    begin = i
    while begin and text[begin - 1].text not in ("(", ",", ";", "{", "}", ")", "=", "return"):
        begin -= 1
    words = [token.text for token in text[begin:i]]
    if not words or words[-1] == "]" or ADDRESS_SPACES & set(words):
        return ""
    # One word before it that is no type: a product.
    types = re.compile(r"(float|half|bfloat|u?int|u?short|u?char|u?long|bool|T|[A-Z]\w*)[234]?$")
    if any(word in ("const", "volatile") for word in words) or types.match(words[-1]):
        return f"{text[i].place}: {' '.join(words)} {text[i].text} {text[i + 1].text}: names no address space"
    return ""


def _functions(text: list[Token]) -> Iterator[str]:
    """What may not be inside a function, or not inside one that is no kernel."""
    depth = begin = i = 0
    while i < len(text):
        if depth == 0 and text[i].text in (";", "}"):
            begin = i + 1
        if text[i].text == "{" and depth == 0 and i and text[i - 1].text == ")":
            end = closing(text, i)
            head, body = text[begin:i], text[i + 1 : end]
            yield from _function(head, body)
            i, begin = end, end + 1
        else:
            depth += (text[i].text == "{") - (text[i].text == "}")
        i += 1


def _function(head: list[Token], body: list[Token]) -> Iterator[str]:
    words = [token.text for token in head]
    opening = words.index("(")
    name = words[opening - 1]
    for i, token in enumerate(body):
        if token.text == name and body[i + 1].text == "(":
            yield f"{token.place}: {name} calls itself"
        if token.text == "static" and body[i + 1].text != "constexpr":
            yield f"{token.place}: a static variable in {name}"
        begins = i == 0 or body[i - 1].text in ("{", "}", ";")
        if token.text == "threadgroup" and begins and "kernel" not in words:
            statement = [other.text for other in body[i : i + 6]]
            if "*" not in statement and "&" not in statement:
                yield f"{token.place}: a threadgroup variable in {name}, which is no kernel"
