"""Computing a section twice: what its forward makes is forgotten, and made again, to the last bit, for the backward.

Both times run with gradients on, as without recompute: some operations (LSTM among them) take another kernel without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.runtime.capture.split import Section

Computed = tuple[tuple[Any, ...], Any]
"""The values sent and what the output node needs, as a section returns them."""


@dataclass(frozen=True, kw_only=True)
class SecondForward:
    """Computes a section again for the backward: all that the first forward depended on, as it was before it."""

    section: Section
    leaves: Mapping[str, Tensor]
    arguments: Sequence[Any]
    buffers: Mapping[Tensor, Tensor]
    """Copies of the section's buffers, by the buffer."""

    def run(self) -> Computed:
        """Compute again, by the same key of random numbers. The section's buffers stay where they are."""
        copies = {buffer: old.clone() for buffer, old in self.buffers.items()}
        named = self.section.module.named_buffers(remove_duplicate=False)
        return self.section.run(self.leaves, self.arguments, {name: copies[buffer] for name, buffer in named})


class FirstForward:
    """Runs a section, and keeps what is needed to run it again."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self._copies: dict[Tensor, Tensor] = {}

    def run(self, leaves: Mapping[str, Tensor], arguments: Sequence[Any]) -> tuple[Computed, SecondForward]:
        again = SecondForward(
            section=self.section,
            leaves=leaves,
            arguments=arguments,
            buffers=self._buffers_now(),
        )
        with torch.enable_grad():
            return self.section.run(leaves, pytree.tree_map(_safe_to_overwrite, arguments)), again

    def _buffers_now(self) -> dict[Tensor, Tensor]:
        """Copies of the buffers; microbatches that see the same values share them."""
        for buffer in self.section.module.buffers():
            # By value: batch norm writes its statistics behind the back of autograd's version counter.
            if buffer not in self._copies or not torch.equal(self._copies[buffer], buffer):
                self._copies[buffer] = buffer.detach().clone()
        return dict(self._copies)


def _safe_to_overwrite(argument: Any) -> Any:
    """A copy, as operations in place may write into it. Where a gradient is owed, autograd forbids them anyway."""
    return argument.clone() if isinstance(argument, Tensor) and not argument.requires_grad else argument
