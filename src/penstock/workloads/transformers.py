"""Imports transformers, also where torchvision is installed beside a torch for CPUs.

transformers imports torchvision wherever it is installed. If that import fails, none of its models can be imported, so
torchvision is imported first, by the function that works beside any torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from penstock.errors import JobError
from penstock.workloads.torchvision import import_torchvision, is_installed


def import_transformers() -> ModuleType:
    """The module ``transformers``. Each of its models is imported when it is first asked for."""
    if importlib.util.find_spec("transformers") is None:
        raise JobError("transformers is not installed; pip install transformers==5.22.2, or '.[dev]'")
    if is_installed():
        import_torchvision()
    return importlib.import_module("transformers")
