"""What a profile says of a value, as its codec tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.graph import ValueTensor
from penstock.runtime.messages.values import obstacle, sent_tensors, tensors_in


@dataclass(frozen=True, kw_only=True)
class MadeValue:
    """What is to be known of a value when it is gone."""

    num_bytes: int
    differentiable: bool
    dtype: str
    opaque: str
    tensors: tuple[ValueTensor, ...]


def made_value(value: Any) -> MadeValue:
    """The sizes of a value: what travels for it or, where it cannot be sent, the tensors that it holds."""
    what = obstacle(value)
    held = tensors_in(value) if what else sent_tensors(value)
    is_itself = any(tensor is value for tensor in held)
    tensors = tuple(
        ValueTensor(
            num_bytes=tensor.nbytes, dtype=str(tensor.dtype).partition(".")[2], differentiable=tensor.requires_grad
        )
        for tensor in held
    )
    return MadeValue(
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        differentiable=any(tensor.differentiable for tensor in tensors),
        dtype=", ".join(sorted({tensor.dtype for tensor in tensors})),
        opaque=what,
        tensors=() if what or is_itself else tensors,
    )
