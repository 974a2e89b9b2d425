"""Random numbers that depend only on the run, the microbatch and the layer: every plan draws the same.

Generators are seeded right before each operation that draws. So neither other draws in the same process nor the order
of microbatches matter. Generators belong to the process: a lock is held from seeding to the end of the operation, so
that workers that are threads of one process do not use each other's seeds.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

_GENERATORS = threading.RLock()
"""Held while a generator is seeded and drawn from."""


class _Current(threading.local):
    key: int | None = None


_current = _Current()


def mixed(*numbers: int) -> int:
    """A seed made of these numbers, the same in every process."""
    return hash(numbers) % 2**63  # hashes of integers are the same in every process, unlike those of strings


def name_number(name: str) -> int:
    return zlib.crc32(name.encode())


def seed_torch(seed: int) -> None:
    """Like torch.manual_seed, but only for the CPU and the current GPU, which takes 1 µs instead of 80."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and numpy. Takes about 5 µs."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Restores all generators afterwards. Nobody else may seed or draw meanwhile."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with _GENERATORS, torch.random.fork_rng(devices=gpus):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def drawing(key: int) -> Iterator[None]:
    """Makes the layers that this thread computes draw by this key, which belongs to a microbatch of a run.

    Without a key, they draw from the generators as they are, like any torch module.
    """
    before, _current.key = _current.key, key
    try:
        yield
    finally:
        _current.key = before


def seed_by(key: int) -> None:
    """For code of the job that draws outside any layer, such as an optimizer that adds noise."""
    with _GENERATORS:
        seed_torch(key)


class Keyed(nn.Module):
    """An operation or module of a section that draws. It is seeded by the current key and a number of its own."""

    def __init__(self, compute: Callable[..., Any], number: int, *, torch_alone: bool) -> None:
        """``torch_alone`` says that it draws only from torch's generators."""
        super().__init__()
        self.number = number
        self.seed_generators = seed_torch if torch_alone else seed_all
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it cannot trace a lock; compiled workers are separate processes
            self.seed()
            return self.compute(*args, **kwargs)
        with _GENERATORS:
            self.seed()
            return self.compute(*args, **kwargs)

    def seed(self) -> None:
        if _current.key is not None:
            self.seed_generators(mixed(_current.key, self.number))


def keyed_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function as a layer of this name: seeded by the current key, if it may draw."""
    return Keyed(function, name_number(name), torch_alone=False) if function_may_draw(function) else function


def keyed(node: fx.Node, targets: dict[str, Any], number: int) -> None:
    """Make a node of a section's graph seed before it draws. ``targets`` has what the graph's names stand for."""
    name = f"draw_{node.name}"
    if node.op == "call_module":
        compute = targets[str(node.target)]
    elif node.op == "call_method":
        compute = _method(str(node.target))
    else:
        compute = node.target
    torch_alone = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _TORCH_NAMESPACES
    targets[name] = Keyed(compute, number, torch_alone=torch_alone)
    node.op, node.target = "call_module", name


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


_TORCH_NAMESPACES = ("aten", "prims")
# fmt: off
_DRAWING = frozenset({
    "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "exponential", "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d", "fractional_max_pool3d_with_indices",
    "geometric", "gru", "gumbel_softmax", "log_normal", "lstm", "multi_head_attention_forward", "multinomial",
    "native_dropout", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random", "randperm", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_with_noise",
    "scaled_dot_product_attention", "uniform",
})
"""Functions and methods of torch that may draw, without the underscore of in-place ones."""
# fmt: on
_DETERMINISTIC_ORIGINS = ("torch", "_operator", "builtins", "math", "penstock.runtime")
"""Packages whose functions draw nothing, except those in ``_DRAWING``. Capture adds its own functions to graphs."""


def may_draw(node: fx.Node, root: nn.Module) -> bool:
    """Whether an operation of a captured graph may draw random numbers; True if unknown."""
    if node.op == "call_method":
        return str(node.target).rstrip("_") in _DRAWING
    if node.op == "call_module":
        return module_may_draw(root.get_submodule(str(node.target)))
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return _operator_may_draw(node, node.target)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return any(may_draw(inner, region) for region in _regions(node, root) for inner in region.graph.nodes)
    assert callable(node.target)
    return function_may_draw(node.target)


def _operator_may_draw(node: fx.Node, operator: torch._ops.OpOverload[..., Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return operator.namespace not in _TORCH_NAMESPACES
    given = dict(zip((argument.name for argument in operator._schema.arguments), node.args, strict=False))
    given = {a.name: a.default_value for a in operator._schema.arguments} | given | dict(node.kwargs)
    off = any(given.get(name, True) is False for name in ("train", "training"))
    return not off and not any(given.get(name, 1.0) == 0.0 for name in ("p", "dropout_p", "dropout"))


def _regions(node: fx.Node, root: nn.Module) -> Iterable[fx.GraphModule]:
    """The graphs that an operation gets as arguments, such as a region without gradients."""
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            path, _, name = str(source.target).rpartition(".")
            value = getattr(root.get_submodule(path), name)
            if isinstance(value, fx.GraphModule):
                yield value


def function_may_draw(function: Callable[..., Any]) -> bool:
    if isinstance(function, nn.Module):
        return module_may_draw(function)
    origin = getattr(function, "__module__", None) or "torch"  # torch's own functions in C++ have none
    name = getattr(function, "__name__", "")
    known = any(f"{origin}.".startswith(f"{package}.") for package in _DETERMINISTIC_ORIGINS)
    if origin == "torch.nn.init" or not known:
        return True
    return not name or name.rstrip("_") in _DRAWING


def module_may_draw(module: nn.Module) -> bool:
    return any(_draws_itself(each) for each in module.modules())


def _draws_itself(module: nn.Module) -> bool:
    """Whether a module draws by itself, apart from the modules inside it."""
    if isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return not type(module).__module__.startswith("torch.nn.modules.")
