"""LayerDrop: models that skip whole layers at random, by ``if torch.rand([]) < self.layerdrop``.

A graph cannot contain such a choice. At rate 0, which is usual, there is nothing to choose: under ``WithoutLayerDrop``
the model computes as if the line were not there. The model still draws the number, sometimes without comparing it with
anything, but the graph does not. When the two are compared, every single random number is therefore ``SCALAR`` and
takes nothing from the generator, so that both draw the same numbers elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import CaptureError

SCALAR = 0.4142
"""Stands for every single random number while a graph is compared with its model."""
_BELOW, _ABOVE = ("lt", "__lt__", "le", "__le__"), ("gt", "__gt__", "ge", "__ge__")


class LayerDropError(CaptureError):
    """Raised for a model that skips layers at random. Trying a larger piece of the model would not help."""


@dataclass(frozen=True)
class _Choice:
    outcome: Tensor
    rate: float
    is_below: bool


class WithoutLayerDrop(TorchFunctionMode):
    """Makes ``torch.rand([]) < 0`` False, and refuses the comparison at rates that leave a choice.

    With ``draws`` off, a single random number is always ``SCALAR``.
    """

    def __init__(self, model: nn.Module, *, draws: bool = True) -> None:
        super().__init__()
        self.model, self.draws = model, draws
        self._numbers: list[Tensor] = []
        self._choices: list[_Choice] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is torch.rand:
            number = func(*args, **kwargs) if self.draws else without_scalar(lambda: func(*args, **kwargs))
            if isinstance(number, Tensor) and number.dim() == 0:
                self._numbers.append(number)
            return number
        if name == "__bool__":
            choice = next((each for each in self._choices if each.outcome is args[0]), None)
            return func(*args, **kwargs) if choice is None else self._decided(choice)
        result = func(*args, **kwargs)
        if name in _BELOW or name in _ABOVE:
            compared = any(each is args[0] for each in self._numbers)
            if compared and isinstance(args[1], (int, float)):
                self._choices.append(_Choice(result, float(args[1]), name in _BELOW))
        return result

    def _decided(self, choice: _Choice) -> bool:
        if 0 < choice.rate < 1:
            raise LayerDropError(
                f"{self._caller()} skips layers at random (`if torch.rand([]) < {choice.rate:g}`), which no graph of "
                "layers can do; build the model with that rate at 0 (layerdrop=0, or encoder_layerdrop=0 and "
                "decoder_layerdrop=0, in its configuration)"
            )
        return choice.is_below == (choice.rate >= 1)

    def _caller(self) -> str:
        """The innermost module that is running."""
        names = {id(module): name for name, module in self.model.named_modules()}
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            module = frame.f_locals.get("self")
            if id(module) in names:
                return f"{names[id(module)] or 'the model'} ({type(module).__name__})"
        return type(self.model).__name__


class WithoutScalarDraws(fx.Interpreter):
    """Runs a captured graph in which a single random number is always ``SCALAR``."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not torch.ops.aten.rand.default:
            return super().call_function(target, args, kwargs)
        return without_scalar(lambda: target(*args, **kwargs))


def without_scalar(draw: Callable[[], Any]) -> Any:
    """What ``draw`` returns; but if that is a single number, ``SCALAR``, with the generator restored."""
    before = torch.get_rng_state()
    drawn = draw()
    if not isinstance(drawn, Tensor) or drawn.dim() > 0:
        return drawn
    torch.set_rng_state(before)
    return torch.full_like(drawn, SCALAR)
