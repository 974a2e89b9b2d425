"""torch.compile of a stage, as one function of weights and inputs: new versions of the weights run the same code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.errors import JobError
from penstock.runtime.capture.randomness import Keyed
from penstock.runtime.capture.split import Section


def compiled(section: Section) -> Section:
    """The same section, compiled when it first runs, and again when sizes first change."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # seconds, which only those who compile should wait
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise JobError(
            "Job.compile needs a C++ compiler, and none was found; install g++ or clang, name yours in the environment "
            "variable CXX, or leave compile out"
        ) from error

    # A function of its own for each section: torch keeps what it has compiled by function.
    def call(*arguments: Any, **options: Any) -> Any:
        return torch.func.functional_call(*arguments, **options)

    for module in section.module.modules():
        if isinstance(module, Keyed):  # the seed is another one each time: not a part of what is compiled
            module.seed = torch.compiler.disable(module.seed)  # type: ignore[method-assign, no-untyped-call]
    # With its own way to draw, torch.compile would draw other numbers than the plain stage.
    return replace(section, functional=torch.compile(call, options={"fallback_random": True}))
