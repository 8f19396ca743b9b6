from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import ResourceExhausted
from penstock.samples import spool as spool_module
from penstock.samples.spool import Spool

TYPES = [np.bool_, np.uint8, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@st.composite
def samples(draw: st.DrawFn) -> list[dict[str, np.ndarray]]:
    types = {name: draw(st.sampled_from(TYPES)) for name in draw(st.sets(st.sampled_from("abc"), min_size=1))}

    def array(dtype: Any) -> np.ndarray:
        shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
        return np.asarray(draw(arrays.arrays(np.uint8, shape, elements=st.integers(0, 1)))).astype(dtype)

    return [{name: array(dtype) for name, dtype in types.items()} for _ in range(draw(st.integers(1, 6)))]


@given(samples(), st.randoms())
def test_samples_are_read_as_they_were_added_in_any_order(
    given_samples: list[dict[str, np.ndarray]], random: Any
) -> None:
    spool = Spool()
    for one in given_samples:
        spool.add(one)
    numbers = list(range(len(given_samples))) * 2
    random.shuffle(numbers)
    for number in numbers:
        found = spool.read(number)
        assert list(found) == list(given_samples[number])
        for name, array in given_samples[number].items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found[name], array)
            assert found[name].flags.aligned
            assert found[name].flags.writeable


def test_text_is_kept_and_samples_may_be_added_after_reading() -> None:
    spool = Spool()
    for number in range(3):
        spool.add({"t": np.array([[b"a" * number, "grün".encode()]], object)})
        assert spool.read(0)["t"].tolist() == [[b"", "grün".encode()]]
    assert spool.read(2)["t"].tolist() == [[b"aa", "grün".encode()]]


def test_a_full_disk_is_an_error_that_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool()
    with open("/dev/full", "w+b", buffering=0) as full:
        monkeypatch.setattr(spool, "_file", full)
        with pytest.raises(ResourceExhausted, match="temporary folder") as raised:
            spool.add({"x": np.zeros(3)})
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno in (errno.ENOSPC, errno.EINVAL, errno.ESPIPE)
    assert "TMPDIR" in raised.value.hint


class Disk:
    """A disk with ``free`` bytes."""

    total = 100 << 30

    def __init__(self, free: int) -> None:
        self.free = free


def test_the_disk_keeps_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(spool_module._RESERVE + (1 << 20))
    monkeypatch.setattr(spool_module.shutil, "disk_usage", lambda _: disk)
    Spool().add({"x": np.zeros(1 << 20, np.uint8)})
    disk.free -= 1
    with pytest.raises(ResourceExhausted, match=r"1\.0 GiB are left"):
        Spool().add({"x": np.zeros(1 << 20, np.uint8)})
    monkeypatch.setattr(disk, "total", 1 << 20)  # a small disk keeps a tenth
    disk.free = 300 << 10
    Spool().add({"x": np.zeros(100 << 10, np.uint8)})


def test_a_large_file_is_told_once_and_room_is_checked_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks: list[str] = []
    monkeypatch.setattr(spool_module.shutil, "disk_usage", lambda folder: checks.append(folder) or Disk(50 << 30))
    monkeypatch.setattr(spool_module, "_STEP", 1000)
    monkeypatch.setattr(spool_module, "_LARGE", 10_000)
    spool = Spool()
    for _ in range(300):
        spool.add({"x": np.zeros(100, np.uint8)})
    assert len(checks) <= 30
    (record,) = caplog.records
    assert "are copied to the temporary folder" in record.getMessage()


def test_the_file_has_no_name_and_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import numpy, os, signal\n"
        "from penstock.samples.spool import Spool\n"
        "spool = Spool()\n"
        "spool.add({'x': numpy.zeros(1 << 20)})\n"
        "print(os.listdir(os.environ['TMPDIR']), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("[]\n", -signal.SIGKILL)
    assert os.listdir(tmp_path) == []
