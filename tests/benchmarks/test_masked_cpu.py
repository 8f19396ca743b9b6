"""Under a masked CPU the engines compute as without the instructions, saturation included, and Penstock still exactly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import masked_cpu
from penstock.resources import machine_facts

SCRIPT = """
import msgspec, numpy as np, models
from penstock.engines.registry import get_engine
from penstock.resources import machine_facts
x, machine = np.full((1, 64), 255, np.float32), machine_facts()
told = msgspec.structs.replace(machine, isa=(*machine.isa, "avx512_vnni"))
for name in ("onnxruntime", "openvino"):
    for facts in (machine, told):
        model = type(get_engine(name))(facts).load(models.product_of_bytes(127), {"threads": 1})
        print(int((model.forward({"x": x})["y"] == 127 * x.sum()).all()))
print(*machine.isa)
"""
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    "avx2" not in machine_facts().isa or not shutil.which("gcc") or not shutil.which("objdump"),
    reason="needs an x86 CPU with AVX2, gcc and objdump",
)
@pytest.mark.parametrize("cpu", masked_cpu.CPUS)
def test_engines_saturate_unless_told(cpu: str) -> None:
    environment = os.environ | masked_cpu.environment(cpu)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(TESTS)])
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    *exact, isa = done.stdout.split("\n")[:-1]
    assert exact == ["1", "0", "1", "0"]
    assert "vnni" not in isa
    assert ("avx512" in isa) is (cpu == "no-vnni" and "avx512f" in machine_facts().isa)
