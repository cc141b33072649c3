"""Metal text to C++: what C++ cannot say is taken out or written in another way, and a table of the kernels is added.

Out go attributes and the instances of templates; a threadgroup variable becomes a macro of shim/keywords.h. All else is
left as it is, on its line, so that compiler and checker speak of lines of the .metal file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from emulator.tokens import KernelError, Token, closing, joined, meaningful, parts, tokens

VECTORS = {  # of three
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
}
SCALARS = {
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
}
BUFFERS = 31


@dataclass(frozen=True)
class Parameter:
    type: str
    name: str
    attribute: str  # "buffer", or where the thread is
    index: int = 0  # of a buffer

    @property
    def is_reference(self) -> bool:
        return self.type.endswith("&")

    @property
    def is_read_only(self) -> bool:
        words = self.type.replace("*", " ").replace("&", " ").split()
        return "constant" in words or "const" in words


@dataclass(frozen=True)
class Function:
    """`kernel void name(...)`, perhaps a template."""

    name: str
    parameters: tuple[Parameter, ...]
    is_template: bool


@dataclass(frozen=True)
class Instance:
    """What a pipeline is made of: a name, and the function with the arguments of its template."""

    name: str
    function: str
    arguments: str  # "<float, 4>", or nothing


@dataclass(frozen=True)
class Translation:
    body: str
    functions: dict[str, Function]
    instances: list[Instance]


def translate(preprocessed: str) -> Translation:
    text = tokens(preprocessed)
    functions: dict[str, Function] = {}
    instances: list[Instance] = []
    body: list[str] = []
    depth = variables = i = 0
    while i < len(text):
        token = text[i]
        depth += (token.text == "{") - (token.text == "}")
        if token.text == "template" and (end := _instance_end(text, i)):
            instances.append(_instance(text[i:end]))
            i = skip(text, i, end + 1, body)
        elif token.text == "kernel" and depth == 0:
            function = _function(text, i)
            functions[function.name] = function
            if not function.is_template:
                instances.append(Instance(function.name, function.name, ""))
            body.append(token.text)
            i += 1
        elif token.text == "[[":
            i = skip(text, i, closing(text, i) + 1, body)
        elif token.text == "threadgroup" and depth and declares_variable(text, i):
            end = next(j for j in range(i, len(text)) if text[j].text == ";")
            for macro in shared_variables(text[i + 1 : end], variables):
                variables += 1
                body.append(macro)
            i = skip(text, i, end + 1, body)
        else:
            body.append(token.text)
            i += 1
    for instance in instances:
        if instance.function not in functions:
            raise KernelError(f"{instance.name}: expected a kernel {instance.function}, found none")
    if not instances:
        raise KernelError("expected at least one kernel, found none")
    return Translation("".join(body), functions, instances)


def skip(text: list[Token], begin: int, end: int, body: list[str]) -> int:
    body.append("\n" * sum(token.text.count("\n") for token in text[begin:end]))
    return end


def next_place(text: list[Token], i: int, step: int = 1) -> int:
    """The next place that means something."""
    i += step
    while 0 <= i < len(text) and text[i].kind in ("space", "line"):
        i += step
    return i


# ---- Kernels --------------------------------------------------------------------------------------------------------


def _instance_end(text: list[Token], i: int) -> int:
    """The semicolon of `template [[host_name("x")]] kernel decltype(f<T>) f<T>;`, or 0: this is another template."""
    if text[next_place(text, i)].text != "[[":
        return 0
    return next(j for j in range(i, len(text)) if text[j].text == ";")


def _instance(text: list[Token]) -> Instance:
    said = joined(text)
    name = re.search(r'host_name \( ((?:"\w+" ?)+)\)', said)
    # clang spells the arguments twice; the second time is at the end.
    function = re.search(r"kernel decltype \( (\w+) (<.*>) \) \1 \2$", said)
    if not name or not function:
        raise KernelError(
            f'{text[0].place}: expected template [[host_name("name")]] kernel decltype(f<T>) f<T>, found {said}'
        )
    return Instance(name.group(1).replace('"', "").replace(" ", ""), function.group(1), function.group(2))


def _function(text: list[Token], i: int) -> Function:
    opening = next(j for j in range(i, len(text)) if text[j].text == "(")
    name = text[next_place(text, opening, -1)]
    parameters = tuple(_parameter(name.text, part) for part in parts(text[opening + 1 : closing(text, opening)]))
    places = [p.index for p in parameters if p.attribute == "buffer"]
    if len(places) != len(set(places)):
        raise KernelError(f"{name.place}: {name.text}: a buffer index is used twice: {places}")
    return Function(name.text, parameters, text[next_place(text, i, -1)].text == ">")


def _parameter(kernel: str, part: list[Token]) -> Parameter:
    text = meaningful(part)
    start = next((i for i, token in enumerate(text) if token.text == "[["), 0)
    said = " ".join(token.text for token in text)
    if not start:
        raise KernelError(f"{text[0].place}: {kernel}: expected an attribute, found {said}")
    attribute = text[start + 1].text
    type, name = " ".join(token.text for token in text[: start - 1]), text[start - 1].text
    if attribute == "buffer":
        index = int(text[start + 3].text)
        if index >= BUFFERS:
            raise KernelError(f"{text[0].place}: {kernel}: expected buffer 0 to {BUFFERS - 1}, found {index}")
        if not type.endswith(("*", "&")) or not {"device", "constant"} & set(type.split()):
            raise KernelError(
                f"{text[0].place}: {kernel}: expected a pointer or reference to device or constant: {said}"
            )
        return Parameter(type, name, attribute, index)
    if attribute not in VECTORS | SCALARS:
        raise KernelError(f"{text[0].place}: {kernel}: unknown attribute {attribute}")
    return Parameter(type, name, attribute)


# ---- Threadgroup variables ------------------------------------------------------------------------------------------


def declares_variable(text: list[Token], i: int) -> bool:
    """Whether `threadgroup`, or `__shared__`, begins a variable: a statement begins, and no pointer comes of it."""
    if text[next_place(text, i, -1)].text not in ("{", "}", ";"):
        return False
    for token in text[i:]:
        if token.text in ("*", "&"):
            return False
        if token.text in (";", "=", "["):
            return True
    return False


def shared_variables(declaration: list[Token], first: int) -> list[str]:
    """`float a[8], b` as one macro each."""
    place = declaration[0].place
    macros, type = [], ""
    for part in parts(declaration):
        said = joined(part)
        match = re.fullmatch(r"(?P<type>.*\S )?(?P<name>\w+) ?(?P<extents>(?:\[.*\])?)", said)
        if not match or "=" in said or not (type or match["type"]):
            raise KernelError(f"{place}: expected a threadgroup variable without a value, found {said}")
        type = type or match["type"].strip()
        macros.append(f"MSL_THREADGROUP_VARIABLE({first + len(macros)}, {match['name']}, {match['extents']}, {type}); ")
    return macros


# ---- The table ------------------------------------------------------------------------------------------------------


def wrappers(translation: Translation) -> str:
    """A function for each kernel that takes places and untyped buffers, and the table that names all instances."""
    text = [_wrapper(function) for function in translation.functions.values()]
    rows = []
    for instance in translation.instances:
        call = f"msl_call_{instance.function}<&{instance.function}{instance.arguments}>"
        rows.append(f'{{"{instance.name}", {call}::call, {call}::parameters, {call}::parameter_count}}')
    count = len(rows)
    text.append(
        'extern "C" __attribute__((visibility("default"))) const MslKernel* msl_kernels(uint32_t* count) {\n'
        f"  static const MslKernel kernels[] = {{{', '.join(rows)}}};\n  *count = {count};\n  return kernels;\n}}\n"
    )
    return "".join(text)


def _wrapper(function: Function) -> str:
    places = range(len(function.parameters))
    types = ", ".join(f"P{i}" for i in places)
    arguments, rows = [], []
    for i, parameter in enumerate(function.parameters):
        if parameter.attribute == "buffer":
            arguments.append(f"msl_argument<P{i}>::from(buffers[{parameter.index}])")
            rows.append(
                f"{{{parameter.index}, msl_argument<P{i}>::size, msl_argument<P{i}>::alignment, "
                f'{int(parameter.is_read_only)}, {int(parameter.is_reference)}, "{parameter.name}"}}'
            )
        elif parameter.attribute in VECTORS:
            at = ", ".join(f"place->{parameter.attribute}[{axis}]" for axis in range(3))
            arguments.append(f"msl_position<P{i}>::from(metal::uint3{{{at}}})")
        else:
            arguments.append(f"P{i}(place->{parameter.attribute})")
    return (
        f"template <auto f> struct msl_call_{function.name};\n"
        f"template <{', '.join(f'typename P{i}' for i in places)}, void (*f)({types})>\n"
        f"struct msl_call_{function.name}<f> {{\n"
        f"  static void call(const MslPlace* place, void* const* buffers) {{ f({', '.join(arguments)}); }}\n"
        f"  static constexpr uint32_t parameter_count = {len(rows)};\n"
        f"  static constexpr MslParameter parameters[] = {{{', '.join(rows)}}};\n}};\n"
    )
