"""The cache of calibration: what comes back is what was found, and nothing else ever does."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.errors import InvalidData, ResourceExhausted
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.calibration_cache import collect_cached, read_statistics, write_statistics
from penstock.offline.compress.ptq.ranges.histogram import BINS, Histogram, TensorStatistics

X = np.random.default_rng(0).standard_normal((12, 16)).astype(np.float32)


def state(statistics: dict[str, TensorStatistics]) -> dict[str, object]:
    return {
        name: (
            known.histogram.counts.tolist(),
            known.histogram.zeros,
            known.histogram.count,
            known.histogram.min,
            known.histogram.max,
            known.histogram.exponent,
            known.clippable,
            known.fixed,
        )
        for name, known in statistics.items()
    }


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def runs(folder: Path, data: object = None, **changed: object) -> int:
    """How often calibration reports progress: never if all comes from the cache."""
    seen: list[tuple[int, int]] = []
    arguments = {"artifact": networks.mlp(), "data": {"x": X} if data is None else data, **changed}
    collect_cached(folder, progress=lambda *step: seen.append(step), **arguments)  # type: ignore[arg-type]
    return len(seen)


def test_the_second_time_it_comes_from_the_file(tmp_path: Path) -> None:
    first = collect_cached(tmp_path / "new", networks.mlp(), {"x": X})
    assert runs(tmp_path / "new") == 0
    assert state(first) == state(collect(networks.mlp(), {"x": X}))
    assert state(collect_cached(tmp_path / "new", networks.mlp(), {"x": X})) == state(first)


@pytest.mark.parametrize(
    "changed",
    [
        {"artifact": networks.mlp(32)},
        {"data": {"x": X + 1}},
        {"data": {"x": X[:5]}},
        {"tensors": ["x"]},
        {"batch_size": 5},
        {"threads": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_decides_is_in_the_key(tmp_path: Path, changed: dict[str, object]) -> None:
    collect_cached(tmp_path, networks.mlp(), {"x": X})
    assert runs(tmp_path, **changed) > 0


def test_other_arrays_and_the_cut_of_batches(tmp_path: Path) -> None:
    collect_cached(tmp_path, networks.mlp(), {"x": X})
    assert runs(tmp_path, {"x": X, "labels": np.arange(12)}) == 0
    assert runs(tmp_path, [{"x": X}]) == 0
    assert runs(tmp_path, [{"x": X[:6]}, {"x": X[6:]}]) > 0


@given(at=st.integers(0, 10**9), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_file_is_ignored_and_written_anew(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    wanted = state(collect_cached(folder, networks.mlp(8), {"x": X[:2]}))
    path = only_file(folder)
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[at % len(whole)] ^= 1 << bit
    path.write_bytes(whole[: at % len(whole)] if cut else bytes(broken))
    assert read_statistics(path, path.stem) is None
    assert state(collect_cached(folder, networks.mlp(8), {"x": X[:2]})) == wanted
    assert path.read_bytes() == whole


def test_a_file_of_another_key_is_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_statistics(path, "this", collect(networks.mlp(), {"x": X}))
    assert read_statistics(path, "that") is None
    assert read_statistics(path, "this") is not None
    assert read_statistics(tmp_path / "none", "this") is None


def test_a_file_with_a_right_digest_but_wrong_contents(tmp_path: Path) -> None:

    def forge(contents: object) -> None:
        payload = msgspec.msgpack.encode(contents)
        (tmp_path / "file").write_bytes(hashlib.sha256(payload).digest() + payload)

    counts = np.zeros(2 * BINS, "<i8")
    counts[BINS] = 3
    good = ["key", {"x": [counts.tobytes(), 0, [0.0, 0.1], 0, True, None]}]
    forge(good)
    assert read_statistics(tmp_path / "file", "key") is not None
    for tensor in (
        [counts.tobytes()[:-1], 0, [0.0, 0.1], 0, True, None],
        [counts.tobytes()[:-8], 0, [0.0, 0.1], 0, True, None],
        [(-counts).tobytes(), 0, [0.0, 0.1], 0, True, None],
        [counts.tobytes(), -1, [0.0, 0.1], 0, True, None],
        [counts.tobytes(), 0, [0.0, 3.0], 0, True, None],
        [counts.tobytes(), 0, [0.2, 0.1], 0, True, None],
        [counts.tobytes(), 0, [0.0, float("nan")], 0, True, None],
        [counts.tobytes(), 0, [0.0, 0.1], 10**6, True, None],
        [counts.tobytes(), 0, [0.0, 0.1], 0, "yes", None],
        "nothing",
    ):
        forge(["key", {"x": tensor}])
        assert read_statistics(tmp_path / "file", "key") is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceExhausted, match="cannot write the calibration cache"):
        collect_cached(tmp_path / "file", networks.mlp(), {"x": X})


def test_an_empty_histogram_comes_back_empty() -> None:
    empty = Histogram()
    again = Histogram.restore(empty.counts, 0, (empty.min, empty.max), empty.exponent)
    assert again.count == 0
    assert again.is_constant
    with pytest.raises(InvalidData):
        Histogram.restore(empty.counts, 0, (0.0, 1.0), 3)
