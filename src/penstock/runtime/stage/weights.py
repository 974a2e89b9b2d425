"""A stage's weights and their versions: a backward uses the weights of its own forward.

Each version is a set of leaf tensors of its own, and a microbatch runs forward and backward on one version's
leaves. The optimizer works on the stage's parameters, which share memory with the newest version. Only when a step
comes while that version is still in flight are the weights copied first, so the version that in-flight
microbatches hold stays as it was. A synchronous schedule, and the last stage of any, never copies.

With a remedy that looks ahead, a stale microbatch runs on leaves that lie further on the way of the version's last
update; microbatches of one version that look equally far share them.

Replacing ``parameter.data`` under a live graph would not do: convolution, layer norm and multiplication save the
parameter object and would compute their backward with the new weights, silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from penstock.errors import WorkerError
from penstock.remedy import Remedy
from penstock.runtime.stage.optimizers import MakeOptimizer, MakeScheduler, Optimizers


@dataclass(eq=False)
class Version:
    number: int
    leaves: dict[str, Tensor]
    in_flight: int = 0
    update: dict[str, Tensor] = field(default_factory=dict)
    """what the step that made it added, where a remedy looks ahead"""
    ahead: dict[int, Version] = field(default_factory=dict)
    """as it is for microbatches so many updates old"""
    trained: dict[str, Tensor] = field(init=False)
    """the leaves that gradients are found for"""
    trained_ids: frozenset[int] = field(init=False)
    """``id`` of each of them"""

    def __post_init__(self) -> None:
        self.trained = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        self.trained_ids = frozenset(map(id, self.trained.values()))


@dataclass(eq=False)
class Weights:
    parameters: Mapping[str, nn.Parameter]
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None = None
    remedy: Remedy | None = None
    on_final: Callable[[str], None] | None = field(init=False, default=None)
    """told of each gradient of a round, in the midst of its last backward, while that is run"""
    staleness: Counter[int] = field(init=False, default_factory=Counter)
    """microbatches by the updates between the version of their forward and the step that applied their gradient"""
    optimizers: Optimizers = field(init=False)
    _rounds: dict[int, dict[str, Tensor]] = field(init=False, default_factory=dict)
    """gradients of those under way, by the version that they will update"""
    _round_weights: dict[int, float] = field(init=False, default_factory=dict)
    """of weighted losses, what the gradients of those rounds are to be divided by"""
    _used: dict[int, list[int]] = field(init=False, default_factory=dict)
    """versions of the microbatches in those gradients"""
    _newest: Version = field(init=False)
    _versions: dict[int, Version] = field(init=False)
    _oldest: int = field(init=False, default=0)
    """the version last asked for"""
    _spare: list[dict[str, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        trained = [(name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad]
        self.optimizers = Optimizers(self.make_optimizer, self.make_scheduler, trained)
        self._newest = self._new_version(0)
        self._versions = {0: self._newest}

    @property
    def version(self) -> int:
        """How many steps the weights have made."""
        return self._newest.number

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of the round that the next step consumes, so far; a parameter that no backward reached is absent."""
        return self._rounds.setdefault(self.version, {})

    def add_weight(self, weight: float, round_number: int | None = None) -> None:
        """Count the weight of a microbatch's loss with its round: that of the next step, if none is named."""
        number = self.version if round_number is None else round_number
        self._round_weights[number] = self._round_weights.get(number, 0.0) + weight

    @property
    def round_weight(self) -> float:
        """Of the microbatches in ``gradients``."""
        return self._round_weights.get(self.version, 0.0)

    @round_weight.setter
    def round_weight(self, weight: float) -> None:
        self._round_weights[self.version] = weight

    def divide_by_weight(self) -> None:
        """Make the mean of the next step's gradients, once, if they are sums; a weight of 0 leaves no gradient."""
        weight = self._round_weights.pop(self.version, None)
        if weight == 0:
            self.discard_gradients()
        elif weight is not None and self.gradients:
            torch._foreach_div_(list(self.gradients.values()), weight)

    def acquire(self, number: int | None = None, staleness: int = 0) -> Version:
        """A version, the newest if none is named, kept as it is until it is released. None older is asked for again.

        A remedy may have looked ahead from it by what ``staleness``, the updates until the gradient is applied, says.
        """
        version = self._newest if number is None else self._versions[number]
        self._oldest = version.number
        if len(self._versions) > 1:
            for each in [each for each in self._versions.values() if each.number < self._oldest]:
                self._forget(each)
        if self._looks_ahead and staleness > 0 and version.update:
            version = self._ahead_of(version, staleness)
        version.in_flight += 1
        return version

    def release(self, version: Version) -> None:
        version.in_flight -= 1
        self._forget(version)

    def finish(self, version: Version, round_number: int | None = None) -> None:
        """Release it after a whole backward into the gradients of a round: that of the next step, if none is named."""
        self._used.setdefault(self.version if round_number is None else round_number, []).append(version.number)
        self.release(version)

    @property
    def _looks_ahead(self) -> bool:
        return self.remedy is not None and self.remedy.look_ahead > 0

    def _ahead_of(self, version: Version, staleness: int) -> Version:
        if self.remedy is not None and staleness not in version.ahead:
            distance = self.remedy.distance(staleness)
            leaves = {
                name: torch.add(leaf.detach(), version.update[name], alpha=distance).requires_grad_()
                if name in version.update
                else leaf
                for name, leaf in version.leaves.items()
            }
            version.ahead[staleness] = Version(version.number, leaves)
        return version.ahead[staleness]

    def _forget(self, version: Version) -> None:
        """Unless somebody holds it or may still ask for it; what looks ahead of one is nobody else's."""
        if version.in_flight or version is self._newest or self._versions.get(version.number) is not version:
            return
        if version.number < self._oldest:
            del self._versions[version.number]
            self._spare.append({name: leaf.detach() for name, leaf in version.trained.items()})

    def backward(
        self, version: Version, compute: Callable[[], None], scale: float, round_number: int | None = None
    ) -> None:
        """Run a backward on a version and add ``scale`` times its gradients to a round's: that of the next step, or
        one that will update a later version."""
        gradients = self.gradients if round_number is None else self._rounds.setdefault(round_number, {})
        adds_in_place = scale == 1.0
        if adds_in_place:  # autograd then accumulates into the round's gradients by itself
            for name, leaf in version.trained.items():
                leaf.grad = gradients.get(name)

        def settle(name: str, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                return
            if adds_in_place:
                gradients[name] = gradient
            elif name in gradients:
                gradients[name].add_(gradient, alpha=scale)
            else:
                gradients[name] = gradient.mul_(scale)

        with self._telling(version, settle):
            compute()
        for name, leaf in version.trained.items():
            settle(name, leaf)

    @contextmanager
    def _telling(self, version: Version, settle: Callable[[str, Tensor], None]) -> Iterator[None]:
        tell = self.on_final
        if tell is None:
            yield
            return
        told = set[str]()

        def reached(name: str, leaf: Tensor) -> None:
            if name in told:
                raise WorkerError(
                    f"the gradient of {name} was found twice in one backward, as with reentrant checkpointing of a "
                    "weight that is used twice; use non-reentrant checkpointing there"
                )
            told.add(name)
            settle(name, leaf)
            tell(name)

        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(reached, name))  # type: ignore[no-untyped-call]
            for name, leaf in version.trained.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def step(self, count: int = 0, *, keep: bool = False, rate: float = 1.0) -> None:
        """Update with the round's gradients, at ``rate`` times the learning rate after ``count`` steps of the
        scheduler; versions in flight keep their values, and so does this one if asked to."""
        self.staleness.update(self.version - number for number in self._used.pop(self.version, ()))
        before = self._trained_values() if self._looks_ahead else {}
        keep = keep or self._newest.in_flight > 0
        if keep:
            self._copy_on_write()
        self.divide_by_weight()
        gradients = self._rounds.pop(self.version, {})
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizers.step(count, rate)
        for parameter in self.parameters.values():
            parameter.grad = None
        if keep:
            self._newest = self._new_version(self._newest.number + 1)
        else:
            del self._versions[self._newest.number]
            self._newest.number += 1
            self._newest.ahead.clear()
        self._newest.update = {n: torch.sub(self.parameters[n].data, old, out=old) for n, old in before.items()}
        self._versions[self._newest.number] = self._newest

    def discard_gradients(self) -> None:
        """Those that the next step would consume; it then changes nothing."""
        self._rounds.pop(self.version, None)

    def _trained_values(self) -> dict[str, Tensor]:
        return {name: p.data.clone() for name, p in self.parameters.items() if p.requires_grad}

    def _new_version(self, number: int) -> Version:
        # `.data` and not `.detach()`: the leaf must not share the parameter's version counter, or autograd would
        # take the optimizer's update for a change of the tensors it has saved
        leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in self.parameters.items()}
        return Version(number, leaves)

    def _copy_on_write(self) -> None:
        """Move the parameters to memory of their own, leaving the old to the version in flight."""
        spare = self._spare.pop() if self._spare else {}
        sources, targets = [], []
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                sources.append(parameter.data)
                targets.append(spare[name] if name in spare else torch.empty_like(parameter.data))
                parameter.data = targets[-1]
        if sources:
            torch._foreach_copy_(targets, sources)
