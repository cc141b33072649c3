#include "core/half.h"
