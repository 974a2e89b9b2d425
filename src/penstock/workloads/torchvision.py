"""Imports torchvision, also beside a torch for CPUs.

The wheel of torchvision on PyPI is built for CUDA. Beside a torch without CUDA its library of operators does not load,
and the import ends with "operator torchvision::nms does not exist". It is enough to declare these operators: models,
transforms and data sets do not use them. transformers imports torchvision where it is installed: import it here first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from penstock.errors import JobError

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []
"""Kept, since operators go with the library that declared them."""


def import_torchvision() -> ModuleType:
    """The module ``torchvision``, whose ``models`` are imported too."""
    if not has_torchvision():
        raise JobError("torchvision is not installed; pip install torchvision==0.28.0, or '.[dev]'")
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        _libraries.append(library)
        for schema in _DECLARED:
            library.define(schema)  # type: ignore[no-untyped-call]
    importlib.import_module("torchvision.models")
    return sys.modules["torchvision"]


def has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None
