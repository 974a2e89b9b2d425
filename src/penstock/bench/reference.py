"""Where PipeDream's published profiles are. They are not part of Penstock: ``PENSTOCK_REFERENCE`` names a directory
with ``pipedream/profiles/NAME/graph.txt`` and ``pipedream/optimizer_results.json``."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "PENSTOCK_REFERENCE"


def pipedream_reference() -> Path | None:
    """The directory ``pipedream``; None where nobody named one with profiles in it."""
    directory = Path(os.environ.get(VARIABLE, "")) / "pipedream"
    return directory if (directory / "profiles").is_dir() else None
