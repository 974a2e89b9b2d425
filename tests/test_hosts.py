"""Hosts made on this machine are hosts to the runtime, and nothing of them outlasts whoever made them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.bench.hosts import Hosts, make_hosts, why_not
from penstock.errors import WorkerError

REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.processes]

TALK = """
import json
import torch
from penstock.runtime.links.choice import choose_links
from penstock.runtime.machine.machine import host_id
from penstock.runtime.process.joining import join_workers
import os, socket

with join_workers(1, 30.0) as (peers, device):
    links = choose_links(peers, [(0, 1)], [(0, 1)], device=device)
    tensor = torch.ones(1000)
    links.transport.all_reduce(tensor, (0, 1), 30.0)
said = [socket.gethostname(), host_id(), list(links.chosen.values()), tensor.sum().item(), len(os.sched_getaffinity(0))]
print(json.dumps(said))
"""
HOLD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background of a shell do not have
from penstock.bench.hosts import make_hosts
with make_hosts(2) as hosts:
    sys.stdout.write(" ".join(str(host.process) for host in (*hosts.hosts, hosts.switch)) + "\\n")
    sys.stdout.flush()
    hosts.run_workers(["-c", "import time; time.sleep(600)", "a worker that waits"], timeout_s=600)
"""


def links_outside() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def inside(hosts: Hosts, number: int, *command: str) -> str:
    host = hosts.hosts[number]
    return subprocess.run(host.inside(command), capture_output=True, text=True, check=True).stdout


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def workers_of(holders: list[int]) -> list[int]:
    """Every process in the namespaces that these hold."""
    namespaces = {Path(f"/proc/{holder}/ns/net").readlink() for holder in holders}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if Path(path / "ns" / "net").readlink() in namespaces:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def test_workers_on_two_hosts_talk_over_the_network_and_never_through_shared_memory() -> None:
    before = links_outside()
    with make_hosts(2) as hosts:
        said = hosts.run_workers(["-c", TALK], timeout_s=60)
        assert links_outside() == before
    (name0, id0, chosen, total, cores), (name1, id1, *_) = (json.loads(text.splitlines()[-1]) for text in said)
    assert (name0, name1) == ("host0", "host1")
    assert id0 != id1
    assert (chosen, total, cores) == (["gloo"], 2000.0, 1)


def test_a_rate_is_set_changed_and_taken_away_at_both_ends() -> None:
    with make_hosts(3) as hosts:
        hosts.set_rate(25e6)
        assert all("rate 200Mbit" in inside(hosts, number, "tc", "qdisc", "show", "dev", "eth0") for number in range(3))
        hosts.set_rate(125e6)
        assert "rate 1Gbit" in inside(hosts, 2, "tc", "qdisc", "show", "dev", "eth0")
        ports = subprocess.run(hosts.switch.inside(["tc", "qdisc", "show"]), capture_output=True, text=True, check=True)
        assert ports.stdout.count("rate 1Gbit") == 3
        hosts.set_rate(None)
        assert "tbf" not in inside(hosts, 0, "tc", "qdisc", "show", "dev", "eth0")


def test_the_first_worker_to_fail_is_told_and_the_others_are_ended() -> None:
    script = "import os, sys, time; sys.exit('no such luck') if os.environ['RANK'] == '1' else time.sleep(600)"
    with make_hosts(2) as hosts:
        with pytest.raises(WorkerError, match="worker 1 on host1 failed: no such luck"):
            hosts.run_workers(["-c", script], timeout_s=60)
        holders = [host.process for host in hosts.hosts]
        assert sorted(workers_of(holders)) == sorted(holders)


def test_a_worker_that_never_ends_is_ended() -> None:
    with make_hosts(1) as hosts, pytest.raises(WorkerError, match=r"worker 0 did not end within 0\.2 s"):
        hosts.run_workers(["-c", "import time; time.sleep(600)"], timeout_s=0.2)


def test_hosts_end_with_an_exception() -> None:
    holders: list[int] = []

    def fail() -> None:
        with make_hosts(2) as hosts:
            holders.extend(host.process for host in (*hosts.hosts, hosts.switch))
            assert all(map(is_alive, holders))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(holders) == 3
    assert not any(map(is_alive, holders))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_hosts_and_workers_end_with_whoever_made_them(number: signal.Signals) -> None:
    before = links_outside()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        holders = [int(word) for word in maker.stdout.readline().split()]
        deadline = time.monotonic() + 60
        while len(everybody := workers_of(holders)) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(everybody) == 5, "two hosts, their workers and the switch"
        maker.send_signal(number)
        maker.wait()
    while any(map(is_alive, everybody)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, everybody))
    assert links_outside() == before
