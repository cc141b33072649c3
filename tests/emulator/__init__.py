"""A Metal device for machines without one: kernels in the Metal Shading Language, run on the CPU.

`translate` turns a .metal file into C++ that clang compiles against the headers in shim/; `build` compiles it, once
for speed and once with every load and store announced; `device` runs kernels with one fiber a GPU thread, true barriers
and simdgroups of 32 (runtime/), in any order, and reports what the checker found. `lint` refuses what Apple's compiler
would refuse, as far as clang can tell, and what this emulator could not verify.

`gpu` is the same device as Apple's API has it: apple/ holds a small Objective-C runtime and a stand-in for Metal, which
are compiled together with csrc/metal/apple_device.mm, as it is, so that the engine runs on it.
"""
