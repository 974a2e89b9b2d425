"""LayerDrop: models that skip whole layers at random, by ``if torch.rand([]) < self.layerdrop``.

No graph can hold such a choice. At rate 0, which is the usual one, there is nothing to choose: under
``WithoutLayerDrop`` the model computes as if the line were not there, and draws no number for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import CaptureError

_BELOW, _ABOVE = ("lt", "__lt__", "le", "__le__"), ("gt", "__gt__", "ge", "__ge__")


class LayerDropError(CaptureError):
    """A model that skips layers at random is refused; a larger piece of it would skip them too."""


@dataclass(frozen=True)
class _Draw:
    number: Tensor
    before: Tensor
    """the generator's state"""
    after: Tensor


@dataclass(frozen=True)
class _Choice:
    outcome: Tensor
    draw: _Draw
    rate: float
    is_below: bool


class WithoutLayerDrop(TorchFunctionMode):
    """Answers ``if torch.rand([]) < 0`` without a draw, and refuses the same at a rate that leaves a choice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._draws: list[_Draw] = []
        self._choices: list[_Choice] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.rand:
            return self._drawn(lambda: func(*args, **kwargs))
        if name == "__bool__":
            choice = next((each for each in self._choices if each.outcome is args[0]), None)
            return func(*args, **kwargs) if choice is None else self._decided(choice)
        result = func(*args, **kwargs)
        if name in _BELOW or name in _ABOVE:
            draw = next((each for each in self._draws if each.number is args[0]), None)
            if draw is not None and isinstance(args[1], (int, float)):
                self._choices.append(_Choice(result, draw, float(args[1]), name in _BELOW))
        return result

    def _drawn(self, draw: Callable[[], Any]) -> Any:
        before = torch.get_rng_state()
        number = draw()
        if isinstance(number, Tensor) and number.dim() == 0:
            self._draws.append(_Draw(number, before, torch.get_rng_state()))
        return number

    def _decided(self, choice: _Choice) -> bool:
        if 0 < choice.rate < 1:
            raise LayerDropError(
                f"{self._caller()} skips layers at random (`if torch.rand([]) < {choice.rate:g}`), which no graph of "
                "layers can do; build the model with that rate at 0 (layerdrop=0, or encoder_layerdrop=0 and "
                "decoder_layerdrop=0, in its configuration)"
            )
        if torch.equal(torch.get_rng_state(), choice.draw.after):
            torch.set_rng_state(choice.draw.before)
        return choice.is_below == (choice.rate >= 1)

    def _caller(self) -> str:
        """The innermost module at work."""
        names = {id(module): name for name, module in self.model.named_modules()}
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            module = frame.f_locals.get("self")
            if id(module) in names:
                return f"{names[id(module)] or 'the model'} ({type(module).__name__})"
        return type(self.model).__name__
