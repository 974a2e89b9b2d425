"""Compares outputs and gradients of a captured graph with those of the model. Leaves the model as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError

Run = Callable[[Any], Any]
"""Runs the model, or its graph, on a job's inputs."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores mode, buffers, gradients and the random states of torch, numpy and Python afterwards."""
    modes = {module: module.training for module in model.modules()}
    held = {module: dict(module._buffers) for module in model.modules()}  # a model may assign others, even fx's proxies
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for module, training in modes.items():
                module.training = training
            for module, own in held.items():
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, saved in buffers.items():
                    buffer.copy_(saved)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient


def check_same(model: nn.Module, run_model: Run, run_graph: Run, inputs: Any, others: Sequence[Any]) -> None:
    """The graph must compute what the model computes, for this batch, for a smaller one and for the others.

    Both start from the same state, even if the model changes its buffers or writes into its inputs. Gradients are
    compared for this batch if the model is in training mode. Without values only shapes are compared, or nothing if the
    model reads values that capturing does not need.
    """
    has_values = have_values(inputs)
    if has_values:
        with _without_zeros(model):
            try:
                expected = _outcome(model, run_model, inputs, differentiate=model.training)
            except Exception:  # the model may be for inference alone
                expected = _outcome(model, run_model, inputs, differentiate=False)
            _compare(expected, _outcome(model, run_graph, inputs, differentiate=expected.gradients is not None))
    smaller = pytree.tree_map(lambda x: x[:-1] if isinstance(x, Tensor) and x.dim() > 0 and len(x) > 1 else x, inputs)
    for given in (*([] if has_values else [inputs]), smaller, *others):
        try:
            expected = _outcome(model, run_model, given, differentiate=False)
        except Exception:
            continue  # the model itself does not accept that size
        _compare(expected, _outcome(model, run_graph, given, differentiate=False))


@dataclass(frozen=True)
class _Outcome:
    output: list[Tensor]
    gradients: dict[str, Tensor] | None
    """Gradients of a weighted sum of the output, by parameter; None if they are not needed or cannot be computed."""


def _outcome(model: nn.Module, run: Callable[[Any], Any], inputs: Any, *, differentiate: bool) -> _Outcome:
    with untouched(model), torch.set_grad_enabled(differentiate):
        random.seed(1)  # another seed than in capture: a number drawn then must not be a constant of the graph
        np.random.seed(1)
        output = tensors_in(run(copied(inputs)))
        gradients = _gradients(model, output) if differentiate else None
        return _Outcome([tensor.detach().clone() for tensor in output], gradients)  # it may be a buffer


def _gradients(model: nn.Module, output: list[Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for tensor in output:
        if tensor.requires_grad:
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.randn(numbers.shape, generator=generator).to(numbers)
            total = total.to(tensor.device) + (numbers * weights).sum()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained or not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None}


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Replaces parameters that are all zero by small random numbers, since zeros would hide what is done with them."""
    generator = torch.Generator().manual_seed(0)
    zeros = {p: p.detach().clone() for p in model.parameters() if p.is_floating_point() and not p.any()}
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        yield
    finally:
        with torch.no_grad():
            for parameter, saved in zeros.items():
                parameter.copy_(saved)


def copied(inputs: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


GRADIENT_TOLERANCE, ROUNDING = 1e-3, 1e-5
"""The tolerance of a gradient, relative to its largest element, or to ROUNDING times the largest element of all
gradients if that is more: a gradient that is zero except for rounding has no scale of its own."""


def _compare(expected: _Outcome, found: _Outcome) -> None:
    if len(expected.output) != len(found.output):
        raise CaptureError(f"the captured graph returns {len(found.output)} tensors, the model {len(expected.output)}")
    for left, right in zip(expected.output, found.output, strict=True):
        if left.is_meta:
            same = left.shape == right.shape and left.dtype == right.dtype
        else:
            same = torch.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)
        if not same:
            raise CaptureError("the captured graph computes something else than the model")
    if expected.gradients is None or found.gradients is None:
        return
    floor = ROUNDING * max((_size(gradient) for gradient in expected.gradients.values()), default=0.0)
    for name in {**expected.gradients, **found.gradients}:
        difference = _difference(expected.gradients.get(name), found.gradients.get(name))
        limit = GRADIENT_TOLERANCE * max(_size(expected.gradients.get(name)), floor)
        if difference > limit:
            raise CaptureError(
                f"the captured graph has another gradient of {name} than the model (off by {difference:.1e}, "
                f"allowed {limit:.1e})"
            )


def _size(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else float(gradient.nan_to_num().abs().max())


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of any element. A missing gradient counts as zero, and NaN equals only NaN."""
    if one is None or other is None:
        return max(_size(one), _size(other))
    if not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    return _size(one.nan_to_num() - other.nan_to_num())


def have_values(inputs: Any) -> bool:
    return not any(leaf.is_meta for leaf in tensors_in(inputs))


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
