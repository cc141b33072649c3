#pragma once

namespace bench {

extern const char* const commit;  // that was built, with a + when files differed from it; or "unknown"

}  // namespace bench
