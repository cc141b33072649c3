"""CUDA text to C++: a shared variable becomes a macro of shim/cuda.h, and a table of the kernels is added. All else is
left as it is, on its line."""

from __future__ import annotations

from dataclasses import dataclass

from emulator.tokens import KernelError, Token, closing, meaningful
from emulator.translate import declares_variable, next_place, shared_variables, skip


@dataclass(frozen=True)
class Kernel:
    params: str  # their type
    cluster: int  # blocks that run at the same time; 0: each by itself


def translate_cuda(text: list[Token]) -> tuple[str, dict[str, Kernel]]:
    """The body, and the kernels by their names."""
    kernels: dict[str, Kernel] = {}
    body: list[str] = []
    depth = variables = i = 0
    while i < len(text):
        token = text[i]
        depth += (token.text == "{") - (token.text == "}")
        if token.text == "__global__" and depth == 0:
            name, kernel = _kernel(text, i)
            kernels[name] = kernel
        elif token.text == "extern" and text[next_place(text, i)].text == "__shared__":
            end = next(j for j in range(i, len(text)) if text[j].text == ";")
            body.append(_dynamic_memory(text[next_place(text, i) + 1 : end]))
            i = skip(text, i, end + 1, body)
            continue
        elif token.text == "__shared__":
            if not declares_variable(text, i):
                raise KernelError(f"{token.place}: expected a shared variable, found something else")
            end = next(j for j in range(i, len(text)) if text[j].text == ";")
            for macro in shared_variables(text[i + 1 : end], variables):
                variables += 1
                body.append(macro)
            i = skip(text, i, end + 1, body)
            continue
        body.append(token.text)
        i += 1
    if not kernels:
        raise KernelError("expected at least one kernel, found none")
    return "".join(body), kernels


def _kernel(text: list[Token], i: int) -> tuple[str, Kernel]:
    """`extern "C" __global__ void name(const Params params) {`, perhaps with bounds and the extents of a cluster."""
    before = [text[j].text for j in _places_before(text, i, 2)]
    opening = next(j for j in range(i, len(text)) if text[j].text == "{")
    head = meaningful(text[i:opening])
    _cut(head, "__launch_bounds__")
    extents = [token.text for token in _cut(head, "__cluster_dims__")]
    if extents and (extents[1:] != [",", "1", ",", "1"] or not extents[0].isdecimal()):
        raise KernelError(f"{text[i].place}: expected __cluster_dims__(n, 1, 1), found {' '.join(extents)}")
    words = [token.text for token in head]
    is_right = before == ["extern", '"C"'] and len(words) == 8 and words[:2] == ["__global__", "void"]
    if not is_right or [words[3], words[4], words[7]] != ["(", "const", ")"]:
        raise KernelError(
            f'{text[i].place}: expected extern "C" __global__ void name(const Params params), found {" ".join(words)}'
        )
    return words[2], Kernel(words[5], int(extents[0]) if extents else 0)


def _cut(head: list[Token], word: str) -> list[Token]:
    """Takes the word out, with what is in its brackets, which is returned."""
    at = next((i for i, token in enumerate(head) if token.text == word), None)
    if at is None:
        return []
    end = closing(head, at + 1)
    inner = head[at + 2 : end]
    del head[at : end + 1]
    return inner


def _places_before(text: list[Token], i: int, count: int) -> list[int]:
    places: list[int] = []
    while len(places) < count and i > 0:
        i = next_place(text, i, -1)
        places.insert(0, i)
    return places


def _dynamic_memory(declaration: list[Token]) -> str:
    words = [token.text for token in meaningful(declaration)]
    if len(words) < 4 or words[-2:] != ["[", "]"]:
        raise KernelError(f"{declaration[0].place}: expected extern __shared__ T name[], found {' '.join(words)}")
    return f"MSL_DYNAMIC_MEMORY({words[-3]}, {' '.join(words[:-3])});"


def cuda_wrappers(kernels: dict[str, Kernel]) -> str:
    """A function for each kernel that takes its arguments as an untyped place, and the table that names all."""
    text, rows = [], []
    for name, kernel in kernels.items():
        type = kernel.params
        text.append(
            f"static void msl_call_{name}(const MslPlace*, void* const* buffers) "
            f"{{ {name}(*(const {type}*)buffers[0]); }}\n"
            f"static const MslParameter msl_parameter_of_{name} = "
            f'{{0, sizeof({type}), alignof({type}), true, true, "params"}};\n'
        )
        rows.append(f'{{"{name}", msl_call_{name}, &msl_parameter_of_{name}, 1, {kernel.cluster}}}')
    text.append(
        'extern "C" __attribute__((visibility("default"))) const MslKernel* msl_kernels(uint32_t* count) {\n'
        f"  static const MslKernel kernels[] = {{{', '.join(rows)}}};\n  *count = {len(rows)};\n  return kernels;\n}}\n"
    )
    return "".join(text)
