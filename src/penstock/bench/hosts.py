"""Hosts on one machine to test networks with: namespaces joined by a switch, over links with a rate.

    host0  eth0 10.0.0.1 --- port0 \\
    host1  eth0 10.0.0.2 --- port1 -- switch
    ..                             /

Nothing of it has a name outside. A namespace lasts while a process is in it: a holder that ends with the pipe from this
process, and workers whom the kernel kills with this process. So hosts, links and workers end with it, whatever ends it,
and no run can meet what another has left. The switch leads nowhere else: addresses and ports are always free, and
nothing leaves the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from penstock.errors import ClusterError, WorkerError

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset")
"""From Debian's iproute2 and util-linux."""
PACKET_BYTES, SLOW_PACKET_BYTES = 2**16, 2**14
"""What the kernel hands a link at a time. A bucket holds at least one, which small messages get through for nothing."""
BURST_S = 0.5e-3
"""A fast link's bucket holds more, so that it need not be woken for every packet."""
QUEUE_BYTES = 2**22
"""Drops nothing, so that the bucket sets the pace and not TCP's view of what was lost."""
PORT = 29500
POLL_S = 0.05
TOLD_LINES = 15


def why_not() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if sys.platform != "linux":
        return "test hosts are network namespaces, which Linux alone has"
    if os.geteuid() != 0:
        return "test hosts need root, to make network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"test hosts need {', '.join(missing)}; install iproute2 and util-linux"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    core: int
    process: int
    """that holds its namespaces"""

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command line that runs ``command`` there."""
        return ["nsenter", f"--target={self.process}", "--net", "--uts", *command]


@dataclass(frozen=True)
class Hosts:
    hosts: tuple[Host, ...]
    switch: Host

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Of every host's link, each way; None lets it go as fast as the machine can."""
        for number, host in enumerate(self.hosts):
            for end, device in ((host, "eth0"), (self.switch, f"port{number}")):
                _run(end.inside(["tc", "qdisc", "del", "dev", device, "root"]), check=False)  # there may be none
                packet = PACKET_BYTES if bytes_per_s is None else SLOW_PACKET_BYTES
                _run(end.inside(["ip", "link", "set", "dev", device, "gso_max_size", str(packet)]))
                if bytes_per_s is not None:
                    burst = max(2 * packet, round(BURST_S * bytes_per_s))
                    bucket = f"tbf rate {round(8 * bytes_per_s)}bit burst {burst} limit {QUEUE_BYTES}"
                    _run(end.inside(["tc", "qdisc", "add", "dev", device, "root", *bucket.split()]))

    def run_workers(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        on: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run ``python ARGUMENTS`` as torchrun would, one worker on every host, or each worker ``on`` a host by
        its number; returns what they said.

        The first one to fail ends the others, and its own last words are raised.
        """
        on = range(len(self.hosts)) if on is None else on
        with ExitStack() as stack:
            said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in on]
            workers = []
            for rank, (number, file) in enumerate(zip(on, said, strict=True)):
                host = self.hosts[number]
                own = {**os.environ, **(environment or {}), **self._environment(rank, on)}
                command = ["setpriv", "--pdeathsig", "KILL", "taskset", "--cpu-list", str(host.core), sys.executable]
                worker = subprocess.Popen(
                    host.inside([*command, *arguments]), env=own, stdout=file, stderr=subprocess.STDOUT
                )
                stack.callback(_end, worker)
                workers.append(worker)
            failed = _first_to_fail(workers, timeout_s)
            texts = []
            for file in said:
                file.seek(0)
                texts.append(file.read())
            if failed is not None:
                words = "\n".join(texts[failed].strip().splitlines()[-TOLD_LINES:])
                raise WorkerError(
                    f"worker {failed} on {self.hosts[on[failed]].name} failed: {words or 'without a word'}"
                )
            return texts

    def _environment(self, rank: int, on: Sequence[int]) -> dict[str, str]:
        beside = [other for other, number in enumerate(on) if number == on[rank]]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(on)),
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": self.hosts[on[0]].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """So many hosts of one core each, as far as there are cores, with links as fast as the machine can."""
    reason = why_not()
    if reason is not None:
        raise ClusterError(reason)
    with ExitStack() as stack:
        switch = stack.enter_context(_held("switch", "", 0))
        _run(switch.inside(["ip", "link", "add", "bridge", "type", "bridge"]))
        _run(switch.inside(["ip", "link", "set", "bridge", "up"]))
        cores = sorted(os.sched_getaffinity(0))
        hosts = []
        for number in range(count):
            host = stack.enter_context(_held(f"host{number}", f"10.0.0.{number + 1}", cores[number % len(cores)]))
            _join(host, switch, f"port{number}")
            hosts.append(host)
        yield Hosts(tuple(hosts), switch)


@contextmanager
def _held(name: str, address: str, core: int) -> Iterator[Host]:
    script = f"hostname {name} && ip link set lo up && echo ready && exec cat"
    command = ["unshare", "--net", "--uts", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "ready":
            raise ClusterError(f"{name} could not be made; see what `{' '.join(command)}` says")
        try:
            yield Host(name, address, core, holder.pid)
        finally:
            _end(holder)


def _join(host: Host, switch: Host, port: str) -> None:
    peer = ["peer", "name", "eth0", "netns", str(host.process)]
    _run(switch.inside(["ip", "link", "add", port, "type", "veth", *peer]))
    _run(switch.inside(["ip", "link", "set", port, "master", "bridge", "up"]))
    _run(host.inside(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"]))
    _run(host.inside(["ip", "link", "set", "eth0", "up"]))


def _first_to_fail(workers: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed or all(code == 0 for code in codes):
            return failed[0] if failed else None
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise WorkerError(f"worker {late} did not end within {timeout_s:g} s, and was stopped")
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _run(command: Sequence[str], *, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
