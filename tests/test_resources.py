from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
from penstock.resources import (
    CPU_WITHOUT,
    INTEGER_DOT_PRODUCT,
    CorePlan,
    core_ids,
    cpu_quota,
    machine_facts,
    plan_cores,
    usable_cores,
    usable_memory,
)

_MIB = 1 << 20


class Machine:
    """A fake /proc and /sys below ``root``."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.write("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\n")

    def write(self, path: str, text: str) -> Machine:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    @property
    def quota(self) -> float | None:
        return cpu_quota(self.proc, self.sys)

    @property
    def memory(self) -> int:
        return usable_memory(self.proc, self.sys)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv(CPU_WITHOUT, raising=False)
    return Machine(tmp_path)


def test_no_cgroup_at_all(machine: Machine) -> None:
    assert machine.quota is None
    assert machine.memory == 16 * _MIB
    assert usable_cores(machine.proc, machine.sys) == len(os.sched_getaffinity(0))


def test_v2_quota(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n").write("sys/fs/cgroup/job/cpu.max", "150000 100000\n")
    assert machine.quota == 1.5


def test_v2_without_a_quota(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n").write("sys/fs/cgroup/job/cpu.max", "max 100000\n")
    assert machine.quota is None


@pytest.mark.parametrize(("inner", "outer", "smallest"), [(1, 4, 1.0), (4, 1, 1.0), (None, 2, 2.0), (2, None, 2.0)])
def test_v2_nested_quota_is_the_smallest_on_the_way_up(
    machine: Machine, inner: int | None, outer: int | None, smallest: float
) -> None:
    machine.write("proc/self/cgroup", "0::/pod/container\n").write("sys/fs/cgroup/other/cpu.max", "1000 100000\n")
    for path, quota in (("pod", outer), ("pod/container", inner)):
        limit = "max" if quota is None else str(quota * 100000)
        machine.write(f"sys/fs/cgroup/{path}/cpu.max", f"{limit} 100000\n")
    assert machine.quota == smallest


def test_v2_in_a_container_that_sees_its_own_cgroup_as_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../../elsewhere\n").write("sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert machine.quota == 2


_V1 = "4:memory:/job\n3:cpu,cpuacct:/job\n2:cpuset:/job\n0::/\n"


def test_v1_quota(machine: Machine) -> None:
    machine.write("proc/self/cgroup", _V1)
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "250000\n")
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    assert machine.quota == 2.5


def test_v1_without_a_quota(machine: Machine) -> None:
    machine.write("proc/self/cgroup", _V1)
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n")
    machine.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    assert machine.quota is None


def test_v1_path_that_does_not_exist_below_the_mount(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "3:cpu:/docker/abc\n")
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    machine.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert machine.quota == 1


def test_cores_round_a_part_up_and_are_never_none(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n").write("sys/fs/cgroup/cpu.max", "10000 100000\n")
    assert usable_cores(machine.proc, machine.sys) == 1
    machine.write("sys/fs/cgroup/cpu.max", "100000000 100000\n")
    assert usable_cores(machine.proc, machine.sys) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["", "garbage", "100000", "100000 0", "1e5 100000"])
def test_a_quota_that_cannot_be_read_is_none(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", "0::/\n").write("sys/fs/cgroup/cpu.max", text)
    assert machine.quota is None


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [("0::/job\n", "job/memory.max"), ("0::/job/inner\n", "job/memory.max"), (_V1, "memory/job/memory.limit_in_bytes")],
)
def test_memory_limit(machine: Machine, cgroup: str, file: str) -> None:
    machine.write("proc/self/cgroup", cgroup).write(f"sys/fs/cgroup/{file}", f"{4 * _MIB}\n")
    assert machine.memory == 4 * _MIB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_memory_without_a_limit_is_the_hosts(machine: Machine, limit: str) -> None:
    machine.write("proc/self/cgroup", "0::/\n").write("sys/fs/cgroup/memory.max", limit)
    assert machine.memory == 16 * _MIB


def test_memory_that_nothing_tells(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    assert machine.memory == 0


@pytest.mark.parametrize(
    ("flags", "isa", "dot_product"),
    [
        ("flags\t\t: fpu sse4_1 avx avx2 fma f16c", ("avx", "avx2", "f16c", "fma", "sse4_1"), False),
        ("flags\t\t: avx2 avx512f avx512bw avx512_vnni", ("avx2", "avx512_vnni", "avx512bw", "avx512f"), True),
        ("flags\t\t: avx2 avx_vnni", ("avx2", "avx_vnni"), True),
        ("flags\t\t: amx_bf16 amx_tile amx_int8", ("amx_bf16", "amx_int8"), True),
        ("Features\t: fp asimd", (), False),
        ("Features\t: fp asimd asimddp bf16 i8mm sve", ("asimddp", "bf16", "i8mm", "sve"), True),
    ],
)
def test_instruction_sets(machine: Machine, flags: str, isa: tuple[str, ...], dot_product: bool) -> None:
    machine.write("proc/cpuinfo", f"processor\t: 0\nmodel name\t: Test CPU @ 2 GHz\n{flags}\nbugs\t\t: amx_int8x\n")
    facts = machine_facts(machine.proc, machine.sys)
    assert facts.cpu == "Test CPU @ 2 GHz"
    assert facts.isa == isa
    assert facts.has_integer_dot_product is dot_product


@pytest.mark.parametrize(
    ("without", "isa"),
    [
        ("", ("avx2", "avx512_bf16", "avx512_vnni", "avx_vnni")),
        ("avx512_vnni", ("avx2", "avx512_bf16", "avx_vnni")),
        (f"{INTEGER_DOT_PRODUCT}, avx512_bf16", ("avx2",)),
    ],
)
def test_instruction_sets_to_treat_as_absent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, without: str, isa: tuple[str, ...]
) -> None:
    machine.write("proc/cpuinfo", "flags\t\t: avx2 avx512_bf16 avx512_vnni avx_vnni\n")
    monkeypatch.setenv(CPU_WITHOUT, without)
    facts = machine_facts(machine.proc, machine.sys)
    assert facts.isa == isa
    assert facts.has_integer_dot_product is ("avx_vnni" in isa)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_WITHOUT, "avx2,vnni")
    with pytest.raises(InvalidConfig, match="PENSTOCK_CPU_WITHOUT names unknown instruction sets: vnni"):
        machine_facts()


@pytest.mark.parametrize(
    ("isa", "requires", "lacking"),
    [
        (("avx2",), (), []),
        (("avx2",), ("avx2", "avx512_bf16", "amx_bf16"), ["amx_bf16", "avx512_bf16"]),
        (("avx2",), (INTEGER_DOT_PRODUCT,), [INTEGER_DOT_PRODUCT]),
        (("avx512_vnni",), (INTEGER_DOT_PRODUCT, "amx_int8"), ["amx_int8"]),
        (("amx_int8",), (INTEGER_DOT_PRODUCT,), []),
    ],
)
def test_what_a_machine_lacks(isa: tuple[str, ...], requires: tuple[str, ...], lacking: list[str]) -> None:
    assert msgspec.structs.replace(machine_facts(), isa=isa).lacks(requires) == lacking


def test_numa_nodes(machine: Machine) -> None:
    assert machine_facts(machine.proc, machine.sys).numa_nodes == 1
    for name in ("node0", "node1", "possible"):
        (machine.sys / "devices/system/node" / name).mkdir(parents=True)
    assert machine_facts(machine.proc, machine.sys).numa_nodes == 2


def test_facts_of_this_machine_are_plausible() -> None:
    facts = machine_facts()
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.memory_bytes > 64 * _MIB
    assert facts.cpu
    assert facts.architecture == platform.machine()
    assert facts.python == platform.python_version()


@given(
    instances=st.integers(1, 40),
    threads=st.integers(0, 64),
    cores=st.lists(st.integers(0, 255), min_size=1, max_size=32, unique=True),
    quota=st.none() | st.floats(0.01, 64),
)
def test_instances_never_take_more_cores_than_there_are(
    instances: int, threads: int, cores: list[int], quota: float | None
) -> None:
    plan = plan_cores(instances, threads, cores, quota)
    usable = min(len(cores), math.ceil(quota)) if quota else len(cores)
    assert plan.threads >= 1
    assert plan.threads <= (threads or 64)
    assert len(plan.cores) == instances
    assert all(plan.threads <= len(own) and set(own) <= set(cores) for own in plan.cores)
    if instances <= usable:
        assert instances * plan.threads <= usable
    if instances <= len(cores):
        taken = [core for own in plan.cores for core in own]
        assert len(taken) == len(set(taken)), "none shares a core"


@pytest.mark.parametrize(
    ("instances", "threads", "cores", "quota", "expected"),
    [
        (1, 0, [0, 1, 2, 3], None, CorePlan(4, ((0, 1, 2, 3),))),
        (2, 0, [3, 1, 2, 0], None, CorePlan(2, ((0, 1), (2, 3)))),
        (2, 1, [0, 1, 2, 3, 4], None, CorePlan(1, ((0, 1), (2, 3)))),
        (2, 8, [0, 1, 2, 3], 2.0, CorePlan(1, ((0, 1), (2, 3)))),
        (1, 0, [0, 1, 2, 3], 1.5, CorePlan(2, ((0, 1, 2, 3),))),
        (3, 4, [0, 5], None, CorePlan(1, ((0,), (5,), (0,)))),
    ],
)
def test_plans(instances: int, threads: int, cores: list[int], quota: float | None, expected: CorePlan) -> None:
    assert plan_cores(instances, threads, cores, quota) == expected


def test_core_ids_are_those_of_the_affinity() -> None:
    assert set(core_ids()) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "given"), [(64, 512, 100, 100), (64, 80, 100, 80), (200, 512, 100, 200)]
)
def test_open_files_are_allowed_as_far_as_the_system_lets(soft: int, hard: int, wanted: int, given: int) -> None:
    script = (
        "import resource as r; from penstock.resources import allow_open_files;"
        f"r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard})); print(allow_open_files({wanted}), *r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(given), str(given), str(hard)]
