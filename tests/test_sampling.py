"""Invariant 4: every sample exactly once per epoch, whatever the batch size, the microbatches and the remainder."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import law
from penstock.errors import JobError
from penstock.sampling import Epoch


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    batch_size = draw(st.integers(1, 40))
    return Epoch(
        num_samples=draw(st.integers(1, 300)),
        batch_size=batch_size,
        microbatches=draw(st.integers(1, batch_size)),
        seed=draw(st.integers(-(2**63), 2**63)),
        number=draw(st.integers(0, 1000)),
    )


def all_indices(epoch: Epoch) -> list[int]:
    return [index for m in range(len(epoch.samples)) for index in epoch.indices(m)]


@law
@given(epochs())
def test_every_sample_is_in_exactly_one_microbatch(epoch: Epoch) -> None:
    assert sorted(all_indices(epoch)) == list(range(epoch.num_samples))


@law
@given(epochs())
def test_a_microbatch_has_the_samples_it_says_and_at_least_one(epoch: Epoch) -> None:
    assert [len(epoch.indices(m)) for m in range(len(epoch.samples))] == list(epoch.samples)
    assert min(epoch.samples) >= 1


@law
@given(epochs())
def test_minibatches_are_full_but_for_the_last_and_their_microbatches_differ_by_at_most_one(epoch: Epoch) -> None:
    sizes = iter(epoch.samples)
    minibatches = [list(itertools.islice(sizes, count)) for count in epoch.minibatches]
    assert list(sizes) == []
    assert all(max(each) - min(each) <= 1 for each in minibatches)
    assert all(sum(each) == epoch.batch_size for each in minibatches[:-1])
    assert 1 <= sum(minibatches[-1]) <= epoch.batch_size
    assert all(len(each) == min(epoch.microbatches, sum(each)) for each in minibatches)


@law
@given(st.integers(20, 300), st.integers(0, 2**40), st.integers(0, 50))
def test_epochs_differ_in_order_and_the_same_epoch_does_not(num_samples: int, seed: int, number: int) -> None:
    def order(**changed: int) -> list[int]:
        fields = {
            "num_samples": num_samples,
            "batch_size": num_samples,
            "microbatches": 1,
            "seed": seed,
            "number": number,
        }
        return Epoch(**fields | changed).indices(0)

    assert order() == order()
    assert order() != order(number=number + 1)
    assert order() != order(seed=seed + 1)


@law
@given(epochs(), st.data())
def test_the_order_of_samples_does_not_depend_on_how_they_are_divided(epoch: Epoch, data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, 40))
    other = Epoch(
        num_samples=epoch.num_samples,
        batch_size=batch_size,
        microbatches=data.draw(st.integers(1, batch_size)),
        seed=epoch.seed,
        number=epoch.number,
    )
    assert all_indices(epoch) == all_indices(other)


def test_no_data_is_refused() -> None:
    with pytest.raises(JobError, match="the job's data is empty; give it at least one sample"):
        Epoch(num_samples=0, batch_size=1, microbatches=1, seed=0)


def test_more_microbatches_than_samples_in_a_batch_are_refused() -> None:
    with pytest.raises(JobError, match="5 microbatches from a batch of 4 samples; raise batch_size or plan with fewer"):
        Epoch(num_samples=100, batch_size=4, microbatches=5, seed=0)


@law
@given(epochs(), st.integers(1, 12))
def test_an_epoch_in_parts_is_the_same_minibatches_and_samples_in_the_same_order(
    epoch: Epoch, minibatches: int
) -> None:
    parts = epoch.parts(minibatches)
    assert tuple(itertools.chain.from_iterable(part.minibatches for part in parts)) == epoch.minibatches
    assert list(itertools.chain.from_iterable(map(all_indices, parts))) == all_indices(epoch)
    assert all(1 <= len(part.minibatches) <= minibatches for part in parts)


@law
@given(epochs(), st.data())
def test_an_epoch_resumed_in_the_middle_sees_exactly_the_samples_that_are_left(
    epoch: Epoch, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, len(epoch.minibatches) - 1))
    rest = replace(epoch, first_minibatch=done)
    again = list(itertools.chain.from_iterable(map(all_indices, rest.parts(data.draw(st.integers(1, 12))))))
    seen = sum(epoch.samples[: sum(epoch.minibatches[:done])])
    assert again == all_indices(rest) == all_indices(epoch)[seen:]
