"""The files of the research systems that Penstock unites, read into its values and written from them.

Text in, value out, and back; only ``read_profile`` and ``read_cluster`` open files. docs/formats.md describes each.
"""

from penstock.formats.dnn_partitioning import parse_placement
from penstock.formats.dynpipe import Partition, parse_layer_costs, parse_partition, partition_of, partition_text
from penstock.formats.pipedream_graph import graph_text, parse_graph
from penstock.formats.pipedream_stages import (
    StageMap,
    data_parallel_map,
    hybrid_map,
    model_parallel_map,
    parse_stage_map,
    stage_map_text,
)
from penstock.formats.plan_text import PLAN_FORMATS, plan_text
from penstock.formats.recognise import read_cluster, read_profile
from penstock.formats.sparsepipe import Server, ServerDevices, cluster_of_servers, merge_kinds, parse_servers

__all__ = [
    "PLAN_FORMATS",
    "Partition",
    "Server",
    "ServerDevices",
    "StageMap",
    "cluster_of_servers",
    "data_parallel_map",
    "graph_text",
    "hybrid_map",
    "merge_kinds",
    "model_parallel_map",
    "parse_graph",
    "parse_layer_costs",
    "parse_partition",
    "parse_placement",
    "parse_servers",
    "parse_stage_map",
    "partition_of",
    "partition_text",
    "plan_text",
    "read_cluster",
    "read_profile",
    "stage_map_text",
]
