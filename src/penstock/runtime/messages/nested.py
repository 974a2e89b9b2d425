"""The codec of containers: tuples, lists, dicts, named tuples, and classes that are registered with torch's pytree.

The tensors inside travel. All else is the structure: nested lists of the form [what, about, parts], written as JSON.

    (x, None)    ["tuple", null, [["dense", null, []], ["plain", null, []]]]
    {"a": x}     ["dict", ["a"], [["dense", null, []]]]

A structure is data. The receiver looks the classes in it up among those that its own job has defined or registered; it
never imports one by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import WorkerError
from penstock.runtime.messages.dense import Codec, Reader

PLAIN = (int, float, bool, str, type(None))
"""Types of what is in a structure itself."""

Make = Callable[[Iterable[Any]], Any]


class _Opened(NamedTuple):
    """A container, or something plain, as a structure has it."""

    what: str
    about: Any
    parts: Sequence[Any] = ()


class Nested:
    """A container of tensors and plain things, or something plain by itself."""

    kind = "nested"

    def __init__(self, tensors: Sequence[Codec]) -> None:
        """``tensors`` are the codecs of the tensors inside."""
        self._tensors = tensors

    def takes(self, value: Any) -> bool:
        return _opened(value) is not None

    def obstacle(self, value: Any) -> str:
        for part in opened.parts if (opened := _opened(value)) else ():
            codec = next((each for each in (*self._tensors, self) if each.takes(part)), None)
            if within := type_name(part) if codec is None else codec.obstacle(part):
                return f"{type(value).__name__} that holds a {within}"
        return _unknown(value)

    def encode(self, value: Any) -> tuple[Any, list[Tensor]]:
        tensors: list[Tensor] = []
        return self._structure(value, tensors), tensors

    def _structure(self, value: Any, tensors: list[Tensor]) -> list[Any]:
        for codec in self._tensors:
            if codec.takes(value):
                about, own = codec.encode(value)
                tensors.extend(own)
                return [codec.kind, about, []]
        opened = _opened(value)
        if opened is None:
            raise WorkerError(f"a {type_name(value)} cannot be sent; keep the layers on both sides of it in one stage")
        return [opened.what, opened.about, [self._structure(part, tensors) for part in opened.parts]]

    def reader(self, structure: Any) -> Reader:
        if not isinstance(structure, list) or len(structure) != 3 or not isinstance(structure[2], list):
            raise WorkerError(f"a message has the structure {str(structure)[:80]!r}; [what, about, parts] is expected")
        what, about, parts = structure
        for codec in self._tensors:
            if codec.kind == what:
                return codec.reader(about)
        make, readers = _maker(what, about, len(parts)), [self.reader(part) for part in parts]

        def read(tensors: Iterator[Tensor]) -> Any:
            return make([each.read(tensors) for each in readers])

        return Reader(sum(each.num_tensors for each in readers), read)


def _opened(value: Any) -> _Opened | None:
    kind = type(value)
    if kind in PLAIN:
        return _Opened("plain", value)
    if kind is tuple or kind is list:
        return _Opened(kind.__name__, None, value)
    if kind is dict:
        return _Opened("dict", list(value), list(value.values()))
    if pytree.is_namedtuple_instance(value):
        return _Opened("named tuple", _name(kind), value)
    if kind in pytree.SUPPORTED_NODES and kind is not torch.Size:  # which torch makes a tuple again
        parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return _Opened("registered", [_name(kind), context], parts)
    return None


def _unknown(value: Any) -> str:
    """A container that the receiver could not make again, in words; empty where it can."""
    kind, opened = type(value), _opened(value)
    if opened is None:
        return kind.__name__
    if opened.what == "dict":
        other = next((type(key).__name__ for key in opened.about if type(key) not in PLAIN), "")
        return other and f"dict with a {other} as key"
    if opened.what == "named tuple" and _named_tuple(opened.about) is not kind:
        return f"{kind.__name__}, which its module does not name"
    if opened.what == "registered":
        name, context = opened.about
        if _registered(name) is not kind or not _is_data(context):
            return kind.__name__
    return ""


def type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.layout).partition('.')[2]} tensor"
    return type(value).__name__


def _is_data(context: Any) -> bool:
    """Whether JSON gives it back as it is."""
    try:
        return bool(json.loads(json.dumps(context)) == context)
    except (TypeError, ValueError):
        return False


def _maker(what: Any, about: Any, count: int) -> Make:
    """Makes a container of ``count`` parts. A WorkerError if ``_opened`` never gives such, or the class is unknown."""
    if what == "plain" and type(about) in PLAIN and not count:
        return lambda _: about
    if what == "tuple":
        return tuple
    if what == "list":
        return list
    if what == "dict" and _is_plain_list(about) and len(about) == count:
        return lambda parts: dict(zip(about, parts, strict=True))
    if what == "named tuple" and isinstance(about, str):
        named = _named_tuple(about)
        if named is not None and len(named._fields) == count:
            make: Make = named._make
            return make
    if what == "registered" and isinstance(about, list) and len(about) == 2:
        name, context = about
        registered = _registered(name)
        if registered is not None:
            return lambda parts: pytree.SUPPORTED_NODES[registered].unflatten_fn(parts, context)
    raise WorkerError(
        f"a message holds a {what!r} of {count} parts described by {str(about)[:80]!r}, which this worker cannot make; "
        "define or register such classes where the job file is imported, and run the same job on all workers"
    )


def _is_plain_list(keys: Any) -> bool:
    return isinstance(keys, list) and all(type(key) in PLAIN for key in keys)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _named_tuple(name: str) -> Any:
    """The named tuple class of this name, if a module that is imported here has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr may import
    return found if isinstance(found, type) and pytree.is_namedtuple_class(found) else None


def _registered(name: Any) -> Any:
    """The class of this name that torch's pytree knows; the newest, where a file was loaded twice."""
    kinds = (kind for kind in reversed(pytree.SUPPORTED_NODES) if isinstance(kind, type))
    return next((kind for kind in kinds if _name(kind) == name), None)
