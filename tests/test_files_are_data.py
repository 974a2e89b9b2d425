"""Invariant 9: files from outside are data, never code."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch

import penstock
from penstock import codec
from penstock.errors import FormatError
from penstock.plan import Plan
from penstock.runtime.checkpoint.checkpoint import Tensors
from penstock.runtime.checkpoint.portable import load_weights

SOURCE = Path(penstock.__file__).parent
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
LOADS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_module_unpickles_or_evaluates() -> None:
    """A job file, which is the user's own Python, is run by importlib in runtime/process/jobs.py alone. Workloads ask
    it whether a package is installed.

    torch.compile, in runtime/stage/compiling.py alone, takes a function that is loaded already, and no text.
    """
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not LOADS_CODE & {name.partition(".")[0] for name in names}, path
                may_look_up = path.name == "jobs.py" or path.parent.name == "workloads"
                assert "importlib.util" not in names or may_look_up, path
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                owner = getattr(getattr(node.func, "value", None), "id", "")
                compiles = (path.name, owner, called) == ("compiling.py", "torch", "compile")
                assert called not in RUNS_CODE or owner == "re" or compiles, f"{path}:{node.lineno}"
                if (owner, called) == ("torch", "load"):  # of weights to start from: tensors alone, and said so
                    only = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
                    assert [ast.unparse(value) for value in only] == ["True"], f"{path}:{node.lineno}"


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("exploded"),))  # type: ignore[return-value]


def test_a_pickle_in_place_of_a_plan_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.json"
    path.write_bytes(pickle.dumps(Bomb(), protocol=4))
    with pytest.raises(FormatError):
        codec.load(Plan, path)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_in_place_of_a_checkpoint_shard_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shard-00001.safetensors", ".metadata"):  # the second is torch's own, in pickle
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(), protocol=4))
    with pytest.raises(FormatError, match="damaged"):
        Tensors(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_in_place_of_weights_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Bomb(), tmp_path / "model.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Bomb(), protocol=2))
    for name in ("model.pt", "old.pt"):
        with pytest.raises(FormatError, match="not a state_dict"):
            load_weights(tmp_path / name, {}, {})
    assert not (tmp_path / "exploded").exists()
