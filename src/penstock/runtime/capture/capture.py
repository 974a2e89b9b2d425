"""Turns an unmodified model into one graph of operations, grouped into layers.

Three front ends, tried in this order, each held to the same test (same outputs as the model, also for
batches of other sizes):

    export   torch.export, non-strict: operations with the module they come from
    fx       torch.fx symbolic tracing, with ever larger modules left whole
    module   the children of an nn.Sequential, or the whole model as a single layer

All three give an fx graph over the model's own parameters, so everything behind this file knows one form.
"""

from __future__ import annotations

import inspect
import io
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from penstock.errors import CaptureError, JobError
from penstock.runtime.capture.aliases import mutated_arguments, observe, observe_without_values
from penstock.runtime.capture.build_replay import CPU, META, WithoutValues
from penstock.runtime.capture.fidelity import check_same, copied, have_values, tensors_in, untouched
from penstock.runtime.capture.grouping import CapturedLayer, group_into_layers
from penstock.runtime.capture.layer_drop import LayerDropError, WithoutLayerDrop, WithoutScalarDraws
from penstock.runtime.capture.reasons import why

log = logging.getLogger(__name__)

FRONT_ENDS = ("export", "fx", "module")


@dataclass(frozen=True, kw_only=True)
class Captured:
    front_end: str
    graph: fx.Graph
    root: nn.Module
    """Has what the graph refers to: parameters, buffers, modules."""
    layers: tuple[CapturedLayer, ...]
    canonical_names: dict[int, str]
    """The first name that the model gives to a parameter or buffer, by its ``id``."""
    bind: Callable[[Any], list[Any]]
    """Puts the job's inputs into the order of the graph's placeholders."""
    rebuild_output: Callable[[Any], Any]
    """Turns what the graph's output node returns into what the model returns."""
    reason: str = ""
    """Why torch.export could not capture the model, if another front end did."""

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a job's inputs are passed to the model: a dict by name, a tuple or list by position, anything else alone."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def capture(
    model: nn.Module,
    inputs: Any,
    others: Sequence[Any] = (),
    *,
    mode: Literal["train", "eval"] = "train",
    only: str | None = None,
) -> Captured:
    """Capture ``model`` in a mode. Its weights, buffers, mode and random state stay as they were.

    ``others`` are the inputs of further batches. Dimensions whose sizes differ between batches become variable, besides
    the number of samples. ``only`` names the one front end to try. A model on the meta device is captured there, for
    the device of the inputs.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return _capture(model, inputs, others, mode, only)
    device = next((leaf.device for leaf in tensors_in(inputs)), CPU)
    with WithoutValues():
        shapes = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(META), (inputs, others))
        captured = _capture(model, shapes[0], shapes[1], mode, only)
    _move_from_meta(captured, device)
    return captured


def _move_from_meta(captured: Captured, device: torch.device) -> None:
    """Replace the meta device in a graph, which remembers the device of tensors that it makes, also in nested
    graphs."""
    elsewhere: dict[Any, Any] = {META: device, META.type: device.type}
    inner = [module for module in captured.root.modules() if isinstance(module, fx.GraphModule)]
    for graph in (captured.graph, *(module.graph for module in inner)):
        for node in graph.nodes:
            given = (node.args, node.kwargs)
            node.args, node.kwargs = fx.node.map_aggregate(
                given, lambda item: elsewhere.get(item, item) if isinstance(item, (torch.device, str)) else item
            )
    for module in inner:
        module.recompile()


def _capture(model: nn.Module, inputs: Any, others: Sequence[Any], mode: str, only: str | None) -> Captured:
    with untouched(model):
        model.train(mode == "train")
        reasons: dict[str, str] = {}
        for name, front_end in zip(FRONT_ENDS, (_export, _fx, _module), strict=True):
            if only not in (None, name):
                continue
            for attempt in front_end(model, inputs, others):
                try:
                    with _quietly(), untouched(model):
                        captured = attempt()
                    _check(model, captured, inputs, others)
                except LayerDropError:
                    raise
                except Exception as error:  # the next front end may succeed
                    log.debug("front end %s: %s", name, error, exc_info=True)
                    reasons.setdefault(name, why(error))  # later reasons are about larger pieces
                    continue
                if name != "export" and "export" in reasons:
                    captured = replace(captured, reason=reasons["export"])
                    log.info(
                        "%s is captured by %s, as torch.export cannot: %s", type(model).__name__, name, captured.reason
                    )
                return captured
        _check_runs(model, inputs)
    raise CaptureError(
        f"{type(model).__name__} cannot be captured; " + "; ".join(f"{k}: {v}" for k, v in reasons.items())
    )


def _check_runs(model: nn.Module, inputs: Any) -> None:
    """Raise an error if the model itself does not run, since no front end can capture it then."""
    under_way: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: under_way.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: under_way.pop() and None))
    args, kwargs = call_arguments(inputs)
    try:
        with torch.no_grad(), untouched(model):
            model(*args, **kwargs)
    except Exception as error:
        modules, inner = dict(model.named_modules()), under_way[-1] if under_way else ""
        where = f" in layer {inner!r} ({type(modules[inner]).__name__})" if inner else ""
        raise CaptureError(
            f"the forward of {type(model).__name__} fails{where} on {_shapes(inputs)}: {why(error)}; "
            "correct the model, or the inputs in Job.data"
        ) from None
    finally:
        for hook in hooks:
            hook.remove()


def _shapes(inputs: Any) -> str:
    shapes = [f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in tensors_in(inputs)]
    return f"inputs of {', '.join(shapes)}" if shapes else "its inputs"


@contextmanager
def _quietly() -> Iterator[None]:
    """Sends the output of front ends to the debug log. They print much when they fail."""
    level, printed = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(printed), redirect_stderr(printed):
            yield
    finally:
        logging.disable(level)
        if printed.getvalue().strip():
            log.debug("printed meanwhile:\n%s", printed.getvalue())


def _export(model: nn.Module, inputs: Any, others: Sequence[Any]) -> Iterator[Callable[[], Captured]]:
    def attempt() -> Captured:
        args, kwargs = call_arguments(inputs)
        names = list(kwargs)
        dynamic = pytree.tree_map(_varying, (args, kwargs), *(call_arguments(other) for other in others))
        shapes = _by_parameter(model, *dynamic)
        with _plain_output(model), WithoutLayerDrop(model), _no_frozen_draws():
            exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        module = exported.module(check_guards=False)
        out_spec = exported.call_spec.out_spec

        def bind(given: Any) -> list[Any]:
            given_args, given_kwargs = call_arguments(given)
            leaves = pytree.tree_leaves((given_args, {name: given_kwargs[name] for name in names}))
            _check_sizes(leaves, placeholders)
            return leaves

        def rebuild(flat: Any) -> Any:
            return pytree.tree_unflatten(list(flat), out_spec)

        assert isinstance(module, fx.GraphModule)
        _drop_assertions(module.graph)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        return _captured("export", model, module, module.graph, bind, rebuild, inputs)

    yield attempt


@contextmanager
def _plain_output(model: nn.Module) -> Iterator[None]:
    """Replaces outputs that a graph cannot return by None, such as a cache of keys and values for inference."""
    plain = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, str)

    def keep_plain(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, plain) else None, output)

    hook = model.register_forward_hook(keep_plain)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _no_frozen_draws() -> Iterator[None]:
    """Refuses random numbers of numpy and Python, which tracing would turn into constants. Torch's are traced."""
    before = random.getstate(), np.random.get_state(legacy=False)
    yield
    after = random.getstate(), np.random.get_state(legacy=False)
    for name, one, other in zip(("Python's random", "numpy.random"), before, after, strict=True):
        if str(one) != str(other):
            raise CaptureError(f"forward draws from {name}, which would be the same numbers in every step")


def _varying(leaf: Any, *others: Any) -> Any:
    """Make the first dimension variable, as the last microbatch may be smaller, and all dimensions that differ between
    batches."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    shapes = [other.shape for other in others if isinstance(other, Tensor) and other.dim() == leaf.dim()]
    differ = [d for d in range(1, leaf.dim()) if any(shape[d] != leaf.shape[d] for shape in shapes)]
    return dict.fromkeys([0, *differ], torch.export.Dim.AUTO)


def _check_sizes(leaves: Sequence[Any], placeholders: Sequence[fx.Node]) -> None:
    """A size that export took as fixed is a constant of the graph, which would be wrong for other sizes."""
    for leaf, node in zip(leaves, placeholders, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        sizes = list(getattr(node.meta.get("val"), "shape", leaf.shape))
        for dimension in range(1, leaf.dim()):
            fixed = _number(sizes[dimension])
            if fixed is not None and fixed != leaf.shape[dimension]:
                raise JobError(
                    f"model input {node.name} has shape {list(leaf.shape)}, but dimension {dimension} was "
                    f"{fixed} in all batches that the model was captured with; pad it to that, "
                    "or let the first or last samples of the data differ in it"
                )


def _number(size: int | torch.SymInt) -> int | None:
    """The size if export took it as fixed. Export may decide that late, and leave a symbol that stands for a number."""
    if isinstance(size, int):
        return size
    found: int | None = size.node.maybe_as_int()
    return found


def _by_parameter(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """dynamic_shapes needs one entry per parameter of forward, by name; ``*args`` is one parameter."""
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _drop_assertions(graph: fx.Graph) -> None:
    """Export's own checks of sizes would make a stage depend on values that it does not need."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            graph.erase_node(node)
    graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output") or bool(mutated_arguments(node))
    )


def _fx(model: nn.Module, inputs: Any, others: Sequence[Any]) -> Iterator[Callable[[], Captured]]:
    depths = [name.count(".") + 1 for name, _ in model.named_modules() if name]
    yield lambda: _traced(model, fx.Tracer(), inputs)
    for depth in range(max(depths, default=1), 0, -1):
        yield lambda depth=depth: _traced(model, _LeafTracer(depth), inputs)  # type: ignore[misc]


class _LeafTracer(fx.Tracer):
    """Does not trace into modules that are nested ``depth`` deep or deeper."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.count(".") + 1 >= self.depth or super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module, tracer: fx.Tracer, inputs: Any) -> Captured:
    signature = inspect.signature(model.forward)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        raise CaptureError("forward takes *args or **kwargs")
    graph = tracer.trace(model)

    def bind(given: Any) -> list[Any]:
        args, kwargs = call_arguments(given)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in signature.parameters]

    return _captured("fx", model, model, graph, bind, lambda output: output, inputs)


def _module(model: nn.Module, inputs: Any, others: Sequence[Any]) -> Iterator[Callable[[], Captured]]:
    if isinstance(model, nn.Sequential):
        yield lambda: _chain(model, model, [name for name, _ in model.named_children()], inputs)
    whole = nn.Module()
    whole.add_module("model", model)
    yield lambda: _chain(model, whole, ["model"], inputs)


def _chain(model: nn.Module, root: nn.Module, names: list[str], inputs: Any) -> Captured:
    """A graph that calls one module after another. The first gets all of the job's inputs."""
    args, kwargs = call_arguments(inputs)
    keys = list(kwargs)
    graph = fx.Graph()
    positional = tuple(graph.placeholder(f"input_{i}") for i in range(len(args)))
    by_name: dict[str, Any] = {key: graph.placeholder(key) for key in keys}
    node = graph.call_module(names[0], positional, by_name)
    for name in names[1:]:
        node = graph.call_module(name, (node,))
    graph.output(node)

    def bind(given: Any) -> list[Any]:
        given_args, given_kwargs = call_arguments(given)
        return [*given_args, *(given_kwargs[key] for key in keys)]

    return _captured("module", model, root, graph, bind, lambda output: output, inputs)


def _captured(
    front_end: str,
    model: nn.Module,
    root: nn.Module,
    graph: fx.Graph,
    bind: Callable[[Any], list[Any]],
    rebuild_output: Callable[[Any], Any],
    inputs: Any,
) -> Captured:
    try:
        observe(graph, root, bind(copied(inputs)))
    except Exception:
        if have_values(inputs):
            raise
        observe_without_values(graph, root)
    canonical = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return Captured(
        front_end=front_end,
        graph=graph,
        root=root,
        layers=group_into_layers(graph, root),
        canonical_names=canonical,
        bind=bind,
        rebuild_output=rebuild_output,
    )


def _check(model: nn.Module, captured: Captured, inputs: Any, others: Sequence[Any]) -> None:
    is_export = captured.front_end == "export"
    interpreter = WithoutScalarDraws if is_export else fx.Interpreter
    graph = interpreter(fx.GraphModule(captured.root, captured.graph), graph=captured.graph)

    def run_model(given: Any) -> Any:
        args, kwargs = call_arguments(given)
        with WithoutLayerDrop(model, draws=False) if is_export else nullcontext():
            return model(*args, **kwargs)

    def run_graph(given: Any) -> Any:
        return captured.rebuild_output(graph.run(*captured.bind(given), enable_io_processing=False))

    check_same(model, run_model, run_graph, inputs, others)
