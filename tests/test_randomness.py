"""Random numbers: the same under every plan, for every microbatch, and in one process."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from in_threads import (
    Losses,
    check_same_gradients,
    even_plan,
    looped_plan,
    profile,
    profile_of,
    recomputing,
    run_in_threads,
    with_batch_size,
)
from models import make_job, sgd
from penstock import Job
from penstock.plan import Plan
from penstock.runtime.capture import randomness
from penstock.runtime.capture.capture import capture
from penstock.runtime.capture.randomness import drawing, may_draw, module_may_draw
from penstock.runtime.capture.split import Splitter
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.worker.assemble import Assembly, make_epoch
from penstock.runtime.worker.data import load_batch, microbatch_key
from penstock.runtime.worker.evaluate import Evaluator


class Functional(nn.Module):
    """Dropout as T5 has it: a function, not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        h = F.dropout(torch.tanh(self.second(h)), 0.3, self.training)
        return self.last(F.dropout(h, 0.3, training=self.training))  # type: ignore[no-any-return]


class DropPath(nn.Module):
    """Stochastic depth: drops the residual branch of whole samples."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.6) / 0.6


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop, self.head = DropPath(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(x)))
        return self.head(x)  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """Dropout inside an operation: of attention, and between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 4, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(x.view(-1, 3, 2))
        p = 0.4 if self.training else 0.0
        return self.head(F.scaled_dot_product_attention(h, h, h, dropout_p=p)[:, -1])  # type: ignore[no-any-return]


class Transposed(nn.Module):
    """Drops elements of a transposed tensor, as WavLM does. Mask and view go by the order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 2, 4).transpose(1, 2)
        return self.last(self.middle(h).transpose(1, 2).view(-1, 8))  # type: ignore[no-any-return]


class ByNumpy(nn.Module):
    """Masks by numpy and Python, as Wav2Vec2 does; no front end but the module's own takes that."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum().detach()) > 1e9 or not torch.is_grad_enabled():  # torch.export does not take the first
            return x
        mask = torch.from_numpy(np.random.rand(*x.shape).astype("float32") < 0.7)
        return x * mask * (1 + random.random())


def by_numpy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), ByNumpy(), nn.Linear(6, 6), ByNumpy(), nn.Linear(6, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "stochastic-depth": StochasticDepth,
    "attentive": Attentive,
    "by-numpy": by_numpy,
    "transposed": Transposed,
}


def job_of(name: str, **options: Any) -> Job:
    torch.manual_seed(0)
    data = list(zip(torch.randn(16, 6), torch.randint(0, 4, (16,)), strict=True))
    return Job(model=MODELS[name](), data=data, loss=F.cross_entropy, optimizer=sgd, batch_size=8, **options)


@functools.cache
def plan_of(name: str, replicas: Sequence[int], schedule: str, microbatches: int) -> Plan:
    return even_plan(_profile(name), replicas, schedule, microbatches)


@functools.cache
def _profile(name: str) -> Any:
    return profile(job_of(name))


# --- every plan draws the same


def test_dropout_of_a_transposed_tensor_is_the_same_wherever_the_cut_is() -> None:
    made = profile(job_of("transposed"))
    stages = len(made.graph.layers)
    check_same_gradients(even_plan(made, (1,) * stages, "1f1b", microbatches=2), lambda: job_of("transposed"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_every_cut_and_replication_trains_as_one_worker_does(name: str, replicas: tuple[int, ...]) -> None:
    make = functools.partial(job_of, name)
    losses: list[Losses] = []
    weights = []
    for each in ((1,), replicas):
        losses.append(Losses())
        assemblies = run_in_threads(plan_of(name, each, "1f1b", 2), make, prepare=losses[-1])
        stages = [stage for assembly in assemblies for stage in assembly.worker.stages.values()]
        weights.append({n: p for stage in stages for n, p in stage.weights.parameters.items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for parameter, expected in weights[0].items():
        torch.testing.assert_close(weights[1][parameter].data, expected.data, rtol=1e-4, atol=1e-6)


def masks(layers: Sequence[Sequence[int]], key: int) -> Tensor:
    """What is left of a row of ones behind three dropouts, computed in sections of these layers."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5))
    splitter = Splitter(capture(model, torch.ones(4, 32), only="fx"))
    value = torch.ones(4, 32)
    for members in layers:
        section = splitter.section(members)
        with drawing(key):
            sent, output = section.run({}, [value])
        value = sent[0] if sent else output
    return value


def test_layers_draw_by_the_key_and_their_own_name_whatever_section_they_are_in() -> None:
    whole = masks([[0, 1, 2, 3, 4]], key=1)
    assert torch.equal(whole, masks([[0], [1, 2], [3, 4]], key=1))
    assert not torch.equal(whole, masks([[0, 1, 2, 3, 4]], key=2))
    share = float((whole > 0).float().mean())
    assert 0.03 < share < 0.3, "three dropouts with one mask would leave half"


def test_every_microbatch_and_every_epoch_draws_others_and_a_resumed_epoch_the_same() -> None:
    job = make_job("noisy", samples=16, batch_size=4)
    plan = even_plan(with_batch_size(profile_of("noisy"), 4), (1, 1), "1f1b", 2)
    epochs = [make_epoch(job, plan, number) for number in range(2)]
    keys = [microbatch_key(epoch, microbatch) for epoch in epochs for microbatch in range(8)]
    assert len(set(keys)) == 16
    assert microbatch_key(replace(epochs[1], first_minibatch=3), 0) == keys[8 + 6]


def test_threads_of_one_process_do_not_draw_from_each_other_s_seeds() -> None:
    splitter = Splitter(capture(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), torch.ones(64, 64)))
    section = splitter.section(range(len(splitter.captured.layers)))
    found: dict[tuple[int, int], Tensor] = {}

    def work(thread: int) -> None:
        for turn in range(100):
            with drawing(turn):
                found[thread, turn] = section.run(section.parameters, [torch.ones(64, 64)])[1][0]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[thread, turn], found[0, turn]) for thread in range(4) for turn in range(100))


def test_a_model_that_draws_in_evaluation_finds_the_same_under_every_plan() -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=True)

    def make() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Always(), nn.Linear(6, 6), Always(), nn.Linear(6, 4))
        job = replace(job_of("functional"), model=model)
        return replace(job, evaluation=job.data)

    found: list[float] = []
    evaluators: dict[int, Evaluator] = {}

    def work(assembly: Assembly) -> None:
        loss = evaluators[assembly.worker.rank].run()["loss"]
        if assembly.worker.rank == 0:
            found.append(loss)

    def prepare(assembly: Assembly) -> None:
        evaluators[assembly.worker.rank] = Evaluator(assembly, assembly.job.data)

    measured = profile(make())
    for replicas in ((1,), (1, 1), (1, 1, 1)):
        run_in_threads(even_plan(measured, replicas, "1f1b", 2), make, prepare=prepare, work=work)
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_a_loss_that_draws_draws_the_same_where_its_stage_recomputes() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output + torch.randn_like(output) * random.random(), target)

    def make() -> Job:
        return replace(job_of("functional"), loss=loss)

    plan = plan_of("functional", (1, 1), "1f1b", 2)
    found = [Losses(), Losses()]
    for each, losses in zip((plan, recomputing(plan)), found, strict=True):
        run_in_threads(each, make, prepare=losses)
    assert found[0]
    assert found[0] == found[1]


class NoisySGD(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter))
        return super().step(closure)


def test_an_optimizer_that_draws_repeats() -> None:
    def make() -> Job:
        return replace(job_of("functional"), optimizer=lambda parameters: NoisySGD(parameters, lr=0.1))

    plan = plan_of("functional", (1,), "1f1b", 2)
    runs = [run_in_threads(plan, make)[0].worker.stages[0].weights.parameters for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


# --- verification with dropout on


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "pipedream"])
def test_verify_is_exact_with_dropout_on(name: str, schedule: str) -> None:
    for replicas in ((1, 1), (1, 2), (2, 1)):
        check_same_gradients(
            plan_of(name, replicas, schedule, 1 if schedule == "pipedream" else 2), lambda: job_of(name)
        )


@pytest.mark.parametrize("name", MODELS)
def test_verify_is_exact_with_dropout_on_interleaved_and_with_recompute(name: str) -> None:
    check_same_gradients(looped_plan(_profile(name), 2, 2, "interleaved", 2), lambda: job_of(name))
    check_same_gradients(recomputing(plan_of(name, (1, 2), "1f1b", 2)), lambda: job_of(name))


@pytest.mark.parametrize("name", ["noisy", "transformer"])
def test_verify_sees_dropout(tmp_path: Path, name: str) -> None:
    """Where a worker draws by another key, the gradients are others."""
    plan = even_plan(profile_of(name), (1, 1), "1f1b", 2)

    def other_key(assembly: Assembly) -> None:
        (stage,) = assembly.worker.stages.values()
        forward = stage.module.forward
        stage.module.forward = lambda *args, key, **kwargs: forward(*args, key=key + 1, **kwargs)  # type: ignore[method-assign]

    make = functools.partial(make_job, name)
    run_in_threads(plan, make, prepare=other_key, work=lambda assembly: save_gradients(assembly, tmp_path))
    assert not compare(make(), plan, tmp_path).passed


def test_verify_with_synchronised_batch_norm_draws_for_each_replica_s_microbatch() -> None:
    def make() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        )
        return replace(job_of("functional"), model=model, sync_batch_norm=True)

    check_same_gradients(even_plan(profile(make()), (2, 2), "1f1b", 4), make, tolerance=1e-4)


def test_verify_leaves_the_generators_as_they_were(tmp_path: Path) -> None:
    plan, job = plan_of("by-numpy", (1,), "1f1b", 2), job_of("by-numpy")
    run_in_threads(plan, lambda: job_of("by-numpy"), work=lambda assembly: save_gradients(assembly, tmp_path))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    compare(job, plan, tmp_path)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr]


# --- what draws


def drawing_nodes(model: nn.Module, x: Tensor, front_end: str) -> list[str]:
    captured = capture(model, x, only=front_end)
    return [node.name for node in captured.graph.nodes if may_draw(node, captured.root)]


def test_the_operations_of_torch_that_draw_are_known_by_name() -> None:
    """So that a graph of functions and methods is treated as one of operators is."""
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten" and not base.startswith("_"):
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            if torch.Tag.nondeterministic_seeded in operator.tags:
                tagged.add(base.rstrip("_"))
    private = {"miopen_rnn", "normal_functional", "rrelu_with_noise_functional"}
    assert tagged - private <= randomness._DRAWING


@pytest.mark.parametrize("front_end", ["export", "fx"])
def test_dropout_that_is_off_draws_nothing(front_end: str) -> None:
    off = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.LSTM(4, 4))
    assert drawing_nodes(nn.Sequential(off[0], off[1]), torch.ones(2, 4), front_end) == []
    assert len(drawing_nodes(nn.Sequential(off[0], nn.Dropout(0.1)), torch.ones(2, 4), front_end)) == 1
    assert not module_may_draw(off)
    assert not module_may_draw(nn.TransformerEncoderLayer(8, 2, dropout=0.0))
    assert module_may_draw(nn.TransformerEncoderLayer(8, 2, dropout=0.1))
    assert module_may_draw(ByNumpy())


def test_what_capture_adds_for_writes_in_place_draws_nothing() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.t().contiguous()
            y[:, 0] += 1.0
            return y.t()

    model = nn.Sequential(nn.Linear(4, 4), Writes(), nn.Linear(4, 4))
    captured = capture(model, torch.ones(2, 4), only="export")
    assert any(
        getattr(node.target, "__module__", "") == "penstock.runtime.capture.inplace" for node in captured.graph.nodes
    )
    assert drawing_nodes(model, torch.ones(2, 4), "export") == []


def test_an_operation_inside_a_region_without_gradients_draws() -> None:
    class Region(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                mask = torch.rand_like(x) < 0.5
            return x * mask

    model = nn.Sequential(nn.Linear(4, 4), Region(), nn.Linear(4, 4))
    assert len(drawing_nodes(model, torch.ones(2, 4), "export")) == 1

    def make() -> Job:
        torch.manual_seed(0)
        data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
        model = nn.Sequential(nn.Linear(4, 4), Region(), nn.Linear(4, 4))
        return Job(model=model, data=data, loss=F.mse_loss, optimizer=sgd, batch_size=4)

    check_same_gradients(even_plan(profile(make()), (1, 1), "1f1b", 2), make)


def test_without_a_key_a_section_draws_as_any_module_does() -> None:
    job = job_of("functional")
    inputs, _ = load_batch(job, range(8), seed=0)
    splitter = Splitter(capture(job.model, inputs))
    section = splitter.section(range(len(splitter.captured.layers)))
    torch.manual_seed(3)
    expected = job.model(inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(section.run(section.parameters, [inputs])[1][0], expected)
