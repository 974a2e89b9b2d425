"""Capture and split: any model becomes one graph, and any cut of it computes what the model computes."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from models import MODELS, make_job
from penstock import Job
from penstock.errors import CaptureError, PlanError
from penstock.runtime.capture.capture import call_arguments, capture
from penstock.runtime.capture.split import Splitter, check_same_model
from penstock.runtime.worker.data import load_batch


def batch(job: Job, size: int = 4) -> tuple[Any, Any]:
    return load_batch(job, range(size), seed=0)


@pytest.mark.parametrize(
    ("name", "front_end"),
    [("conv", "export"), ("tied", "export"), ("branches", "export"), ("recurrent", "export"), ("undecided", "fx")],
)
def test_each_model_takes_the_first_front_end_that_can(name: str, front_end: str) -> None:
    job = make_job(name)
    assert capture(job.model, batch(job)[0]).front_end == front_end


def test_a_model_that_cannot_be_exported_is_traced_with_its_undecidable_part_left_whole() -> None:
    job = make_job("undecided")
    captured = capture(job.model, batch(job)[0])
    assert captured.front_end == "fx"
    assert [layer.name for layer in captured.layers] == ["0", "1", "2", "3", "loss"]


class Reverse(torch.autograd.Function):
    """As in domain-adversarial training: its gradient is not that of its forward, and export sees the forward alone."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Reversal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        reversed_: Tensor = Reverse.apply(x)
        return reversed_


def test_a_front_end_that_gets_gradients_wrong_is_not_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Reversal(), nn.Linear(4, 2))
    captured = capture(model, torch.randn(3, 4))
    assert captured.front_end == "fx"
    with pytest.raises(CaptureError, match=r"another gradient of 0\.weight"):
        capture(model, torch.randn(3, 4), only="export")


class ZeroTable(nn.Module):
    """Starts as the identity, so that whatever is done with its table does not show in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        reversed_: Tensor = Reverse.apply(self.table)
        return x + self.gate * reversed_


def test_parameters_that_start_at_zero_hide_no_wrong_gradient_and_stay_zero() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ZeroTable())
    with pytest.raises(CaptureError, match=r"another gradient of 1\.table"):
        capture(model, torch.randn(3, 4), only="export")
    assert not model[1].table.any()


class DrawsElsewhere(nn.Module):
    """Draws from numpy and Python's own generator, as SpecAugment and some augmentations do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand()) * random.random()


def test_capture_keeps_the_random_states_of_numpy_and_python_and_freezes_no_number_drawn_from_them() -> None:
    np.random.seed(3)
    random.seed(3)
    expected = np.random.get_state()[1].copy(), random.getstate()
    model = nn.Sequential(nn.Linear(4, 4), DrawsElsewhere(), nn.Linear(4, 4))
    captured = capture(model, torch.randn(3, 4))
    assert [layer.name for layer in captured.layers] == ["0", "1", "2", "loss"]
    assert captured.front_end == "fx"
    with pytest.raises(CaptureError, match="forward draws from"):
        capture(model, torch.randn(3, 4), only="export")
    assert np.array_equal(np.random.get_state()[1], expected[0])
    assert random.getstate() == expected[1]


class Skipping(nn.Module):
    """LayerDrop as transformers spells it, in a module that has dropout of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), rate

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5, training=self.training)
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.layerdrop:
                    continue
            x = nn.functional.dropout(layer(x), 0.5, training=self.training)
        return x


def test_layer_drop_at_rate_zero_is_captured_as_if_it_were_not_there() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), Skipping(0.0)), torch.randn(3, 4))
    assert captured.front_end == "export"
    names = [layer.name for layer in captured.layers]
    assert names == ["0", "1.dropout", "1.layers.0", "1.dropout~2", "1.layers.1", "1.dropout~3", "1.layers.2",
                     "1.dropout~4", "loss"]  # fmt: skip


class SkippingAllButTheFirst(Skipping):
    """As WavLM does: a number is drawn for the first layer too, and compared with nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            drawn = torch.rand([])
            if self.training and index > 0 and drawn < self.layerdrop:
                continue
            x = nn.functional.dropout(layer(x), 0.5, training=self.training)
        return x


def test_a_number_that_layer_drop_draws_and_does_not_use_is_left_out() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), SkippingAllButTheFirst(0.0)), torch.randn(3, 4))
    assert captured.front_end == "export"
    assert not any("rand" in str(node.target) for node in captured.graph.nodes)


class ScaledAtRandom(nn.Module):
    """Uses a single random number beside others."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=self.training) * torch.rand([]) + torch.rand_like(x)


def test_a_single_random_number_that_is_used_stays_in_the_graph() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), ScaledAtRandom()), torch.randn(3, 4))
    assert captured.front_end == "export"
    assert sum("aten.rand.default" in str(node.target) for node in captured.graph.nodes) == 1


def test_layer_drop_at_another_rate_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"1 \(Skipping\) skips layers at random.*0\.25.*layerdrop=0"):
        capture(nn.Sequential(nn.Linear(4, 4), Skipping(0.25)), torch.randn(3, 4))


def test_a_model_that_skips_layers_in_training_alone_is_captured_for_evaluation() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), Skipping(0.25)), torch.randn(3, 4), mode="eval")
    assert captured.front_end == "export"


class Loud(nn.Module):
    """Takes what it is given, in no declared form, and decides by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, *args: Tensor) -> Tensor:
        (x,) = args
        return self.linear(x) if bool(x.sum() > -1e9) else x


class Variadic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, *args: Tensor) -> Tensor:
        return self.linear(sum(args, torch.zeros(())))


@pytest.mark.parametrize("count", [1, 2])
def test_arguments_may_be_in_no_declared_form(count: int) -> None:
    assert capture(Variadic(), (torch.ones(4, 6),) * count).front_end == "export"


def test_what_nothing_can_trace_is_one_layer() -> None:
    captured = capture(Loud(), torch.randn(4, 6))
    assert captured.front_end == "module"
    assert len(captured.layers) == 2


def test_a_module_capture_says_where_and_why_export_could_not() -> None:
    captured = capture(Loud(), torch.randn(4, 6))
    assert captured.reason.startswith("what it does depends on the values of tensors (`return self.linear(x) if bool(")
    assert "test_capture.py:" in captured.reason
    assert "\n" not in captured.reason
    assert capture(nn.Linear(4, 4), torch.randn(2, 4)).reason == ""


def test_torch_prints_no_graph_of_what_it_cannot_trace(capfd: pytest.CaptureFixture[str]) -> None:
    capture(Loud(), torch.randn(4, 6))
    assert capfd.readouterr() == ("", "")


def test_the_reason_why_a_model_does_not_run_is_said_once_with_the_layer() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(nn.Sequential(nn.Sequential(Broken()))), torch.randn(2, 2))
    assert str(caught.value).count("RuntimeError: this model does not work") == 1
    assert "in layer '0.0.0' (Broken)" in str(caught.value)


def test_a_sequential_that_nothing_can_trace_keeps_its_children() -> None:
    captured = capture(nn.Sequential(Loud(), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 6))
    assert [layer.name for layer in captured.layers] == ["0", "1", "2", "loss"]


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this model does not work")


def test_a_model_that_fails_by_itself_is_a_clear_error() -> None:
    with pytest.raises(CaptureError, match="this model does not work"):
        capture(Broken(), torch.randn(2, 2))


@pytest.mark.parametrize("name", MODELS)
def test_layers_keep_the_models_parameter_names(name: str) -> None:
    job = make_job(name)
    splitter = Splitter(capture(job.model, batch(job)[0]))
    found = {p for layer in range(len(splitter.captured.layers)) for p in splitter.parameters_of(layer)}
    assert found == {parameter for parameter, _ in job.model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [4, 3])
def test_every_layer_a_section_of_its_own_computes_the_model(name: str, size: int) -> None:
    job = make_job(name)
    inputs, target = batch(job)
    splitter = Splitter(capture(job.model, inputs))
    inputs, target = batch(job, size)
    args, kwargs = call_arguments(inputs)
    torch.manual_seed(0)
    expected = job.loss(copy.deepcopy(job.model)(*args, **kwargs), target)

    values: dict[str, Any] = {}
    given = splitter.captured.bind(inputs)
    output = None
    torch.manual_seed(0)
    for layer in range(len(splitter.captured.layers)):
        section = splitter.section([layer])
        arguments = [given[i] for i in section.reads] + [values[n] for n in section.received_names]
        sent, output = section.run(section.parameters, arguments)
        values.update(zip(section.sent_names, sent, strict=True))
    torch.testing.assert_close(job.loss(splitter.captured.rebuild_output(output), target), expected)


def test_capture_leaves_the_model_untouched() -> None:
    job = make_job("conv")
    job.model[3].eval()
    before = copy.deepcopy(job.model.state_dict())
    modes = [module.training for module in job.model.modules()]
    random_state = torch.get_rng_state()
    capture(job.model, batch(job)[0])
    for name, tensor in job.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert [module.training for module in job.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in job.model.parameters())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(x))


def test_dropout_drops_and_batch_norm_counts_though_the_model_was_in_eval_mode() -> None:
    model = Dropping().eval()
    x = torch.ones(16, 8)
    splitter = Splitter(capture(model, x))
    section = splitter.section(range(len(splitter.captured.layers) - 1))
    (sent,), _ = section.run(section.parameters, [x])
    assert (sent < sent.max()).any()
    assert int(section.buffers["norm.num_batches_tracked"]) == 1


class Overwriting(nn.Module):
    """A view of an earlier value is overwritten, and the value read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        torch.relu_(h)
        return self.out(h) + h


def test_a_cut_before_an_overwriting_operation_changes_nothing() -> None:
    model, x = Overwriting(), torch.randn(4, 4)
    splitter = Splitter(capture(model, x))
    names = [layer.name for layer in splitter.captured.layers]
    before = splitter.section([names.index("linear")])
    after = splitter.section([i for i in range(len(names)) if names[i] != "linear"])
    sent, _ = before.run(before.parameters, [x])
    received = [value.detach().requires_grad_() for value in sent]
    _, output = after.run(after.parameters, received)
    result = splitter.captured.rebuild_output(output)
    torch.testing.assert_close(result, model(x))
    result.sum().backward()
    assert received[0].grad is not None


class ReadThenOverwritten(nn.Module):
    """``early`` reads a value before it is overwritten; nothing but the order says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.early = nn.Linear(4, 4)
        self.overwrite = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        kept = self.early(h)
        return kept + self.overwrite(h)


def test_a_cut_may_run_a_reader_after_the_stage_that_overwrites_what_it_reads() -> None:
    model, x = ReadThenOverwritten(), torch.randn(4, 4)
    splitter = Splitter(capture(model, x))
    names = [layer.name for layer in splitter.captured.layers]
    late = [names.index("early"), *(i for i, name in enumerate(names) if name.startswith("add") or name == "loss")]
    first = splitter.section([i for i in range(len(names)) if i not in late])
    second = splitter.section(late)
    sent, _ = first.run(first.parameters, [x])
    values = dict(zip(first.sent_names, sent, strict=True))
    _, output = second.run(second.parameters, [values[name] for name in second.received_names])
    torch.testing.assert_close(splitter.captured.rebuild_output(output), model(x))


def test_a_middle_stage_takes_the_batch_size_from_what_it_receives() -> None:
    from penstock.workloads.models import CharacterModel

    splitter = Splitter(
        capture(CharacterModel(10, width=8, heads=2, blocks=3, length=5), torch.zeros(4, 5, dtype=torch.long))
    )
    names = [layer.name for layer in splitter.captured.layers]
    middle = [i for i, name in enumerate(names) if name.startswith("blocks.1")]
    assert splitter.section(middle).reads == ()


def test_a_plan_for_another_model_names_the_first_layer_that_differs() -> None:
    job = make_job("conv")
    splitter = Splitter(capture(job.model, batch(job)[0]))
    with pytest.raises(PlanError, match="another model: layer 1 is 'other' there and '1' in this job"):
        check_same_model(splitter, ["0", "other"], "the plan")


def test_outputs_may_be_nested() -> None:
    job = make_job("branches")
    inputs, _ = batch(job)
    captured = capture(job.model, inputs)
    leaves, spec = pytree.tree_flatten(job.model(**inputs))
    splitter = Splitter(captured)
    section = splitter.section(range(len(captured.layers)))
    _, output = section.run(section.parameters, captured.bind(inputs))
    assert pytree.tree_structure(captured.rebuild_output(output)) == spec
    assert len(leaves) == 2
