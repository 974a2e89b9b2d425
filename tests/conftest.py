"""One thread per test process, so that tests side by side do not fight over cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
