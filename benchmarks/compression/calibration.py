"""The cost of calibration: milliseconds to find the range of a tensor, and memory by number of samples."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.compression import nets
from benchmarks.results import Row, claim, fact
from penstock.offline.compress.ptq.ranges.histogram import Histogram
from penstock.offline.compress.ptq.ranges.ranges import entropy_range, mse_range
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.resources import machine_facts

_SCRIPT = """
import re, sys
from pathlib import Path
import numpy as np
from penstock.artifact import Artifact
from penstock.offline.compress.ptq.calibrate import collect
class Lazy:
    def __iter__(self):
        rng = np.random.default_rng(0)
        for _ in range(int(sys.argv[1]) // 10):
            yield {"input": rng.random((10, 1, 28, 28), np.float32)}
collect(Artifact.from_file(sys.argv[2]), Lazy(), batch_size=10)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def cost(_quick: bool) -> list[Row]:
    """Time and memory of calibration, for tensors that are typical of networks: after a ReLU, of both signs, and with a long tail."""
    scheme, rng = integer_scheme(machine_facts()), np.random.default_rng(0)
    normal = rng.standard_normal(1_000_000).astype(np.float32)
    tensors = {"after a ReLU": np.maximum(normal, 0), "of both signs": normal, "with a long tail": normal**3}
    kl, mse = [], []
    for values in tensors.values():
        histogram = Histogram()
        histogram.update(values)
        for times, search in ((kl, entropy_range), (mse, mse_range)):
            start = time.perf_counter()
            search(histogram, scheme)
            times.append(1e3 * (time.perf_counter() - start))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        model.write_bytes(nets.lenet_5().data)
        peaks = {count: _peak_kib(count, model) for count in (10, 1000)}
    note = f"{peaks[10] / 1024:.0f} → {peaks[1000] / 1024:.0f} MiB in all, samples read as they are needed"
    return [
        claim("KL range of a tensor, slowest of three", max(kl), "ms", "<=", 20, note="2048 bins a side"),
        fact("MSE range of a tensor, slowest of three", max(mse), "ms"),
        claim("peak memory, 1,000 samples over 10", peaks[1000] / peaks[10], "×", "<=", 1.1, note=note),
    ]


def _peak_kib(samples: int, model: Path) -> int:
    command = [sys.executable, "-c", _SCRIPT, str(samples), str(model)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
