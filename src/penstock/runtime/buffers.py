"""Buffers of replicated stages. Each replica's batch norm sees its own microbatches; here their statistics meet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.runtime.transport import Transport


class ReplicaBuffers:
    """One replica's buffers, all of whose replicas began alike.

    The mean is taken over what was added since the replicas last agreed: a buffer that nothing changes, such as a table
    of frequencies, keeps its bits.
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
        self._agreed = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def average(self) -> None:
        """Give all replicas the mean; counters and other whole numbers stay each replica's own."""
        if not self._buffers:
            return
        changes = [buffer - agreed for buffer, agreed in zip(self._buffers, self._agreed, strict=True)]
        flat = torch.cat([change.reshape(-1).double() for change in changes])
        self.transport.all_reduce(flat, self.replicas, self.timeout_s)
        pieces = torch.split(flat / len(self.replicas), [buffer.numel() for buffer in self._buffers])
        for buffer, agreed, piece in zip(self._buffers, self._agreed, pieces, strict=True):
            buffer.copy_(agreed.add_(piece.view_as(agreed)))
