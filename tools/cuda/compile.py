"""The kernels of metal/ for an NVIDIA GPU: the same text, through the emulator's headers, to PTX and by ptxas to
machine code, with a table of what each kernel takes. The emulator's planted bugs too, in bugs/.

    python tools/cuda/compile.py FOLDER [--arch sm_90]

Needs clang 19 or newer and NVIDIA's toolkit (CUDA_HOME, else /usr/local/cuda).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from emulator.build import HERE, METAL, RUNTIME, preprocessed  # noqa: E402
from emulator.compilers import Compiler, compilers  # noqa: E402
from emulator.translate import SCALARS, VECTORS, Function, Instance, Translation, translate  # noqa: E402

CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
PLACE = """
__attribute__((always_inline)) static inline MslPlace msl_place() {
  const uint32_t within[3] = {__nvvm_read_ptx_sreg_tid_x(), __nvvm_read_ptx_sreg_tid_y(), __nvvm_read_ptx_sreg_tid_z()};
  const uint32_t threads[3] = {__nvvm_read_ptx_sreg_ntid_x(), __nvvm_read_ptx_sreg_ntid_y(),
                               __nvvm_read_ptx_sreg_ntid_z()};
  const uint32_t group[3] = {__nvvm_read_ptx_sreg_ctaid_x(), __nvvm_read_ptx_sreg_ctaid_y(),
                             __nvvm_read_ptx_sreg_ctaid_z()};
  const uint32_t groups[3] = {__nvvm_read_ptx_sreg_nctaid_x(), __nvvm_read_ptx_sreg_nctaid_y(),
                              __nvvm_read_ptx_sreg_nctaid_z()};
  MslPlace place;
  for (int axis = 0; axis < 3; ++axis) {
    place.thread_position_in_grid[axis] = group[axis] * threads[axis] + within[axis];
    place.threadgroup_position_in_grid[axis] = group[axis];
    place.thread_position_in_threadgroup[axis] = within[axis];
    place.threads_per_threadgroup[axis] = threads[axis];
    place.threads_per_grid[axis] = groups[axis] * threads[axis];
    place.threadgroups_per_grid[axis] = groups[axis];
  }
  const uint32_t index = (within[2] * threads[1] + within[1]) * threads[0] + within[0];
  place.thread_index_in_threadgroup = index;
  place.thread_index_in_simdgroup = index % 32;
  place.simdgroup_index_in_threadgroup = index / 32;
  place.simdgroups_per_threadgroup = (threads[0] * threads[1] * threads[2] + 31) / 32;
  return place;
}
"""


def wrapper(function: Function) -> str:
    """The kernel with untyped buffers in its parameters' order, and where the thread is."""
    places = range(len(function.parameters))
    types = ", ".join(f"P{i}" for i in places)
    given = ", ".join(f"MSL_DEVICE void* b{p.index}" for p in function.parameters if p.attribute == "buffer")
    arguments = []
    for i, parameter in enumerate(function.parameters):
        if parameter.attribute == "buffer":
            arguments.append(f"msl_argument<P{i}>::from(b{parameter.index})")
        elif parameter.attribute in VECTORS:
            at = ", ".join(f"place.{parameter.attribute}[{axis}]" for axis in range(3))
            arguments.append(f"msl_position<P{i}>::from(metal::uint3{{{at}}})")
        else:
            assert parameter.attribute in SCALARS
            arguments.append(f"P{i}(place.{parameter.attribute})")
    return (
        f"template <auto f> struct msl_call_{function.name};\n"
        f"template <{', '.join(f'typename P{i}' for i in places)}, void (*f)({types})>\n"
        f"struct msl_call_{function.name}<f> {{\n"
        f"  __attribute__((always_inline)) static inline void call({given}) {{\n"
        f"    const MslPlace place = msl_place();\n    f({', '.join(arguments)});\n  }}\n}};\n"
    )


def entry(instance: Instance, function: Function) -> str:
    buffers = [parameter for parameter in function.parameters if parameter.attribute == "buffer"]
    given = ", ".join(f"MSL_DEVICE void* b{parameter.index}" for parameter in buffers)
    passed = ", ".join(f"b{parameter.index}" for parameter in buffers)
    return (
        f'extern "C" __attribute__((nvptx_kernel)) void msl_{instance.name}({given}) {{\n'
        f"  msl_call_{instance.function}<&{instance.function}{instance.arguments}>::call({passed});\n}}\n"
    )


def source(translation: Translation) -> str:
    text = [
        f'#include "{RUNTIME}/abi.h"\n#include "{HERE}/shim/keywords.h"\n{translation.body}\n# 1 "entries" 3\n',
        PLACE,
    ]
    text += [wrapper(function) for function in translation.functions.values()]
    text += [entry(instance, translation.functions[instance.function]) for instance in translation.instances]
    return "".join(text)


def clang() -> Compiler:
    for each in compilers():
        if each.name == "clang":
            return each
    raise SystemExit("compile.py: expected clang 19 or newer, found none")


def compile_file(path: Path, folder: Path, arch: str) -> dict[str, list[int]]:
    """kernel -> the numbers of its buffers, in the order of the arguments"""
    by = clang()
    translation = translate(preprocessed(path, by))
    ptx, cubin = folder / f"{path.stem}.ptx", folder / f"{path.stem}.cubin"
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary) / "kernel.cpp"
        text.write_text(source(translation))
        by.run(
            *("--target=nvptx64-nvidia-cuda", f"-march={arch}", "-Xclang", "-target-feature", "-Xclang", "+ptx80"),
            *(
                "-std=c++17",
                "-O3",
                "-S",
                "-gline-tables-only",
                "-ffreestanding",
                "-nostdinc++",
                "-nocudalib",
                "-DMSL_PTX",
            ),
            *("-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-w"),
            *("-Xclang", "-mlink-builtin-bitcode", "-Xclang", CUDA / "nvvm" / "libdevice" / "libdevice.10.bc"),
            *(text, "-o", ptx),
        )
    said = subprocess.run(
        [CUDA / "bin" / "ptxas", f"-arch={arch}", "-v", "-lineinfo", ptx, "-o", cubin],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    spills = [line.strip() for line in said.splitlines() if "spill" in line and "0 bytes spill stores" not in line]
    print(f"{path.stem}: {len(translation.instances)} kernels, {len(spills)} with spilled registers")
    ptx.unlink()
    return {
        instance.name: [p.index for p in translation.functions[instance.function].parameters if p.attribute == "buffer"]
        for instance in translation.instances
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90")
    arguments = parser.parse_args()
    bugs = [HERE / "samples" / "bugs.metal"]
    for folder, files in ((arguments.folder, sorted(METAL.glob("*.metal"))), (arguments.folder / "bugs", bugs)):
        folder.mkdir(parents=True, exist_ok=True)
        table = {path.stem: compile_file(path, folder, arguments.arch) for path in files}
        (folder / "kernels.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
