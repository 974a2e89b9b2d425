"""Cuts a topological order of the layers into stages that minimise the slowest stage or link.

A dynamic program over suffixes: ``best[d][i]`` is the smallest bottleneck of running the layers from position i on,
on the devices from d on. Working from the back makes a stage's in-flight depth known (it depends on the
devices behind it), and with it the stage's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cost import CostModel, stashes_weights
from penstock.plan import Stage

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class ContiguousCuts:
    costs: CostModel
    asynchronous: bool
    microbatches: int
    straight: bool = False
    """one replica per stage"""
    all_forwards_first: bool = False
    """every stage keeps a whole minibatch in flight"""

    def candidates(self) -> Iterator[tuple[Stage, ...]]:
        """For each number of devices, fewest first, the stages with the smallest bottleneck on that many."""
        num_devices = len(self.costs.cluster.devices)
        for first in reversed(range(num_devices)):
            if np.isfinite(self._best[first][0][0]):
                yield self._stages(first)

    @cached_property
    def _best(self) -> list[tuple[Array, np.ndarray[Any, Any]]]:
        """For each first device: the bottleneck by first layer, and the choice (end of the first stage, replicas)."""
        n, num_devices = len(self._order), len(self.costs.cluster.devices)
        nothing_left = np.full(n + 1, np.inf)
        nothing_left[n] = 0.0
        table: list[tuple[Array, np.ndarray[Any, Any]]] = [(np.empty(0), np.empty(0))] * num_devices
        table.append((nothing_left, np.zeros((n + 1, 2), dtype=int)))
        for first in reversed(range(num_devices)):
            best, choice = np.full(n + 1, np.inf), np.zeros((n + 1, 2), dtype=int)
            for replicas in range(1, 2 if self.straight else num_devices - first + 1):
                behind = table[first + replicas][0]
                outgoing = (
                    self._link_s(first + replicas, replicas) if first + replicas < num_devices else np.zeros(n + 1)
                )
                slowest = np.maximum(self._stage_s(first, replicas), np.maximum(behind, outgoing)[None, :])
                ends = np.argmin(slowest, axis=1)
                found = slowest[np.arange(n + 1), ends]
                better = found < best
                best[better] = found[better]
                choice[better, 0], choice[better, 1] = ends[better], replicas
            table[first] = (best, choice)
        return table

    def _stages(self, first: int) -> tuple[Stage, ...]:
        """The stages behind ``best[first][0]``, moved to the first devices where all devices are alike."""
        devices = self.costs.cluster.devices
        shift = first if len(set(devices)) == 1 else 0
        stages, position = [], 0
        while position < len(self._order):
            end, replicas = (int(x) for x in self._best[first][1][position])
            stages.append(
                Stage(
                    layers=self._order[position:end],
                    devices=tuple(range(first - shift, first - shift + replicas)),
                    in_flight=self._depth(len(devices) - first, replicas),
                )
            )
            position, first = end, first + replicas
        return tuple(stages)

    def _depth(self, devices_from_here: int, replicas: int) -> int:
        depth, minibatch = -(-devices_from_here // replicas), -(-self.microbatches // replicas)
        if self.all_forwards_first:
            return minibatch
        return depth if self.asynchronous else min(depth, minibatch)

    def _stage_s(self, first: int, replicas: int) -> Array:
        """[start, end]: seconds per microbatch of a stage on ``replicas`` devices from ``first``; inf: not allowed."""
        devices = range(first, first + replicas)
        compute_s = np.max([self._between(self._compute_s(device)) for device in devices], axis=0)
        depth = self._depth(len(self.costs.cluster.devices) - first, replicas)
        stashed = stashes_weights(self.asynchronous, depth)
        update_s = np.max([self._between(self._update_s(device, stashed)) for device in devices], axis=0)
        # all-reduce is linear in its bytes beyond a latency, so two calls give it for every stage at once
        latency_s = self.costs.allreduce_s(1e-9, list(devices))
        per_byte_s = (self.costs.allreduce_s(1e9, list(devices)) - latency_s) / 1e9
        weights = self._between(self._parameter_bytes)
        round_s = update_s + per_byte_s * weights + latency_s * (weights > 0)
        per_step = replicas if self.asynchronous else self.microbatches
        seconds = compute_s / replicas + round_s / per_step
        versions = depth if self.asynchronous else 1
        memory = (
            weights * (versions + 1)
            + self._between(self._state_bytes)
            + depth * self.costs.scale * self._between(self._saved_bytes)
        )
        limits = [self.costs.cluster.devices[device].memory_bytes for device in devices]
        limit = min((limit for limit in limits if limit is not None), default=np.inf)
        empty = np.tri(len(seconds), dtype=bool)
        allowed = ~empty & (memory <= limit) & ~self._forbidden[None, :]
        return np.where(allowed, seconds, np.inf)

    def _link_s(self, device: int, replicas: int) -> Array:
        """[end]: seconds per microbatch on the links out of a stage that ends there, into ``device``."""
        link = self.costs.cluster.link(device - 1, device)
        return self.costs.scale * self._cut_bytes / link.bytes_per_s / replicas

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return self.costs.profile.graph.order

    @cached_property
    def _row(self) -> dict[int, int]:
        return {layer.id: row for row, layer in enumerate(self.costs.profile.graph.layers)}

    def _compute_s(self, device: int) -> Array:
        seconds, speed = self.costs.layer_seconds(device), self.costs.cluster.devices[device].speed
        rows = [seconds[self._row[layer]] for layer in self._order]
        per_layer = [row.forward_s + row.backward_input_s + row.backward_weight_s for row in rows]
        return np.array(per_layer) * self.costs.scale / speed

    def _update_s(self, device: int, stashed: bool) -> Array:
        return np.array([self.costs.update_s([layer], device, stashed=stashed) for layer in self._order])

    @cached_property
    def _parameter_bytes(self) -> Array:
        graph = self.costs.profile.graph
        return np.array([float(sum(p.num_bytes for p in graph.parameters_of([layer]))) for layer in self._order])

    @cached_property
    def _state_bytes(self) -> Array:
        graph = self.costs.profile.graph
        return np.array([float(sum(p.state_bytes for p in graph.parameters_of([layer]))) for layer in self._order])

    @cached_property
    def _saved_bytes(self) -> Array:
        return np.array([float(self.costs.profile.graph.by_id[layer].saved_bytes) for layer in self._order])

    @cached_property
    def _cut_bytes(self) -> Array:
        """[i]: bytes of the values made before position i and read from it on."""
        position = {layer: i for i, layer in enumerate(self._order)}
        steps = np.zeros(len(self._order) + 2)
        for value in self.costs.profile.graph.values:
            if value.consumers:
                steps[position[value.producer] + 1] += value.num_bytes
                steps[max(position[consumer] for consumer in value.consumers) + 1] -= value.num_bytes
        return np.cumsum(steps)[:-1]

    @cached_property
    def _forbidden(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[i]: no stage may end there: it would part layers that share a weight, under an asynchronous schedule."""
        forbidden = np.zeros(len(self._order) + 1, dtype=bool)
        if self.asynchronous:
            users: dict[str, list[int]] = {}
            for position, layer in enumerate(self._order):
                for name in self.costs.profile.graph.by_id[layer].parameters:
                    users.setdefault(name, []).append(position)
            for positions in users.values():
                forbidden[positions[0] + 1 : positions[-1] + 1] = True
        return forbidden

    @staticmethod
    def _between(per_layer: Array) -> Array:
        """[start, end]: the sum over the layers from start up to end."""
        prefix = np.concatenate(([0.0], np.cumsum(per_layer)))
        difference: Array = prefix[None, :] - prefix[:, None]
        return difference
