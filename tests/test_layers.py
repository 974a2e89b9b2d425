"""Imports go one way through the layers of docs/architecture.md, and what plans and simulates needs no torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "penstock"

LAYERS: dict[int, tuple[str, ...]] = {
    0: (
        "errors", "limits", "codec", "units", "compression", "graph", "cluster", "profile", "schedule", "plan", "trace",
        "sampling", "job", "remedy", "clocks", "record", "provenance", "run", "places",
    ),
    1: ("cost", "plan_costs", "sync"),
    2: ("planner", "simulate", "sweep", "formats", "survey"),
    3: ("runtime",),
    4: ("adapt",),
    5: ("cli", "report", "workloads", "bench", "__main__"),
}  # fmt: skip
RUNTIME = (
    "machine", "peers", "transport", "messages", "capture", "stage", "sync", "worker", "links", "measure",
    "checkpoint", "emulate", "process",
)  # fmt: skip
"""The folders of ``runtime``; each imports only from those before it."""
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
PURE = 2
"""The highest layer that lives on the standard library and numpy."""


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import that runs, those inside functions too; ``package`` is its own."""
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _running(other)
            continue
        yield child
        yield from _running(child)


def violations(path: str, source: str) -> list[str]:
    """What a module at ``path``, relative to the package, imports against the rules."""
    parts = Path(path).with_suffix("").parts
    package = ".".join(("penstock", *parts[:-1]))
    name = parts[0]
    if name != "__init__" and name not in LAYER_OF:
        return [f"{path}: belongs to no layer; add {name!r} to LAYERS"]
    layer = LAYER_OF.get(name, 0)
    found = []
    for line, imported in imports(ast.parse(source), package):
        top, _, rest = imported.partition(".")
        if top == "penstock":
            target = rest.partition(".")[0]
            if LAYER_OF.get(target, 0) > layer:
                found.append(f"{path}:{line}: layer {layer} imports {imported} of layer {LAYER_OF[target]}")
            elif name == target == "runtime" and len(parts) > 1 + (parts[-1] == "__init__"):
                folders = [RUNTIME.index(each) for each in (parts[1], *rest.split(".")[1:2]) if each in RUNTIME]
                if folders != sorted(folders, reverse=True):
                    found.append(f"{path}:{line}: runtime/{parts[1]} imports {imported}, which comes after it")
        elif layer <= PURE and top not in sys.stdlib_module_names and top != "numpy":
            found.append(f"{path}:{line}: layer {layer} imports {imported}; it lives on the standard library and numpy")
    return found


def test_every_folder_of_the_runtime_has_its_place_and_a_page() -> None:
    folders = {path.parent.name: path for path in (PACKAGE / "runtime").glob("*/__init__.py")}
    assert folders.keys() == set(RUNTIME)
    for folder, page in folders.items():
        modules = {path.stem for path in page.parent.glob("*.py")} - {"__init__"}
        words = ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))) or ""
        missing = sorted(module for module in modules if f"``{module}``" not in words)
        assert missing == [], f"the docstring of runtime/{folder}/__init__.py does not say what these are for"


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_a_module_imports_only_from_its_own_layer_and_those_below(path: str) -> None:
    assert violations(path, (PACKAGE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        ("graph.py", "from penstock.cost import CostModel", "layer 0 imports penstock.cost.CostModel of layer 1"),
        ("graph.py", "from penstock import codec, planner", "penstock.planner of layer 2"),
        ("cost.py", "import penstock.simulate", "layer 1 imports penstock.simulate of layer 2"),
        ("schedule/builders.py", "from ..planner import make_plan", "penstock.planner.make_plan of layer 2"),
        ("schedule/__init__.py", "from .. import runtime", "penstock.runtime of layer 3"),
        (
            "planner/planner.py",
            "def late():\n    from penstock.runtime.worker.worker import Worker",
            ":2: layer 2 imports",
        ),
        ("planner/planner.py", "try:\n    import torch\nexcept ImportError:\n    pass", "standard library and numpy"),
        ("simulate.py", "from torch import nn", "standard library and numpy"),
        ("job.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "standard library and numpy"),
        (
            "runtime/process/train.py",
            "from penstock.workloads import mlp",
            "layer 3 imports penstock.workloads.mlp of layer 5",
        ),
        (
            "runtime/stage/stage.py",
            "from penstock.runtime.process.train import train_worker",
            "runtime/stage imports penstock.runtime.process.train.train_worker, which comes after it",
        ),
        ("adapt/replan.py", "import penstock.bench.run", "layer 4 imports penstock.bench.run of layer 5"),
        (
            "__init__.py",
            "from penstock.planner import make_plan",
            "penstock.planner.make_plan of layer 2",
        ),
        ("__init__.py", "from .cost import CostModel", "penstock.cost.CostModel of layer 1"),
        ("novel.py", "", "belongs to no layer"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(path: str, source: str, words: str) -> None:
    (found,) = violations(path, source)
    assert words in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("plan.py", "import numpy as np\nimport json\nfrom penstock import codec\nfrom penstock.graph import Layer"),
        ("schedule/builders.py", "from .action import Action\nfrom . import pipeline\nfrom .. import errors"),
        ("job.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import nn"),
        ("cost.py", "import typing\nif typing.TYPE_CHECKING:\n    from penstock.runtime import worker"),
        ("runtime/worker/worker.py", "import torch\nfrom penstock.simulate import simulate"),
        ("cli/main.py", "import typer\nfrom penstock import bench, planner, report, runtime, workloads"),
        ("runtime/process/train.py", "from penstock import Job, __version__"),
    ],
)
def test_an_import_that_goes_the_right_way_passes(path: str, source: str) -> None:
    assert violations(path, source) == []
