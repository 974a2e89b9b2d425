"""Weights as the rest of the world keeps them: one safetensors file, or a state_dict that torch.save wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import FormatError
from penstock.runtime.checkpoint.checkpoint import Tensors, read_index

FORMATS = ("safetensors", "state-dict")


def export_weights(checkpoint: Path, form: str, output: Path) -> None:
    """Write a checkpoint's weights under all names of the model's state_dict."""
    if form not in FORMATS:
        raise FormatError(f"{checkpoint}: a checkpoint's weights are written as {' or '.join(FORMATS)}, not {form!r}")
    names = read_index(checkpoint).names
    tensors = Tensors(checkpoint).load([f"model/{name}" for name in dict.fromkeys(names.values())])
    found = {key: tensors[f"model/{name}"] for key, name in names.items()}
    unfinished = output.with_name(output.name + ".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if form == "safetensors":  # which knows no two names of one tensor
            save_file({key: tensor.clone() for key, tensor in found.items()}, unfinished, metadata={"format": "pt"})
        else:
            torch.save(found, unfinished)
        unfinished.replace(output)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise FormatError(f"{output}: cannot be written: {error}") from None


def load_weights(file: Path, names: Mapping[str, str], held: Mapping[str, Tensor]) -> None:
    """Fill tensors from a file of the whole model's weights.

    ``names`` has every key of the model's state_dict -> the name by which ``held`` knows the tensor. The file must have
    each tensor under one of its keys at least, and nothing else.
    """
    found = _read(file)
    missing = sorted(set(names.values()) - {names[key] for key in found if key in names})
    unknown = sorted(set(found) - set(names))
    for what, keys in (("lacks", missing), ("has, where the model has not,", unknown)):
        if keys:
            some = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
            raise FormatError(f"{file}: {what} {some}; give this model's weights, by the names of its state_dict")
    with torch.no_grad():
        for key, read in found.items():
            if names[key] in held:
                tensor, target = read(), held[names[key]]
                if tensor.shape != target.shape:
                    raise FormatError(f"{file}: {key!r} has shape {list(tensor.shape)}, not {list(target.shape)}")
                target.copy_(tensor)


def _read(file: Path) -> dict[str, Callable[[], Tensor]]:
    """By name, what reads the tensor."""
    if not file.is_file():
        raise FormatError(f"{file}: no such file; give a .safetensors file, or a state_dict that torch.save wrote")
    if file.suffix == ".safetensors":
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise FormatError(f"{file}: not a complete safetensors file: {error}") from None
        names: list[str] = opened.keys()  # type: ignore[no-untyped-call]
        return {name: partial(opened.get_tensor, name) for name in names}
    try:  # tensors and plain values alone: nothing in the file is run
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise FormatError(f"{file}: not a state_dict that torch.save wrote: {reason}") from None
    if not isinstance(loaded, Mapping) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise FormatError(f"{file}: holds more than a state_dict; save model.state_dict() by itself")
    return {key: partial(_same, tensor) for key, tensor in loaded.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor
