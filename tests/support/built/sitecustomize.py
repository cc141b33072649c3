"""Python runs this when a process begins that a test has started. An editable install looks whether something is to be
compiled anew when moeflux is imported, which takes ten times as long as the import. The process of the tests has looked
already."""

import sys

for finder in sys.meta_path:
    if getattr(finder, "rebuild_flag", False):
        finder.rebuild_flag = False  # type: ignore[attr-defined]
