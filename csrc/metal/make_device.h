// The GPU of this machine, where there is one that Metal drives.
#pragma once

#include <memory>
#include <string>

#include "gpu/trial.h"
#include "metal/device.h"

namespace moeflux::metal {

using MakeDevice = std::unique_ptr<Device> (*)();

using gpu::NoSuchDevice;

// If there is none, the DeviceError says why. It is NoSuchDevice where there cannot be one.
std::unique_ptr<Device> make_device();
// Whether "auto" means it: it is preferred, and works.
bool is_chosen();
// Why a GPU that should work does not, in the words of whoever refused. Empty when it works, when "auto" does not mean
// it, or when there is no such GPU.
std::string failure();

// How many multiplications one command buffer may have. They take the slowest GPU a fraction of a second, so that
// nobody takes it for hanging, and yet a step is one command buffer.
constexpr double default_work = 2e10;
double max_work();

// For tests: sets another source of devices, or with null the machine's own.
void set_make_device(MakeDevice make, bool preferred, double max_work);

// The machine's own: apple_device.mm, or nobody's.
std::unique_ptr<Device> make_own_device();
constexpr bool has_own_device =
#if defined(__APPLE__)
    true;
#else
    false;
#endif

}  // namespace moeflux::metal
