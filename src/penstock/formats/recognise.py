"""Reads a profile or a cluster from a file of any known format, recognised by its content rather than its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock import codec, units
from penstock.cluster import Cluster, parse_cluster
from penstock.errors import FormatError, PenstockError
from penstock.formats.dnn_partitioning import parse_placement
from penstock.formats.pipedream_graph import SEPARATOR, parse_graph
from penstock.formats.reading import numbered_lines
from penstock.formats.sparsepipe import cluster_of_servers, merge_kinds, parse_servers, profile_paths
from penstock.profile import Profile

_TRIED = (
    f"a Penstock profile (JSON with format {Profile.FORMAT!r}), a PipeDream graph.txt (node -- description -- times), "
    "a dnn-partitioning graph (JSON with nodes and edges), a SparsePipe server file (a line Server0, then devices)"
)


def read_profile(path: Path) -> Profile:
    """The profile in a file of any format that Penstock can import."""
    text, source = codec.read_text(path), str(path)
    _, first = numbered_lines(text, source)[0]
    if first.lstrip().startswith("{"):
        return _from_json(codec.parse_json(text, source), text, path)
    if SEPARATOR in first:
        return parse_graph(text, source=source, model=_model_name(path))[0]
    if first.startswith("Server"):
        return _from_servers(text, path)
    raise FormatError(f"{path}: no profile that Penstock knows; tried {_TRIED}")


def read_cluster(text: str) -> Cluster:
    """A cluster as ``parse_cluster`` reads it, or the devices in a file of another system.

    ``servers.txt@12GB/s,1GB/s`` is a SparsePipe server file with its bandwidths, inside a server and between servers.
    ``placement.json`` is a dnn-partitioning file, which has its own.
    """
    file, _, rates = text.rpartition("@")
    if file and not file.isdecimal() and Path(file).is_file():
        servers = parse_servers(codec.read_text(Path(file)), file)
        try:
            return cluster_of_servers(servers, [units.parse_bytes_per_s(rate) for rate in rates.split(",")], file)
        except FormatError as error:
            raise FormatError(f"cluster {text!r}: {error}") from None
    path = Path(text)
    if not path.is_file() or path.suffix == ".toml":
        return parse_cluster(text)
    content = codec.read_text(path)
    if content.startswith("Server"):
        raise FormatError(f"{path}: a server file has no bandwidths; give them too, as in {path}@12GB/s,1.25GB/s")
    if not content.lstrip().startswith("{"):
        return parse_cluster(text)
    if "nodes" not in codec.parse_json(content, text):
        raise FormatError(f"{path}: JSON without devices; a cluster is a TOML file or a dnn-partitioning graph")
    return parse_placement(content, source=text, model=_model_name(path))[1]


def _from_json(data: Any, text: str, path: Path) -> Profile:
    if "format" in data:
        return codec.decode_from(str(path), Profile, data)
    if "nodes" in data and "edges" in data:
        return parse_placement(text, source=str(path), model=_model_name(path))[0]
    raise FormatError(f"{path}: JSON, but no profile that Penstock knows; tried {_TRIED}")


def _from_servers(text: str, path: Path) -> Profile:
    profiles = {}
    for kind, profile_path in profile_paths(parse_servers(text, str(path))).items():
        found, graph = _find(path, profile_path)
        profiles[kind] = parse_graph(graph, source=str(found), model=_model_name(path), kind=kind)[0]
    try:
        return merge_kinds(profiles)
    except PenstockError as error:
        raise type(error)(f"{path}: {error}") from None


def _find(server_file: Path, profile_path: str) -> tuple[Path, str]:
    """A profile next to the server file or in a directory above it, which the paths in SparsePipe's files start
    from."""
    problems = []
    for directory in (server_file.parent, server_file.parent / ".."):
        try:
            return directory / profile_path, codec.read_text(directory / profile_path)
        except FormatError as error:
            problems.append(str(error))
    raise FormatError(
        f"{server_file}: {'; '.join(dict.fromkeys(problems))}; paths start at the server file's directory"
    )


def _model_name(path: Path) -> str:
    """The file's name; for a graph.txt, the name of its directory."""
    return path.stem if path.stem != "graph" else path.absolute().parent.name or path.stem
