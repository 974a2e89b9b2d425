"""Planning: the best mix of pipeline and data parallelism for a profile and a cluster. Pure; needs no torch."""

from penstock.planner.hints import Hints
from penstock.planner.planner import make_plan

__all__ = ["Hints", "make_plan"]
