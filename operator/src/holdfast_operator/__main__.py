"""``python -m holdfast_operator``."""

from __future__ import annotations

import sys

from holdfast_operator.main import main

if __name__ == "__main__":
    sys.exit(main())
