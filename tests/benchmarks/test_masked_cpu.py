"""Under a masked CPU the engines compute as without the instructions, saturation included, and Penstock still exactly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import masked_cpu, models
from benchmarks.scenarios.int8 import quantize_by_default
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
SHARED = """
import sys
import numpy as np
from pathlib import Path
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
model, x = Artifact.from_file(Path(sys.argv[1])), np.random.default_rng(1).standard_normal((1, 128, 384)).astype(np.float32)
answers = [
    get_engine("onnxruntime").load(model, {"threads": 1, "graph_level": level}).forward({"input": x})["output"]
    for level in ("all", "basic")
]
np.testing.assert_allclose(*answers, rtol=1e-5, atol=1e-5)
"""
TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "avx2" not in machine_facts().isa or not shutil.which("gcc") or not shutil.which("objdump"),
        reason="needs an x86 CPU with AVX2, gcc and objdump",
    ),
]


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


def test_integer_weights_that_operators_share_load_without_vnni(tmp_path: Path) -> None:
    """ONNX Runtime's exact kernels cannot be had for them: it fails to convert such weights twice."""
    calibration = {"input": np.random.default_rng(0).standard_normal((2, 128, 384)).astype(np.float32)}
    model = quantize_by_default(models.encoder(tmp_path / "model.onnx"), calibration)
    environment = os.environ | masked_cpu.environment("avx2")
    command = [sys.executable, "-c", SHARED, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
