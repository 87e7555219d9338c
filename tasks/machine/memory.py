"""How much memory there is, for the doctor and for what is checked before a run. Needs the standard library only."""

import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def memory_bytes() -> tuple[int, int]:
    """Total and available memory; a container's limit counts where it is the lower one.

    Available is what can be had without swapping: file pages in memory are given up for it.
    """
    fields = {name: 1024 * value for name, value in _numbers(_read(Path("/proc/meminfo"))).items()}
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limit = _read(CGROUP / "memory.max").strip()
    if limit.isdecimal() and int(limit) < total:
        used = int(_read(CGROUP / "memory.current").strip() or 0)
        pages = _numbers(_read(CGROUP / "memory.stat"))
        files = pages.get("active_file", 0) + pages.get("inactive_file", 0)
        total = int(limit)
        available = max(0, min(available, total - used + files))
    return total, available


def gib(size_bytes: float) -> str:
    """A size in words."""
    return f"{size_bytes / 2**30:.1f} GiB"


def _numbers(text: str) -> dict[str, int]:
    """The numbers of lines such as `MemTotal:  24611624 kB` and `active_file 4096`, by name."""
    return {name: int(value) for name, value in re.findall(r"^(\w+):? +(\d+)", text, re.MULTILINE)}


def _read(file: Path) -> str:
    """The file's text, empty where the system has no such file."""
    return file.read_text() if file.is_file() else ""
