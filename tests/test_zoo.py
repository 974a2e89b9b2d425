"""A sample of the models of `penstock bench models`: captured as layers, cut in two, compared, trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn

from penstock.bench import models
from penstock.bench.models import ModelRow, row_of, row_within
from penstock.errors import JobError
from penstock.workloads import torchvision
from penstock.workloads.transformers import import_transformers
from penstock.workloads.zoo import CLASSES, ZOO, ZooModel

SAMPLE = (
    "transformers/DebertaV2ForMaskedLM",
    "transformers/GPT2LMHeadModel",
    "transformers/OPTForCausalLM",
    "transformers/MixtralForCausalLM",
    "transformers/Qwen3ForCausalLM",
    "transformers/T5ForConditionalGeneration",
    "transformers/BartForConditionalGeneration",
    "transformers/WhisperForConditionalGeneration",
    "transformers/Wav2Vec2ForSequenceClassification",
    "transformers/BeitForImageClassification",
    "transformers/SwinForImageClassification",
    "transformers/SegformerForSemanticSegmentation",
    "torchvision/resnet50",
    "torchvision/mobilenet_v3_small",
    "torchvision/shufflenet_v2_x0_5",
)
WITHOUT_DROPOUT = (
    "transformers/Qwen3ForCausalLM",
    "transformers/WhisperForConditionalGeneration",
    "torchvision/resnet50",
    "torchvision/shufflenet_v2_x0_5",
)
"""Their libraries set every rate to 0. The others are compared with random numbers drawn."""
BY_NAME = {model.name: model for model in ZOO}


def needed(library: str) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed; pip install '.[dev]'")
    if library == "torchvision" and not torchvision.has_torchvision():
        pytest.skip("torchvision is not there; run `make env`")


def test_there_are_at_least_fifty_each_once() -> None:
    assert len(BY_NAME) == len(ZOO) >= 50
    assert len(SAMPLE) == 15


@pytest.mark.parametrize("name", SAMPLE)
def test_it_is_captured_as_layers_cut_in_two_and_trained_with_the_gradients_of_one_process(name: str) -> None:
    needed(name.partition("/")[0])
    row = row_of(BY_NAME[name])
    assert row.met, row
    assert row.front_end == "export"
    assert row.layers > 20
    assert (row.random_operations > 0) == (name not in WITHOUT_DROPOUT)
    assert row.trained == 10


@pytest.mark.parametrize("name", SAMPLE)
def test_it_keeps_the_rates_of_dropout_that_its_library_sets(name: str) -> None:
    """Rates are compared with those of a model that the library builds from the same arguments, without the zoo."""
    library, _, builder = name.partition("/")
    needed(library)
    model = BY_NAME[name]
    if library == "torchvision":
        plain = getattr(torchvision.import_torchvision().models, builder)(num_classes=CLASSES, **model.config)
    else:
        made = getattr(import_transformers(), builder)
        plain = made(made.config_class(**model.config))
    assert rates(model.job().model) == rates(plain)


def rates(model: nn.Module) -> dict[str, float]:
    """Of each module that drops something."""
    found = {name: getattr(module, "p", getattr(module, "drop_prob", None)) for name, module in model.named_modules()}
    return {name: rate for name, rate in found.items() if isinstance(rate, float)}


def test_layer_drop_is_off() -> None:
    needed("transformers")
    config = BY_NAME["transformers/Wav2Vec2ForSequenceClassification"].job().model.config
    assert config.layerdrop == 0.0
    assert config.hidden_dropout > 0


def test_what_torch_cannot_trace_is_named_with_the_line() -> None:
    needed("transformers")
    row = row_of(BY_NAME["transformers/LongformerForMaskedLM"])
    assert not row.met
    assert row.layers == 1
    assert "values of tensors (`if is_global_attn:`, modeling_longformer.py:" in row.reason


class Endless(ZooModel):
    def job(self) -> None:  # type: ignore[override]
        time.sleep(60)


class Fatal(ZooModel):
    def job(self) -> None:  # type: ignore[override]
        os._exit(3)


def test_a_model_that_takes_too_long_or_ends_its_process_is_a_row_with_the_reason() -> None:
    assert row_within(Endless(library="x", builder="y", inputs="text"), 0.2).reason == "not done after 0.2 s"
    assert (
        row_within(Fatal(library="x", builder="y", inputs="text"), 20.0).reason == "its process ended with exit code 3"
    )


def test_rows_show_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ModelRow(
        model="a/b", front_end="export", layers=7, random_operations=2, cut="3 + 5", largest_difference=1e-7,
        trained=10, met=True,
    )  # fmt: skip
    assert row.cells == ("a/b", "export", "7", "2", "0.0", "3 + 5", "1e-07", "10", "yes")
    assert ModelRow(model="a/b", reason="why").footnote == "a/b: why"
    monkeypatch.setattr(models, "import_torchvision", lambda: None)
    monkeypatch.setattr(models, "import_transformers", lambda: None)
    monkeypatch.setattr(models, "ZOO", [BY_NAME[SAMPLE[0]]])
    monkeypatch.setattr(models, "row_within", lambda model, limit_s: row)
    assert models.run().rows == [row]


# --- torchvision


def test_torchvision_is_imported_beside_a_torch_without_its_operators() -> None:
    """In a process of its own, since an import happens once; transformers follows, which imports it again."""
    needed("torchvision")
    code = (
        "import json\nfrom penstock.workloads.torchvision import import_torchvision\n"
        "first, second = import_torchvision(), import_torchvision()\n"
        "import transformers\n"
        "print(json.dumps([first is second, first.models.resnet18 is not None, bool(transformers.BertForMaskedLM)]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == [True, True, True]


def test_the_benchmark_job_of_gpt2_is_built_where_torchvision_is_installed() -> None:
    """In a process of its own: transformers imports torchvision, which fails by itself beside a torch for CPUs."""
    needed("torchvision")
    found = {} if torchvision.is_installed() else {"PYTHONPATH": str(torchvision.APART)}
    code = "from penstock.bench.jobs import gpt2_job; gpt2_job()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | found, check=True)


def test_without_transformers_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match="transformers is not installed; pip install"):
        import_transformers()


def test_without_torchvision_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torchvision, "APART", Path("nowhere"))
    with pytest.raises(JobError, match="torchvision is not installed; pip install"):
        torchvision.import_torchvision()


def test_another_error_of_torchvision_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="broken"):
        torchvision.import_torchvision()


def test_the_docs_list_every_model() -> None:
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    assert [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith(("| transf", "| torchv"))] == [
        model.name for model in ZOO
    ]
