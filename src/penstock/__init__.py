"""Penstock: profile, plan, simulate and run any PyTorch model over many devices."""

from penstock.errors import PenstockError
from penstock.job import EarlyStop, Job
from penstock.remedy import Remedy

__version__ = "0.1.0"
__all__ = ["EarlyStop", "Job", "PenstockError", "Remedy", "__version__"]
