"""Frozen dataclasses to JSON and back, driven by their type hints.

A file is one JSON object with a ``format`` tag such as ``penstock.plan/1``. Reading checks every field
and names the file and the field in the error; it builds values and never runs code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import reprlib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from penstock.errors import FormatError, PenstockError
from penstock.limits import MOST_WHOLE, is_usable


class Stored(Protocol):
    """A dataclass that can be a whole file."""

    FORMAT: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T")
S = TypeVar("S", bound=Stored)

_SHOWN = 40
"""Characters of a file that an error quotes."""


def encode(value: Any) -> Any:
    """The plain JSON form of a value: dataclasses become objects, tuples become lists, paths and values with ``parse``
    become text."""
    if hasattr(type(value), "parse") or isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = {"format": value.FORMAT} if hasattr(value, "FORMAT") else {}
        return tag | {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(item) for item in value]
    return value


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Build ``cls`` from plain data; ``where`` names the field in errors."""
    result: T = _decode(cls, data, where)
    return result


def dumps(value: Stored) -> str:
    return json.dumps(encode(value), allow_nan=False, separators=(",", ":"))


def loads(cls: type[S], text: str, source: str) -> S:
    """Read a value from JSON text; ``source`` (a file name) starts every error."""
    return decode_from(source, cls, parse_json(text, source))


def decode_from(source: str, cls: type[T], data: Any) -> T:
    """Build ``cls`` from the content of a file. ``source`` (its name) starts every error."""
    try:
        return decode(cls, data)
    except PenstockError as error:
        raise type(error)(f"{source}: {error}") from None


def parse_json(text: str, source: str) -> Any:
    """The plain data of a JSON text. Every failure is an error of one line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{source}: not complete JSON (line {error.lineno}, column {error.colno}: {error.msg}); "
            "the file is truncated or was edited by hand: write it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source}: not JSON that can be read ({error}); write it again") from None


def parse_toml(text: str, source: str, example: str) -> dict[str, Any]:
    """The plain data of a TOML text. ``example`` says where to find an example."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{source}: not TOML ({error}); {example}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source}: not TOML that can be read ({error}); {example}") from None


def save(value: Stored, path: Path) -> None:
    write_text(dumps(value) + "\n", path)


def write_text(text: str, path: Path) -> None:
    write_bytes(text.encode(), path)


def write_bytes(data: bytes, path: Path) -> None:
    """Write a file so that a reader never sees an incomplete one."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise FormatError(f"{path}: cannot be written: {error.strerror}") from None


def load(cls: type[S], path: Path) -> S:
    return loads(cls, read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file that a user named. Every failure is an error of one line."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise FormatError(f"{path}: a directory where a file is expected") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: not a text file; expected UTF-8 JSON or TOML") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hasattr(hint, "parse"):
        return _decode_text(hint, data, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, where)
    if hint is Path:
        return _decode_path(data, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(hint, data, where)
    if origin in (tuple, Sequence):
        return _decode_tuple(hint, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise _wrong("an object", data, where)
        item = typing.get_args(hint)[1]
        return {_text(key, where): _decode(item, value, _at(where, key)) for key, value in data.items()}
    return _decode_scalar(hint, data, where)


def _decode_dataclass(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(f"an object ({cls.__name__})", data, where)
    data = dict(data)
    if hasattr(cls, "FORMAT"):
        _check_format(cls.FORMAT, data.pop("format", None), where)
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise FormatError(f"{_at(where, key)}: unknown field; {cls.__name__} has {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], _at(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise FormatError(f"{_at(where, name)}: missing; the file is incomplete: write it again")
    try:
        return cls(**values)
    except PenstockError as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def _check_format(expected: str, found: Any, where: str) -> None:
    if found == expected:
        return
    field = _at(where, "format")
    family, _, version = expected.partition("/")
    if isinstance(found, str) and found.partition("/")[0] == family:
        raise FormatError(
            f"{field}: version {found.partition('/')[2]!r} is unknown; this Penstock reads version "
            f"{version}: write the file again with it, or upgrade Penstock"
        )
    shown = reprlib.repr(found)
    raise FormatError(f"{field}: expected {expected!r}, found {shown}; this is another kind of file")


def _decode_text(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, str):
        raise _wrong("text", data, where)
    try:
        return cls.parse(data)
    except PenstockError as error:
        raise type(error)(f"{where}: {error}") from None


def _decode_path(data: Any, where: str) -> Path:
    """Not checked as Unicode: a file system may have names that are not."""
    if not isinstance(data, str):
        raise _wrong("a path", data, where)
    return Path(data)


def _decode_optional(hint: Any, data: Any, where: str) -> Any:
    choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    if data is None and len(choices) < len(typing.get_args(hint)):
        return None
    return _decode(choices[0], data, where)


def _decode_tuple(hint: Any, data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _wrong("a list", data, where)
    items = typing.get_args(hint)
    if items[-1] is Ellipsis or typing.get_origin(hint) is Sequence:
        return tuple(_decode(items[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(data) != len(items):
        raise _wrong(f"a list of {len(items)}", data, where)
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, data, strict=True)))


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is float:
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            raise _wrong("a number", data, where)
        try:
            number = float(data)
        except OverflowError:
            raise _too_large(data, where) from None
        if not is_usable(number):
            raise FormatError(f"{where}: {number} is not a finite number below 1e100; measure it again")
        return number
    if (hint is int and isinstance(data, bool)) or not isinstance(data, hint):
        raise _wrong({int: "a whole number", str: "text", bool: "true or false"}[hint], data, where)
    if hint is int and abs(data) >= MOST_WHOLE:
        raise _too_large(data, where)
    return _text(data, where) if hint is str else data


def _text(data: str, where: str) -> str:
    """JSON may contain half of a surrogate pair, which no file and no terminal accepts."""
    try:
        data.encode()
    except UnicodeEncodeError:
        raise _wrong("text in Unicode", data, where) from None
    return data


def _at(where: str, key: str) -> str:
    key = key if len(key) <= _SHOWN and key.isprintable() else reprlib.repr(key)
    return f"{where}.{key}" if where else key


def _too_large(number: float, where: str) -> FormatError:
    return FormatError(f"{where}: a number of {len(str(abs(number)))} digits, which is damaged: measure it again")


def _wrong(expected: str, data: Any, where: str) -> FormatError:
    shown = reprlib.repr(data) if isinstance(data, list | dict) else ascii(data)
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
    return FormatError(f"{where or 'top level'}: expected {expected}, found {shown}")


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)
