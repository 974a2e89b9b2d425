"""Imports torchvision, also beside a torch for CPUs.

The wheel of torchvision on PyPI is built for CUDA. Beside a torch without CUDA its library of operators does not load,
and the import ends with "operator torchvision::nms does not exist". It is enough to declare these operators: models,
transforms and data sets do not use them.

transformers imports torchvision where it is installed, and then none of its models loads. So the development
environment has torchvision in a directory of its own, which Python does not search until it is asked for here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from penstock.errors import JobError

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
APART = Path(sys.prefix) / "apart"
"""Where `make env` puts it."""
_libraries: list[torch.library.Library] = []
"""Kept, since operators go with the library that declared them."""


def import_torchvision() -> ModuleType:
    """The module ``torchvision``, whose ``models`` are imported too."""
    if not has_torchvision():
        raise JobError("torchvision is not installed; pip install torchvision==0.28.0, or run `make env`")
    if not is_installed() and str(APART) not in sys.path:
        sys.path.append(str(APART))
        importlib.invalidate_caches()
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
    """Installed, or apart from what is."""
    return is_installed() or (APART / "torchvision").is_dir()


def is_installed() -> bool:
    """Whether any import finds it."""
    return importlib.util.find_spec("torchvision") is not None
