"""What stages read: the same samples wherever they are read, random transforms included."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from in_threads import CPU, Losses, even_plan, profile, run_in_threads
from models import sgd
from penstock import Job
from penstock.runtime.worker.assemble import Assembly, JobFeed, capture_for_plan, make_epoch
from penstock.runtime.worker.data import load_batch, load_microbatch
from penstock.sampling import Epoch

COINS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()).item(),
}


class Flipped(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets are the same row, negated together by the toss of a coin."""

    def __init__(self, coin: Callable[[], float], samples: int = 24) -> None:
        self.rows, self.coin = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0)), coin

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index] if self.coin() < 0.5 else -self.rows[index]
        return row, row


def identity_job(data: Any, **options: Any) -> Job:
    """The loss is zero where inputs and targets belong together."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer in model:
        nn.init.eye_(layer.weight)
    return Job(model=model, data=data, loss=nn.functional.mse_loss, optimizer=sgd, batch_size=8, **options)


@pytest.mark.parametrize("coin", COINS)
def test_a_random_transform_gives_the_first_stage_the_inputs_of_the_last_stage_s_targets(coin: str) -> None:
    def make() -> Job:
        return identity_job(Flipped(COINS[coin]))

    plan = even_plan(profile(make()), (1, 1), "1f1b", 2)
    run_in_threads(plan, make, prepare=(losses := Losses()))
    assert len(losses) == 6
    assert all(loss < 1e-5 for loss in losses.values()), losses


@pytest.mark.parametrize("coin", COINS)
def test_a_sample_is_the_same_in_any_microbatch_and_another_in_the_next_epoch(coin: str) -> None:
    job = identity_job(Flipped(COINS[coin]))

    def rows(microbatches: int, number: int) -> Tensor:
        epoch = Epoch(num_samples=24, batch_size=8, microbatches=microbatches, seed=0, number=number)
        found = torch.empty(24, 4)
        for microbatch in range(3 * microbatches):
            found[epoch.indices(microbatch)] = load_microbatch(job, epoch, microbatch)[0]
        return found

    assert torch.equal(rows(1, 0), rows(4, 0))
    assert not torch.equal(rows(1, 0), rows(1, 1))
    samples = rows(1, 0) * job.data.rows.sign() > 0  # type: ignore[attr-defined]
    assert 0 < int(samples[:, 0].sum()) < 24, "not all samples draw the same"


def test_loading_puts_all_generators_back() -> None:
    def states() -> list[Any]:
        return [
            random.getstate(),
            [part.tolist() for part in np.random.get_state()[1:2]],
            torch.get_rng_state().tolist(),
        ]

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(4)
        return torch.stack([x for x, _ in samples]) + noise, noise

    jobs = [identity_job(Flipped(random.random)), identity_job(Flipped(np.random.rand), collate=collate)]
    before = states()
    for job in jobs:
        load_batch(job, range(4), seed=0)
        assert states() == before


def test_a_random_collate_draws_by_the_microbatch() -> None:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        return random.random(), np.random.rand()

    job = identity_job(TensorDataset(torch.zeros(24, 4), torch.zeros(24, 4)), collate=collate)
    epoch = Epoch(num_samples=24, batch_size=8, microbatches=2, seed=0)
    found = [load_microbatch(job, epoch, microbatch) for microbatch in range(6)]
    assert found == [load_microbatch(job, epoch, microbatch) for microbatch in range(6)]
    assert len(set(found)) == 6


def test_samples_that_are_there_already_need_no_seed() -> None:
    rows = torch.randn(6, 4)
    data = TensorDataset(rows, rows)
    for stored in (data, Subset(data, range(6)), list(zip(rows, rows, strict=True))):
        random.seed(1)
        expected = random.getstate()
        inputs, target = load_batch(identity_job(stored), [5, 0], seed=0)
        assert torch.equal(inputs, rows[[5, 0]])
        assert torch.equal(target, inputs)
        assert random.getstate() == expected


def test_a_stage_takes_only_inputs_or_only_targets_to_its_device() -> None:
    job = identity_job(Flipped(random.random))
    plan = even_plan(profile(job), (1, 1), "1f1b", 2)
    splitter, _ = capture_for_plan(job, plan, CPU)
    feed = JobFeed(job, make_epoch(job, plan, 0), splitter.captured, torch.device("meta"))
    (inputs,), nothing = feed.load(0, target=False)
    none, target = feed.load(0, inputs=False)
    assert (inputs.device.type, nothing) == ("meta", None)
    assert (none, target.device.type) == ((), "meta")

    asked: list[tuple[int, bool, bool]] = []

    def watch(assembly: Assembly) -> None:
        segment = assembly.segment(make_epoch(assembly.job, plan, 0))
        load = JobFeed.load

        class Watched(JobFeed):
            def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> Any:
                asked.append((assembly.worker.rank, inputs, target))
                return load(self, microbatch, inputs=inputs, target=target)

        object.__setattr__(segment, "feed", Watched(**vars(segment.feed)))
        assembly.worker.run(segment)

    run_in_threads(plan, lambda: identity_job(Flipped(random.random)), work=watch)
    assert set(asked) == {(0, True, False), (1, False, True)}
