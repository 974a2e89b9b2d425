"""Lets a worker's process forget the stages that it does not run.

A job that gives its model whole has all of it in every worker, since capturing needs it. Afterwards a worker needs
its own layers alone, those of evaluation included. What no layer uses stays: the job's loss may read it, and the first
worker writes it into checkpoints.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.capture.split import Splitter


class Share(NamedTuple):
    """The layers of a captured graph that this process runs."""

    splitter: Splitter
    layers: Collection[int]


def release_other_layers(shares: Sequence[Share]) -> None:
    """Free the parameters and buffers of all layers that are in no share; call it once everything is captured.

    The tensors stay where they are in the model, without elements, so that names are found as before, and anything
    that still computed with one would fail by its shape.
    """
    own = {id(tensor) for splitter, layers in shares for tensor in splitter.held_by(layers)}
    for splitter, _ in shares:
        for tensor in splitter.held_by(range(len(splitter.captured.layers))):
            if id(tensor) not in own and _has_elements(tensor):
                tensor.grad = None
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    gc.collect()  # what capturing has left
    _give_back()


def _has_elements(tensor: Tensor) -> bool:
    """In memory of its own, which a plain tensor can be without."""
    is_plain = isinstance(tensor, nn.Parameter) or type(tensor) is Tensor
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


def _give_back() -> None:
    """Workers have glibc keep what they free, for the next microbatch; of this they will not need as much again."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # another libc
