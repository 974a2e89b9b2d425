"""Finds stages that minimise the slowest stage or link, over all cuts of the layer graph.

A dynamic program from the back: ``best[d][I]`` is the smallest bottleneck of running the layers outside the downset I
on the devices from d on. Working from the back makes a stage's in-flight depth known (it depends on the devices
behind it), and with it the stage's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cost import CostModel, stashes_weights
from penstock.graph import Layer
from penstock.plan import Stage
from penstock.planner.downsets import Bools, Downsets, Floats


@dataclass(frozen=True, kw_only=True)
class StageSearch:
    costs: CostModel
    downsets: Downsets
    asynchronous: bool
    microbatches: int
    straight: bool = False
    """one replica per stage"""
    all_forwards_first: bool = False
    """every stage keeps a whole minibatch in flight"""

    def candidates(self) -> Iterator[tuple[Stage, ...]]:
        """For each number of devices, fewest first, the stages with the smallest bottleneck on that many."""
        for first in reversed(range(self._num_devices)):
            if np.isfinite(self._best[first][0][0]):
                yield self._stages(first)

    @property
    def _num_devices(self) -> int:
        return len(self.costs.cluster.devices)

    @cached_property
    def _best(self) -> list[tuple[Floats, np.ndarray[Any, Any]]]:
        """For each first device: the bottleneck by downset, and the choice (next downset, replicas)."""
        size = len(self.downsets)
        nothing_left = np.full(size, np.inf)
        nothing_left[-1] = 0.0
        table: list[tuple[Floats, np.ndarray[Any, Any]]] = [(np.empty(0), np.empty(0))] * self._num_devices
        table.append((nothing_left, np.zeros((size, 2), dtype=int)))
        for first in reversed(range(self._num_devices)):
            best, choice = np.full(size, np.inf), np.zeros((size, 2), dtype=int)
            for replicas in range(1, 2 if self.straight else self._num_devices - first + 1):
                behind = np.maximum(table[first + replicas][0], self._link_s(first + replicas, replicas))
                slowest = np.maximum(self._stage_s(first, replicas), behind)
                ends = np.argmin(slowest, axis=1)
                found = slowest[np.arange(size), ends]
                better = found < best
                best[better] = found[better]
                choice[better, 0], choice[better, 1] = ends[better], replicas
            table[first] = (best, choice)
        return table

    def _stages(self, first: int) -> tuple[Stage, ...]:
        """The stages behind ``best[first][0]``, moved to the first devices where all devices are alike."""
        shift = first if len(set(self.costs.cluster.devices)) == 1 else 0
        stages, smaller = [], 0
        while smaller < len(self.downsets) - 1:
            larger, replicas = (int(x) for x in self._best[first][1][smaller])
            stages.append(
                Stage(
                    layers=self.downsets.between(smaller, larger),
                    devices=tuple(range(first - shift, first - shift + replicas)),
                    in_flight=self._depth(first, replicas),
                )
            )
            smaller, first = larger, first + replicas
        return tuple(stages)

    def _depth(self, first: int, replicas: int) -> int:
        own = -(-self.microbatches // replicas)
        if self.all_forwards_first:
            return own
        depth = -(-(self._num_devices - first) // replicas)
        return depth if self.asynchronous else min(depth, own)

    def _stage_s(self, first: int, replicas: int) -> Floats:
        """[smaller, larger]: seconds per microbatch of a stage on ``replicas`` devices; inf where it is not allowed."""
        devices = list(range(first, first + replicas))
        depth = self._depth(first, replicas)
        stashed = stashes_weights(self.asynchronous, depth)
        kinds = tuple(
            sorted({(self.costs.cluster.devices[d].kind, self.costs.cluster.devices[d].speed) for d in devices})
        )
        # an all-reduce is linear in its bytes beyond a latency, so two calls give it for every stage at once
        latency_s = self.costs.allreduce_s(1e-9, devices)
        per_byte_s = (self.costs.allreduce_s(1e9, devices) - latency_s) / 1e9
        key = (replicas, stashed, kinds, latency_s, per_byte_s)
        if key not in self._seconds:
            self._seconds[key] = self._unlimited_stage_s(devices, stashed, latency_s, per_byte_s)
        seconds = self._seconds[key]
        limits = [self.costs.cluster.devices[device].memory_bytes for device in devices]
        limit = min((limit for limit in limits if limit is not None), default=None)
        return seconds if limit is None else np.where(self._memory_bytes(depth) <= limit, seconds, np.inf)

    def _unlimited_stage_s(self, devices: list[int], stashed: bool, latency_s: float, per_byte_s: float) -> Floats:
        """Were there memory enough. A mixed stage goes at the pace of its slowest device."""
        compute_s = np.max([self._between(self._compute_s(device)) for device in devices], axis=0)
        update_s = np.max([self._between(self._update_s(device, stashed)) for device in devices], axis=0)
        weights = self._parameter_bytes
        round_s = update_s + per_byte_s * weights + latency_s * (weights > 0)
        per_step = len(devices) if self.asynchronous else self.microbatches
        return np.where(self._allowed, compute_s / len(devices) + round_s / per_step, np.inf)

    @cached_property
    def _seconds(self) -> dict[Any, Floats]:
        return {}

    @cached_property
    def _allowed(self) -> Bools:
        allowed: Bools = self.downsets.contained & ~self._forbidden[None, :]
        return allowed

    def _memory_bytes(self, depth: int) -> Floats:
        versions = depth if self.asynchronous else 1
        saved = self.costs.scale * self._saved_bytes
        total: Floats = self._parameter_bytes * (versions + 1) + self._state_bytes + depth * saved
        return total

    def _link_s(self, device: int, replicas: int) -> Floats:
        """[larger]: seconds per microbatch on the links out of a stage that ends there, into ``device``."""
        if device >= self._num_devices:
            return np.zeros(len(self.downsets))
        link = self.costs.cluster.link(device - 1, device)
        return self.costs.scale * self.downsets.crossing_bytes / link.bytes_per_s / replicas

    def _compute_s(self, device: int) -> dict[int, float]:
        return {
            layer: self.costs.forward_s([layer], device) + self.costs.backward_s([layer], device)
            for layer in self.costs.profile.graph.order
        }

    def _update_s(self, device: int, stashed: bool) -> dict[int, float]:
        order = self.costs.profile.graph.order
        return {layer: self.costs.update_s([layer], device, stashed=stashed) for layer in order}

    @cached_property
    def _parameter_bytes(self) -> Floats:
        graph = self.costs.profile.graph
        return self._between({n: float(sum(p.num_bytes for p in graph.parameters_of([n]))) for n in graph.order})

    @cached_property
    def _state_bytes(self) -> Floats:
        graph = self.costs.profile.graph
        return self._between({n: float(sum(p.state_bytes for p in graph.parameters_of([n]))) for n in graph.order})

    @cached_property
    def _saved_bytes(self) -> Floats:
        graph = self.costs.profile.graph
        return self._between({n: float(graph.by_id[n].saved_bytes) for n in graph.order})

    @cached_property
    def _forbidden(self) -> Bools:
        """[downset]: a cut there would part layers that share a weight, under an asynchronous schedule."""
        if not self.asynchronous:
            return np.zeros(len(self.downsets), dtype=bool)
        return self.downsets.parts_any_of(self._tied_layers)

    @cached_property
    def _tied_layers(self) -> list[list[int]]:
        users: dict[str, list[int]] = {}
        for layer in self.costs.profile.graph.layers:
            for name in layer.parameters:
                users.setdefault(name, []).append(layer.id)
        return [layers for layers in users.values() if len(layers) > 1]

    def _between(self, per_layer: dict[int, float]) -> Floats:
        """[smaller, larger]: the sum over the layers in the second and not in the first."""

        def of_layer(layer: Layer) -> float:
            return per_layer[layer.id]

        sums = self.downsets.sums(of_layer)
        difference: Floats = sums[None, :] - sums[:, None]
        return difference
