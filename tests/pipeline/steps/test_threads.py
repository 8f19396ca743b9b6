"""Steps give the same bits with any number of BLAS threads, so that a server and a script on other cores agree."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import hashlib
import numpy as np
from penstock.pipeline.steps.audio.log_mel import LogMel, WhisperLogMel
from penstock.pipeline.steps.image.resize import Resize
from penstock.pipeline.steps.scores.embeddings import L2Normalise, Pool

rng = np.random.default_rng(0)
sound = rng.uniform(-1, 1, 100_000).astype(np.float32)
picture, tokens = rng.random((360, 640, 3), np.float32), rng.random((512, 1024), np.float32)
steps = [
    (LogMel(rate=16_000), sound),
    (LogMel(rate=16_000, n_fft=400, hop=160, n_mels=80), sound),
    (WhisperLogMel(), sound),
    (Resize(size=(224, 224), like="torch"), picture),
    (Resize(size=(99, 500), like="torch", filter="bicubic"), picture),
    (Resize(size=(99, 500), like="torch", filter="area"), picture),
    (Pool(), tokens),
    (L2Normalise(), tokens),
]
for step, value in steps:
    print(step, hashlib.sha256(step.run({"value": value})["value"].tobytes()).hexdigest())
"""


def _digests(threads: int) -> str:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    one = _digests(1)
    assert len(one.splitlines()) == 8
    assert _digests(2) == one
