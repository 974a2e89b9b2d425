"""Why something that workers do together failed, in short."""

from __future__ import annotations

import re


def short_reason(error: BaseException) -> str:
    """What torch says, without the place in its sources and the advice."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". This is")[0][:200]
