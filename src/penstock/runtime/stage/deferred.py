"""Weight gradients made later: what a zero-bubble schedule needs to take a backward in two halves.

While a stage computes, its products with weights (linear layers, convolutions, embeddings) are replaced by functions
with the same result. Their backward makes the gradient of the input alone, and notes what the weight's takes. Only the
stage's own trained parameters are put off. Any other operation or operand keeps its own backward: an activation that
another stage sent is a leaf too, but its gradient must be sent back after the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class PutOff:
    """The weight gradients of one microbatch that its backward has left to be made."""

    def __init__(self, trained: Collection[int]) -> None:
        """``trained`` holds the ids of the leaves that may be put off; they must stay alive as long as this does."""
        self._trained = trained
        self._left: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def takes(self, *operands: Any) -> bool:
        """Whether the gradients of all these operands can be made later."""
        return all(operand is None or id(operand) in self._trained for operand in operands)

    def add(self, leaf: Tensor, make: Callable[[], Tensor]) -> None:
        self._left.append((leaf, make))

    def __bool__(self) -> bool:
        return bool(self._left)

    @torch.no_grad()
    def make(self) -> None:
        """As a backward does: added to each leaf's ``grad``, which has no graph behind it."""
        left, self._left = self._left, []
        for leaf, make in left:
            gradient = make().to(leaf.dtype)
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


class Deferring(TorchFunctionMode):
    """Puts weight gradients of what is computed under it into ``later``."""

    def __init__(self, later: PutOff) -> None:
        super().__init__()
        self.later = later

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replace = _REPLACEMENTS.get(function)
        if replace is not None and not kwargs:
            made = replace(self.later, *args)
            if made is not NotImplemented:
                return made
        return function(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, later: PutOff, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.later, ctx.bias = later, bias
        ctx.save_for_backward(inputs, weight)
        return _own(torch.nn.functional.linear(inputs, weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.later.add(weight, lambda: flat.t() @ inputs.reshape(-1, inputs.shape[-1]).to(flat.dtype))
        if ctx.bias is not None:
            ctx.later.add(ctx.bias, lambda: flat.sum(0))
        needed = ctx.needs_input_grad[1]
        return None, (gradient @ weight.to(gradient.dtype)).to(inputs.dtype) if needed else None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, later: PutOff, function: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        ctx.later, ctx.bias = later, bias
        ctx.save_for_backward(inputs, weight)
        stride, padding, dilation, groups = rest + (1, 0, 1, 1)[len(rest) :]
        spread = [_as_list(value, weight.dim() - 2) for value in (stride, padding, dilation)]
        ctx.how = (*spread, False, [0] * (weight.dim() - 2), groups)
        return _own(function(inputs, weight, bias, *rest))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        bias_sizes = None if ctx.bias is None else list(ctx.bias.shape)

        def part(*mask: bool) -> Any:
            operands = (inputs.to(gradient.dtype), weight.to(gradient.dtype))
            return aten.convolution_backward(gradient, *operands, bias_sizes, *ctx.how, mask)

        ctx.later.add(weight, lambda: part(False, True, False)[1])
        if ctx.bias is not None:
            ctx.later.add(ctx.bias, lambda: gradient.sum([0, *range(2, gradient.dim())]))
        needed = ctx.needs_input_grad[2]
        found = part(True, False, False)[0].to(inputs.dtype) if needed else None
        return (None, None, found, None, None) + (None,) * (len(ctx.needs_input_grad) - 5)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, later: PutOff, weight: Tensor, indices: Tensor, padding: int, by_frequency: bool) -> Tensor:
        ctx.later, ctx.how = later, (padding, by_frequency)
        ctx.save_for_backward(weight, indices)
        return _own(torch.embedding(weight, indices, padding, by_frequency))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        weight, indices = ctx.saved_tensors
        rows = weight.shape[0]
        ctx.later.add(weight, lambda: aten.embedding_dense_backward(gradient, indices, rows, *ctx.how))
        return (None,) * 5


class _Addmm(torch.autograd.Function):
    """A linear layer whose weight lies the other way, as GPT-2 has them."""

    @staticmethod
    def forward(ctx: Any, later: PutOff, bias: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.later, ctx.bias = later, bias
        ctx.save_for_backward(inputs, weight)
        return _own(torch.addmm(bias, inputs, weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        ctx.later.add(weight, lambda: inputs.t().to(gradient.dtype) @ gradient)
        ctx.later.add(ctx.bias, lambda: gradient.sum(0))
        needed = ctx.needs_input_grad[2]
        return None, None, (gradient @ weight.t().to(gradient.dtype)).to(inputs.dtype) if needed else None, None


def _own(result: Tensor) -> Tensor:
    """The same memory, but no view to autograd, which forbids in-place operations on views that a function returns.

    A linear layer reshapes its product for inputs with three or more dimensions. No one else sees what it reshaped.
    """
    return aten._unsafe_view.default(result, result.shape) if result._is_view() else result


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def _as_list(value: Any, length: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * length if len(numbers) == 1 else numbers


def _linear(later: PutOff, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _apply(_Linear, later, inputs, weight, bias) if later.takes(weight, bias) else NotImplemented


def _addmm(later: PutOff, bias: Tensor, inputs: Tensor, weight: Tensor) -> Any:
    plain = later.takes(weight, bias) and bias.dim() == 1
    return _apply(_Addmm, later, bias, inputs, weight) if plain else NotImplemented


def _convolution(function: Any) -> Callable[..., Any]:
    def replaced(later: PutOff, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Any:
        plain = later.takes(weight, bias) and inputs.dim() == weight.dim() and not any(isinstance(r, str) for r in rest)
        return _apply(_Convolution, later, function, inputs, weight, bias, *rest) if plain else NotImplemented

    return replaced


def _embedding(
    later: PutOff, weight: Tensor, indices: Tensor, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    if sparse or not later.takes(weight):
        return NotImplemented
    return _apply(_Embedding, later, weight, indices, padding, by_frequency)


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    aten.linear.default: _linear,
    torch.addmm: _addmm,
    aten.addmm.default: _addmm,
    torch.embedding: _embedding,
    aten.embedding.default: _embedding,
    torch.conv1d: _convolution(torch.conv1d),
    torch.conv2d: _convolution(torch.conv2d),
    torch.conv3d: _convolution(torch.conv3d),
    aten.conv1d.default: _convolution(aten.conv1d.default),
    aten.conv2d.default: _convolution(aten.conv2d.default),
    aten.conv3d.default: _convolution(aten.conv3d.default),
}
"""Products with weights, called by position as captured graphs and torch's own modules do."""
