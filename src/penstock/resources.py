"""The cores and memory of a machine, the resources that a model needs, and the machine properties that determine speed.

Only cores that this process may use are counted: the minimum of the host's cores, the CPU affinity and the cgroup quota (v1 and v2).
``os.cpu_count`` and similar functions return the host's cores even inside a container.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from penstock.errors import InvalidConfig


class Resources(msgspec.Struct, frozen=True):
    """The resources that a model needs. Estimates are upper bounds."""

    memory_bytes: int
    cores: int = 1


class MachineFacts(msgspec.Struct, frozen=True):
    """The properties of a machine that determine speed, stored in every bundle with the measurements."""

    cpu: str
    architecture: str
    isa: tuple[str, ...]
    """Instruction sets that affect compute kernels, sorted, by Linux's flag names (``avx2``, ``avx512_vnni``, ``asimddp`` …)."""
    cores: int
    memory_bytes: int
    numa_nodes: int
    system: str
    python: str

    @property
    def has_integer_dot_product(self) -> bool:
        """True if the CPU can accumulate INT8 products in 32 bits (VNNI, AMX, dotprod), so that sums do not saturate."""
        return not _DOT_PRODUCT.isdisjoint(self.isa)

    def lacks(self, requires: Iterable[str]) -> list[str]:
        """The entries of ``requires`` that this machine lacks, sorted. An entry is the name of an instruction set or
        ``INTEGER_DOT_PRODUCT``."""
        return sorted(
            name
            for name in set(requires)
            if not (self.has_integer_dot_product if name == INTEGER_DOT_PRODUCT else name in self.isa)
        )


INTEGER_DOT_PRODUCT = "integer_dot_product"
"""An entry of a variant's ``requires``. Any instruction set that accumulates INT8 products in 32 bits satisfies it."""

CPU_WITHOUT = "PENSTOCK_CPU_WITHOUT"
"""Environment variable: instruction sets to treat as absent, separated by commas. ``integer_dot_product`` stands for VNNI, AMX and
dotprod. Engines still use these instruction sets."""

_DOT_PRODUCT = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}
_RELEVANT_ISA = _DOT_PRODUCT | {
    "sse4_1",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "amx_bf16",
    "avx512_fp16",
    "bf16",
    "sve",
}


def machine_facts(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> MachineFacts:
    """Read the properties of this machine. Tests may pass other folders as ``proc`` and ``sys``.

    Raises InvalidConfig if ``PENSTOCK_CPU_WITHOUT`` names an unknown instruction set.
    """
    cpuinfo = _read(proc / "cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    nodes = list((sys / "devices/system/node").glob("node[0-9]*"))
    return MachineFacts(
        cpu=model[1].strip() if model else platform.processor() or "unknown",
        architecture=platform.machine(),
        isa=tuple(sorted(_RELEVANT_ISA.intersection(flags[1].split()) - _ignored())) if flags else (),
        cores=usable_cores(proc, sys),
        memory_bytes=usable_memory(proc, sys),
        numa_nodes=max(1, len(nodes)),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _ignored() -> set[str]:
    names = set(re.findall(r"[^,\s]+", os.environ.get(CPU_WITHOUT, "")))
    if unknown := sorted(names - _RELEVANT_ISA - {INTEGER_DOT_PRODUCT}):
        raise InvalidConfig(
            f"{CPU_WITHOUT} names unknown instruction sets: {', '.join(unknown)}",
            f"use some of: {', '.join(sorted({*_RELEVANT_ISA, INTEGER_DOT_PRODUCT}))}",
        )
    return names | (_DOT_PRODUCT if INTEGER_DOT_PRODUCT in names else set())


def usable_cores(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """The number of cores that this process may use, at least 1. A quota of 1.5 cores counts as 2."""
    cores = len(core_ids())
    quota = cpu_quota(proc, sys)
    return max(1, min(cores, math.ceil(quota))) if quota else cores


class CorePlan(msgspec.Struct, frozen=True):
    """The threads and the cores of a model's instances."""

    threads: int
    """Number of threads per instance, for parallel work within an operator."""
    cores: tuple[tuple[int, ...], ...]
    """For each instance, the ids of its cores."""


def plan_cores(instances: int, threads: int, cores: Sequence[int], quota: float | None = None) -> CorePlan:
    """Distribute ``cores`` among ``instances`` (>= 1). ``quota`` is the CPU quota, in cores.

    Each instance gets a block of neighbouring ids, since such cores usually share caches and memory. It gets ``threads`` threads, but
    no more than its share of the usable cores; if ``threads`` is 0, it gets exactly its share. There are more threads than usable
    cores only if there are more instances than cores. The event loop has no core of its own: it needs little time, and the engine's
    threads do not spin.
    """
    usable = max(1, min(len(cores), math.ceil(quota))) if quota else len(cores)
    fitting = max(1, usable // instances)
    width = max(1, len(cores) // instances)
    ordered = sorted(cores)
    starts = [number * width % len(ordered) for number in range(instances)]
    return CorePlan(min(threads or fitting, fitting), tuple(tuple(ordered[start : start + width]) for start in starts))


def core_ids() -> list[int]:
    """The ids of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> float | None:
    """The smallest CPU quota of this process's cgroup and its ancestors, in cores; None without a quota."""
    quotas: list[float] = []
    for folder in _cgroup_folders("cpu", proc, sys):
        limit, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not period:
            limit, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def usable_memory(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Bytes of memory that this process may use: the host's memory, or a smaller cgroup limit; 0 if unknown."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(proc / "meminfo"), re.MULTILINE)
    limits = [int(total[1]) * 1024] if total else []
    for folder in _cgroup_folders("memory", proc, sys):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name).strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=0)


def allow_open_files(count: int) -> int:
    """Raise the limit on open files of this process and its children to ``count``, if permitted. Returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else soft


def _cgroup_folders(controller: str, proc: Path, sys: Path) -> list[Path]:
    """This process's cgroup folders for ``controller``, from the process's own cgroup up to the root, v1 and v2.

    Inside a container, the path in /proc may not exist in the mounted hierarchy. The limit is then in an ancestor that exists.
    """
    folders: list[Path] = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = [sys / "fs/cgroup" / controller] if controllers else [sys / "fs/cgroup", sys / "fs/cgroup/unified"]
        parts = [part for part in path.split("/") if part and part != ".."]
        for root in roots:
            folders += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
