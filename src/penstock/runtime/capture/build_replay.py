"""Building a model without memory, and giving any part of it the values that it was built to have.

A function that builds a model is run with all tensors on the meta device, where they have shapes and no values, and
every operation on them is written down. To get the initial value of a parameter or buffer, the operations that led to
it are done again on real memory, and no others:

    recorded   w = empty(9, 9)   b = empty(9)   uniform_(w)   uniform_(b)   mul_(w, 0.5)
    w is made  w = empty(9, 9)                  uniform_(w)                 mul_(w, 0.5)

Whatever a constructor does is done, and nothing need be said twice. An operation that draws random numbers has a seed
of its own, so a value is the same whoever asks for it, and with whatever others: it does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

T = TypeVar("T")
META, CPU = torch.device("meta"), torch.device("cpu")
_FACTORIES, _FROM_NUMBERS = _device_constructors(), {torch.tensor, torch.as_tensor, torch.asarray}


@dataclass(frozen=True)
class _Place:
    """Where a tensor without values was at one moment. ``x.data = y`` may move it later."""

    storage: torch.UntypedStorage
    """Kept alive, so that no other storage gets its address."""
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        offset = int(tensor.storage_offset())
        return cls(tensor.untyped_storage(), offset, tensor.size(), tensor.stride(), tensor.dtype)

    @property
    def memory(self) -> int:
        return int(self.storage._cdata)

    def inside(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    function: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    """Tensors without values are given as places; tensors made from Python's numbers as values."""
    keywords: dict[str, Any]
    made: tuple[_Place, ...]

    @property
    def reads(self) -> set[int]:
        return {place.memory for place in _places((self.arguments, self.keywords))}

    @property
    def writes(self) -> set[int]:
        found = {place.memory for place in self.made}
        for position, argument in enumerate(self.function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = self.arguments[position] if position < len(self.arguments) else self.keywords[argument.name]
                found |= {place.memory for place in _places(given)}
        return found


@dataclass(frozen=True)
class BuildReplay:
    """The operations that built the tensors of a model, and how to replay them for one tensor."""

    seed: int
    _operations: list[_Operation] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    """For each memory, the operations that made it or wrote to it."""

    def add(self, operation: _Operation) -> None:
        for memory in operation.writes:
            self._writers.setdefault(memory, []).append(len(self._operations))
        self._operations.append(operation)

    def value(self, wanted: Tensor) -> Tensor:
        """The initial value of a tensor that has none, on the CPU."""
        place = _Place.of(wanted)
        found: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=()):
            for number in sorted(self._behind(place.memory)):
                self._repeat(number, found)
            return place.inside(found[place.memory])

    def _behind(self, wanted: int) -> set[int]:
        """The operations that the contents of a memory depend on: all that write to it, or to what those read."""
        numbers: set[int] = set()
        stack, seen = [wanted], {wanted}
        while stack:
            writers = self._writers.get(stack.pop(), ())
            numbers.update(writers)
            read = {memory for number in writers for memory in self._operations[number].reads} - seen
            seen |= read
            stack.extend(read)
        return numbers

    def _repeat(self, number: int, found: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return leaf.inside(found[leaf.memory])
            return CPU if isinstance(leaf, torch.device) else leaf

        operation = self._operations[number]
        if torch.Tag.nondeterministic_seeded in operation.function.tags:
            torch.manual_seed(hash((self.seed, number)) % 2**63)  # hashes of integers are the same in every process
        arguments, keywords = pytree.tree_map(real, (operation.arguments, operation.keywords))
        made = operation.function(*arguments, **keywords)
        for place, result in zip(operation.made, _tensors(made), strict=True):
            found.setdefault(place.memory, result.untyped_storage())


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every operation that creates a tensor create one without memory, and records the operation."""

    def __init__(self, replay: BuildReplay) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replay = replay

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._record(func, args, dict(kwargs or {}))

    def _record(self, func: torch._ops.OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        given = _tensors((args, keywords))
        if given and not any(tensor.is_meta for tensor in given) and keywords.get("device") != META:
            return func(*args, **keywords)  # tensors from Python's numbers
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(self.replay.value(given[0]))
        if any(argument.name == "device" for argument in func._schema.arguments):
            keywords["device"] = META
        if "generator" in keywords:
            keywords["generator"] = None  # every operation has its own seed
        arguments, named = pytree.tree_map(_noted, (args, keywords))
        made = func(*pytree.tree_map(_without_value, args), **pytree.tree_map(_without_value, keywords))
        self.replay.add(_Operation(func, arguments, named, tuple(map(_Place.of, _tensors(made)))))
        return made


class _Ordinary(TorchFunctionMode):
    """Makes tensors without values look like ordinary ones. For instance, torch.nn.init does nothing to tensors on the
    meta device."""

    def __init__(self, replay: BuildReplay) -> None:
        super().__init__()
        self.replay = replay

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == Tensor.device.__get__:
            return CPU
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0].is_meta:
            return func(self.replay.value(args[0]), *args[1:], **kwargs or {})
        return func(*args, **kwargs or {})


def record_build(build: Callable[[], T], seed: int) -> tuple[T, BuildReplay]:
    """What ``build`` makes, without values, and a replay that makes the values. Tensors from Python's numbers are real
    until ``build`` moves them to the meta device."""
    replay = BuildReplay(seed)
    with _RecordingMode(replay), _Ordinary(replay):
        made = build()
    return made, replay


class WithoutValues(TorchFunctionMode):
    """Runs code written for another device on the meta device: tensors are made there unless the code names a device.

    Tensors from Python's numbers are made on the CPU first, since their values would be lost otherwise.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func not in _FACTORIES or keywords.get("device") not in (None, META, str(META)):
            return func(*args, **keywords)
        if func in _FROM_NUMBERS:
            return func(*args, **keywords | {"device": CPU}).to(META)
        return func(*args, **keywords | {"device": META})


def _noted(leaf: Any) -> Any:
    """An argument of an operation, as it is now."""
    if not isinstance(leaf, Tensor):
        return leaf
    return _Place.of(leaf) if leaf.is_meta else leaf.detach().clone()


def _without_value(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) else leaf


def _places(tree: Any) -> list[_Place]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, _Place)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
