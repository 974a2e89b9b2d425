"""Sync policies of a replicated stage."""

from penstock.sync.policy import AllReduce, SyncPolicy, sync_policy

__all__ = ["AllReduce", "SyncPolicy", "sync_policy"]
