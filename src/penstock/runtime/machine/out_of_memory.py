"""How often the kernel has killed a process because memory ran out, as far as this process can see."""

from __future__ import annotations

from pathlib import Path


def kills_so_far(root: Path = Path("/")) -> int:
    """Of this process's control group where that tells, otherwise of the whole machine; 0 where nobody tells."""
    counts = (_count(path) for path in [*_group_files(root), root / "proc/vmstat"])
    return next((count for count in counts if count is not None), 0)


def _group_files(root: Path) -> list[Path]:
    """Those of the second version of control groups, and of the first. In a container a group's path may be that of
    the host, and its files are at the top."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        found += [top / path.lstrip("/") / name, top / name]
    return found


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [words[1] for words in map(str.split, lines) if len(words) == 2 and words[0] == "oom_kill"]
    return int(found[0]) if found and found[0].isdecimal() else None
