"""Buffers of replicated stages. Each replica's batch norm sees its own microbatches; here their statistics meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.runtime.transport.base import Transport


class ReplicaBuffers:
    """The buffers of one replica. All replicas of the stage begin with the same values.

    What is averaged is the change since the replicas last agreed. A number that no replica has changed keeps its bits,
    also if it is infinite or NaN, such as a causal mask; a buffer without any change is not sent.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        replicas: tuple[int, ...],
        *,
        transport: Transport,
        timeout_s: float,
    ) -> None:
        self.replicas, self.transport, self.timeout_s = replicas, transport, timeout_s
        shared = len(replicas) > 1
        self._buffers = [b for _, b in sorted(buffers.items()) if shared and b.is_floating_point() and b.numel()]
        self.agree()

    def agree(self) -> None:
        """Take the present values as those of all replicas: at the start, and after all have loaded the same."""
        self._agreed = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def average(self) -> None:
        """Give all replicas the mean; counters and other whole numbers stay each replica's own.

        A number that was infinite or NaN becomes the mean over those replicas that changed it. One that a replica
        makes infinite or NaN becomes so for all.
        """
        pairs = list(zip(self._buffers, self._agreed, strict=True))
        if not pairs:
            return
        differs = [_bits(buffer) != _bits(agreed) for buffer, agreed in pairs]
        (counts,) = self._summed([torch.stack([changed.any() for changed in differs])])
        places = [place for place, count in enumerate(counts.tolist()) if count > 0]
        if not places:
            return
        changes = [
            torch.where(differs[place], pairs[place][0].double() - _base(pairs[place][1]), 0.0) for place in places
        ]
        sums = self._summed(changes + [differs[place] for place in places])
        for place, change, count in zip(places, sums[: len(places)], sums[len(places) :], strict=True):
            buffer, agreed = pairs[place]
            over = torch.where(agreed.isfinite(), len(self.replicas), count)
            agreed.copy_(torch.where(count > 0, (_base(agreed) + change / over).to(agreed.dtype), agreed))
            buffer.copy_(agreed)

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Over the replicas, in double precision and in one message."""
        flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        self.transport.all_reduce(flat, self.replicas, self.timeout_s)
        pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _base(agreed: Tensor) -> Tensor:
    """What changes are counted from: nothing can be subtracted from an infinite number."""
    return torch.where(agreed.isfinite(), agreed, 0.0).double()


def _bits(tensor: Tensor) -> Tensor:
    """The same numbers as integers, so that NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
