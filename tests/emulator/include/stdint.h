// Found by `#include <stdint.h>` when a kernel's text is preprocessed; abi.h brings the library's own.
#pragma once
