"""What PipeDream published (SOSP 2019, Table 1), and what is known of its profiles and clusters."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cluster import Cluster, parse_cluster


@dataclass(frozen=True)
class Hosts:
    devices: int
    """in each host"""
    inside: str
    """bandwidth that Penstock plans with; the paper gives the one between hosts alone"""
    between: str

    def cluster(self, hosts: int) -> Cluster:
        between = f",{hosts}@{self.between}" if hosts > 1 else ""
        return parse_cluster(f"{self.devices}@{self.inside}{between}")


CLUSTERS = {
    "A": Hosts(4, "12GB/s", "1.25GB/s"),  # V100 on PCIe 3.0 x16, which moves about 12 of its 15.75; 10 Gb/s
    "B": Hosts(8, "25GB/s", "3.125GB/s"),  # V100 with NVLink, one link of it each way; 25 Gb/s
    "C": Hosts(1, "5GB/s", "5GB/s"),  # Titan X; 40 Gb/s
}


@dataclass(frozen=True)
class Measured:
    """A profile of PipeDream's, and the minibatch of the runs that it stands for.

    The profiles do not name the samples that were measured; the sizes of their activations tell. The minibatch is that
    of one device, in the files that PipeDream's runs were started from (runtime/*/driver_configs).
    """

    profile: str
    samples: int
    minibatch: int
    tokens: int | None = None
    """of each sentence that was measured"""
    other_tokens: int | None = None
    """of a sentence in the other profile of the kind; the runs' sentences are of many lengths"""

    def scale(self, tokens: int | None = None) -> float:
        """How much more a minibatch of the runs is than the one measured, with sentences of so many tokens."""
        longer = tokens / self.tokens if tokens and self.tokens else 1.0
        return self.minibatch / self.samples * longer


PROFILES = {
    "VGG-16": Measured("vgg16", samples=128, minibatch=64),
    "ResNet-50": Measured("resnet50", samples=128, minibatch=128),
    "AlexNet": Measured("alexnet", samples=256, minibatch=256),
    "GNMT-16": Measured("gnmt_large", samples=128, minibatch=64, tokens=25, other_tokens=48),
    "GNMT-8": Measured("gnmt", samples=32, minibatch=64, tokens=48, other_tokens=25),
}
"""By the model's name in the table; PipeDream's repository has none of the others."""


@dataclass(frozen=True)
class Published:
    """One row: a configuration, and how many times faster than data parallelism an epoch was."""

    model: str
    hosts: int
    cluster: str
    config: str
    """replicas of each stage, such as 15-1, or straight"""
    speedup: float

    @property
    def on(self) -> Cluster:
        return CLUSTERS[self.cluster].cluster(self.hosts)

    @property
    def case(self) -> str:
        return f"{self.model} {self.hosts}x{CLUSTERS[self.cluster].devices} {self.cluster}"


TABLE_1 = (
    Published("VGG-16", 4, "A", "15-1", 5.28),
    Published("VGG-16", 2, "B", "15-1", 2.98),
    Published("ResNet-50", 4, "A", "16", 1.0),
    Published("ResNet-50", 2, "B", "16", 1.0),
    Published("AlexNet", 4, "A", "15-1", 4.92),
    Published("AlexNet", 2, "B", "15-1", 2.04),
    Published("GNMT-16", 1, "A", "straight", 1.46),
    Published("GNMT-16", 4, "A", "straight", 2.34),
    Published("GNMT-16", 2, "B", "straight", 3.14),
    Published("GNMT-8", 1, "A", "straight", 1.5),
    Published("GNMT-8", 3, "A", "straight", 2.95),
    Published("GNMT-8", 2, "B", "16", 1.0),
    Published("AWD-LM", 1, "A", "straight", 4.25),
    Published("S2VT", 4, "C", "2-1-1", 3.01),
)
