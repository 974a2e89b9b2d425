"""Text that comes with Python: the language reference in ``pydoc_data``, read as characters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics

import torch
from torch import Tensor


@dataclass(frozen=True)
class PythonReference:
    """Windows of ``length`` characters and, for each, the same window one character later."""

    length: int
    samples: int

    @cached_property
    def _text(self) -> str:
        return "\n".join(topics[name] for name in sorted(topics))

    @cached_property
    def alphabet(self) -> list[str]:
        return sorted(set(self._text))

    @cached_property
    def _codes(self) -> Tensor:
        code = {character: i for i, character in enumerate(self.alphabet)}
        return torch.tensor([code[character] for character in self._text], dtype=torch.long)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        stride = (len(self._codes) - self.length - 1) / self.samples
        start = int(index * stride)
        window = self._codes[start : start + self.length + 1]
        return window[:-1], window[1:]
