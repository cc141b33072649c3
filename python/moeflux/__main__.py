"""`python -m moeflux` is `moeflux`."""

from __future__ import annotations

import sys

from moeflux.cli import main

if __name__ == "__main__":
    sys.exit(main())
