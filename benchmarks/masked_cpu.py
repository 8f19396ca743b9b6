"""Run a command as on an x86 CPU that lacks some instructions: ``python -m benchmarks.masked_cpu {no-vnni,avx2} COMMAND …``.

The engines ask the CPUID instruction which kernels they may use, and neither ONNX Runtime nor OpenVINO can be told otherwise. This
module copies their libraries, replaces CPUID in the copies by an undefined instruction, and preloads a handler that answers it
with some bits cleared. The kernels are therefore those of the other CPU, and so are their results, saturation included. Their
speed is that of this CPU without the instructions, which approximates an older CPU. Penstock itself is told by
``PENSTOCK_CPU_WITHOUT``. Needs gcc and objdump. The copies are kept in ``.cache``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from penstock.resources import CPU_WITHOUT

CACHE = Path(__file__).parent / ".cache" / "masked_cpu"
NAME = "MASKED_CPU"
"""Environment variable: the name of the CPU that a command sees."""
_PACKAGES = ("onnxruntime", "openvino")
_CPUID, _UNDEFINED = b"\x0f\xa2", b"\x0f\x0a"
_EAX, _EBX, _ECX, _EDX = range(4)

_DOT_PRODUCT = (
    (7, 0, _ECX, 1 << 11),  # AVX512_VNNI
    (7, 0, _EDX, 1 << 22 | 1 << 24 | 1 << 25),  # AMX
    (7, 1, _EAX, 1 << 4 | 1 << 5),  # AVX_VNNI, and AVX512_BF16, which came later
    (7, 1, _EDX, 1 << 4 | 1 << 10),  # AVX_VNNI_INT8, AVX_VNNI_INT16
)
_AVX512 = (
    (7, 0, _EBX, 1 << 16 | 1 << 17 | 1 << 21 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 30 | 1 << 31),
    (7, 0, _ECX, 1 << 1 | 1 << 6 | 1 << 12 | 1 << 14),  # VBMI, VBMI2, BITALG, VPOPCNTDQ
    (7, 0, _EDX, 1 << 2 | 1 << 3 | 1 << 8 | 1 << 23),  # 4VNNIW, 4FMAPS, VP2INTERSECT, FP16
    (7, 1, _EDX, 1 << 19),  # AVX10
)
_ABSENT = "integer_dot_product,avx512_bf16,amx_bf16"
CPUS = {
    "no-vnni": (_DOT_PRODUCT, _ABSENT),
    "avx2": (_DOT_PRODUCT + _AVX512, f"{_ABSENT},avx512f,avx512bw,avx512_fp16"),
}
"""By name: the bits of CPUID to clear, and the same for Penstock. ``no-vnni`` is AVX-512 as in Skylake, ``avx2`` as in Haswell."""


def environment(cpu: str) -> dict[str, str]:
    """The variables under which a Python process sees the CPU ``cpu``. Makes the copies if there are none."""
    folder = CACHE / "-".join(_version(name) for name in _PACKAGES)
    handler = folder / "masked_cpu.so"
    if not handler.exists():
        for name in _PACKAGES:
            _copy(name, folder / name)
        source = Path(__file__).with_suffix(".c")
        partial = handler.with_suffix(".partial")
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", partial, source, "-ldl"], check=True)
        partial.rename(handler)
    bits, absent = CPUS[cpu]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    masks = ",".join(f"{leaf:x}:{subleaf:x}:{register:x}:{mask:x}" for leaf, subleaf, register, mask in bits)
    return {"PYTHONPATH": path, "LD_PRELOAD": str(handler), NAME: cpu, "MASKED_CPUID": masks, CPU_WITHOUT: absent}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Run a command as on a CPU that lacks some instructions.")
    parser.add_argument("cpu", choices=CPUS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    return subprocess.run(arguments.command, env=os.environ | environment(arguments.cpu), check=False).returncode


def _copy(package: str, target: Path) -> None:
    """Copy ``package``, its libraries without CPUID."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(Path(spec.origin).parent, target, ignore=shutil.ignore_patterns("__pycache__"))
    for path in target.rglob("*.so*"):
        if _CPUID in path.read_bytes():
            _replace(path)


def _replace(path: Path) -> None:
    """Replace each CPUID instruction in the library ``path``. objdump tells instructions from the same bytes elsewhere."""
    offset = {}
    for line in _lines("objdump", "-h", "-w", str(path)):
        fields = line.split()
        if len(fields) > 5 and fields[0].isdigit() and "CODE" in line:
            offset[int(fields[3], 16), int(fields[3], 16) + int(fields[2], 16)] = int(fields[5], 16) - int(
                fields[3], 16
            )
    data = bytearray(path.read_bytes())
    for line in _lines("sh", "-c", 'objdump -d --no-show-raw-insn "$0" | grep -w cpuid', str(path)):
        address = int(re.split(r"[:\s]+", line.strip())[0], 16)
        at = address + next(shift for (low, high), shift in offset.items() if low <= address < high)
        assert data[at : at + 2] == _CPUID, f"{path}: no CPUID at {address:#x}"
        data[at : at + 2] = _UNDEFINED
    path.write_bytes(data)


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()


def _version(package: str) -> str:
    module = __import__(package)
    return f"{package}-{module.__version__}"


if __name__ == "__main__":
    sys.exit(main())
