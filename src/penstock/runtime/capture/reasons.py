"""Says in one sentence why torch could not trace a model, and where in the model's code."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from penstock.errors import CaptureError

_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_MOST_LETTERS = 160


def why(error: Exception) -> str:
    if isinstance(error, CaptureError):
        return str(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        text = "what it does depends on the values of tensors"
    else:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0][:_MOST_LETTERS]}" if lines else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_NOT_THE_MODEL, "<"))
    ]
    if not frames or not frames[-1].line:
        return text
    return f"{text} (`{frames[-1].line}`, {Path(frames[-1].filename).name}:{frames[-1].lineno})"
