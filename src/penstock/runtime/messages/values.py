"""Values between stages: the codecs, and what autograd needs to know of a value of any kind.

A value is of the kind of the first codec that takes it. A gradient is a value too: of a tensor a tensor or None, of
anything else a tuple with one of these for each of its tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import WorkerError
from penstock.runtime.messages.dense import Codec, Dense
from penstock.runtime.messages.nested import Nested, type_name

TENSOR_CODECS: tuple[Codec, ...] = (Dense(),)
CODECS: tuple[Codec, ...] = (*TENSOR_CODECS, Nested(TENSOR_CODECS))

Gradient = Tensor | tuple[Tensor | None, ...] | None


def codec_of(value: Any) -> Codec | None:
    for codec in CODECS:
        if codec.takes(value):
            return codec
    return None


def codec_named(kind: Any) -> Codec:
    for codec in CODECS:
        if codec.kind == kind:
            return codec
    raise WorkerError(
        f"a message holds a value of kind {kind!r}, which is unknown; run the same version on all workers"
    )


def obstacle(value: Any) -> str:
    """What keeps a value from being sent, as a type or a kind of tensor; empty where nothing does."""
    codec = codec_of(value)
    return type_name(value) if codec is None else codec.obstacle(value)


def sent_tensors(value: Any) -> list[Tensor]:
    """The tensors that travel for a value that can be sent; their bytes are what it costs."""
    codec = codec_of(value)
    if codec is None:
        raise WorkerError(f"a {obstacle(value)} cannot be sent; keep the layers on both sides of it in one stage")
    return codec.encode(value)[1]


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def detached(value: Any) -> Any:
    """The value without the graph behind it, in containers of its own. Its tensors say whether gradients are owed."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return pytree.tree_map_only(Tensor, detached, value)


def rebuilt(value: Any) -> Any:
    """The same tensors in containers of their own, for a module that may change what it is given."""
    return value if isinstance(value, Tensor) else pytree.tree_map(lambda leaf: leaf, value)


def leaves_of(value: Any) -> Tensor | tuple[Tensor, ...]:
    """The tensors that gradients are found for. A module may change the container that it is given, but not these."""
    return value if isinstance(value, Tensor) else tuple(tensors_in(value))


def gradient_of(value: Any) -> Gradient:
    return value.grad if isinstance(value, Tensor) else tuple(tensor.grad for tensor in tensors_in(value))
