"""Where the workers of a run are, beside where the plan puts them.

A plan counts on fast links inside a host, and on the speed of a kind of device. Workers that it puts on one host must
be on one host, and on devices of the planned kind. More workers on one host than planned are only worth a warning: a
plan for several hosts may be tried on one.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock.cluster import ANY_KIND
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.runtime.capture.capture import FRONT_ENDS
from penstock.runtime.machine.machine import device_kind, host_id
from penstock.runtime.peers.peers import Peers

log = logging.getLogger(__name__)


class Whereabouts(NamedTuple):
    """What a worker says of itself."""

    host: str
    """its name, for people"""
    host_id: str
    """the same for workers that talk without a network, and for no others"""
    kind: str

    @classmethod
    def here(cls, device: torch.device) -> Whereabouts:
        return cls(socket.gethostname(), host_id(), device_kind(device))


def check_placement(plan: Plan, device: torch.device, peers: Peers) -> None:
    """Called by all workers: raise on each if some are not where the plan puts them."""
    found = [Whereabouts(*part) for part in peers.gather("tell where it is", Whereabouts.here(device))]
    warning = compare_placement(plan, found)
    if warning and peers.rank == 0:
        log.warning(warning)


def compare_placement(plan: Plan, found: Sequence[Whereabouts]) -> str:
    """Raise if workers are not where the plan puts them; returns what is worth a warning, or nothing."""
    elsewhere, other_kind = _elsewhere(plan, found), _other_kind(plan, found)
    if elsewhere or other_kind:
        wrong = sorted({*elsewhere, *other_kind})
        who = "worker" if len(wrong) == 1 else "workers"
        remedies = [_start_on_hosts(plan)] if elsewhere else []
        remedies += ["start the workers on devices of the planned kind"] if other_kind else []
        raise PlanError(
            f"{who} {', '.join(map(str, wrong))} of {len(found)}: not where the plan has them; {', '.join(remedies)}, "
            f"or profile and plan again for what there is\n{_table(plan, found, wrong)}"
        )
    return _crowded(plan, found)


def _planned_host(plan: Plan, worker: int) -> int | None:
    """None where the cluster does not say."""
    return plan.cluster.host(plan.devices[worker]) if plan.cluster.has_hosts else None


def _planned_kind(plan: Plan, worker: int) -> str:
    return plan.cluster.devices[plan.devices[worker]].kind


def _elsewhere(plan: Plan, found: Sequence[Whereabouts]) -> list[int]:
    """Workers that are on another host than the first one that the plan puts on their host."""
    first: dict[int, str] = {}
    wrong = []
    for worker, where in enumerate(found):
        host = _planned_host(plan, worker)
        if host is not None and first.setdefault(host, where.host_id) != where.host_id:
            wrong.append(worker)
    return wrong


def _other_kind(plan: Plan, found: Sequence[Whereabouts]) -> list[int]:
    """Workers on a device of another kind. Names of kinds in profiles from other systems are not torch's."""
    if plan.profile.front_end not in FRONT_ENDS:
        return []
    return [w for w, where in enumerate(found) if _planned_kind(plan, w) not in (ANY_KIND, where.kind)]


def _start_on_hosts(plan: Plan) -> str:
    hosts = [_planned_host(plan, worker) for worker in range(len(plan.devices))]
    counts = [len(list(workers)) for _, workers in itertools.groupby(hosts)]
    each = str(counts[0]) if len(set(counts)) == 1 else f"{', '.join(map(str, counts))} in the order of the node ranks"
    return f"start them with --nnodes {len(counts)} and --nproc-per-node {each}"


def _crowded(plan: Plan, found: Sequence[Whereabouts]) -> str:
    planned: dict[str, set[int | None]] = {}
    for worker, where in enumerate(found):
        planned.setdefault(where.host_id, set()).add(_planned_host(plan, worker))
    names = {where.host_id: where.host for where in found}
    crowded = [f"{len(hosts)} hosts run on {names[host]}" for host, hosts in planned.items() if len(hosts) > 1]
    if not crowded:
        return ""
    return f"workers that the plan puts on {'; on '.join(crowded)}: links and cores are not as planned"


def _table(plan: Plan, found: Sequence[Whereabouts], wrong: Sequence[int]) -> str:
    """The workers of every planned host that has a wrong one."""
    names = _names(found)
    hosts = {_planned_host(plan, worker) for worker in wrong}
    rows = [("worker", "planned", "found", "")]
    for worker, where in enumerate(found):
        host = _planned_host(plan, worker)
        if host in hosts:
            planned = f"{'any host' if host is None else f'host {host}'}, {_planned_kind(plan, worker)}"
            mark = "<- differs" if worker in wrong else ""
            rows.append((str(worker), planned, f"{names[where.host_id]}, {where.kind}", mark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _names(found: Sequence[Whereabouts]) -> dict[str, str]:
    """By identity; hosts of one name are told apart by a number."""
    names: dict[str, str] = {}
    for where in found:
        if where.host_id not in names:
            same = sum(name.partition(" #")[0] == where.host for name in names.values())
            names[where.host_id] = f"{where.host} #{same + 1}" if same else where.host
    return names
