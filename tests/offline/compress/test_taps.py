"""Tensors inside a model, batch by batch."""

from __future__ import annotations

import numpy as np
import pytest

import networks
from penstock.dataset import make_dataset
from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.compress.taps import Taps

IMAGES = make_dataset({"x": networks.images(10)}, None)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 64])
def test_batches_make_up_the_whole(batch_size: int) -> None:
    parts: dict[str, list[np.ndarray]] = {"x": [], "stem": [], "y": []}
    for name, array in Taps(networks.cnn(), IMAGES, batch_size=batch_size).run(list(parts)):
        parts[name].append(array)
    whole = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    assert np.array_equal(whole["x"], IMAGES.inputs["x"])
    assert whole["stem"].shape == (10, 32, 12, 12)
    assert (whole["stem"] >= 0).all()
    assert whole["y"].shape == (10, 10)


def test_few_bytes_mean_several_runs_of_the_same_tensors() -> None:
    names = ["stem", "y"]

    def seen(memory_bytes: int) -> tuple[list[tuple[str, float]], int]:
        steps: list[int] = []
        taps = Taps(networks.cnn(), IMAGES, batch_size=5, memory_bytes=memory_bytes)
        found = [
            (name, float(array.sum())) for name, array in taps.run(names, lambda _done, total: steps.append(total))
        ]
        return sorted(found), steps[-1]

    together, few = seen(1 << 30)
    apart, more = seen(1)
    assert together == apart
    assert (few, more) == (2, 4)


def test_smaller_batches_read_all_tensors_in_one_pass() -> None:
    data = make_dataset({"x": networks.images(40)}, None)
    taps = Taps(networks.cnn(), data, memory_bytes=100_000)
    names = ["conv0", "stem", "relu3", "add5"]
    one = taps.in_one_pass(names)
    assert len(taps.groups(names)) > 1
    assert len(one.groups(names)) == 1
    for name in names:
        whole, parts = ([array for _, array in each.run([name])] for each in (taps, one))
        np.testing.assert_allclose(np.concatenate(parts), np.concatenate(whole), rtol=1e-5, atol=1e-6)
    fixed = Taps(networks.cnn(batch=8), data, memory_bytes=1000)
    assert fixed.in_one_pass(names) is fixed


def test_a_fixed_batch_is_kept() -> None:
    shapes = [array.shape[0] for _, array in Taps(networks.cnn(batch=5), IMAGES).run(["stem"])]
    assert shapes == [5, 5]


def test_bad_data_are_refused() -> None:
    with pytest.raises(InvalidData):
        Taps(networks.cnn(), make_dataset({"z": networks.images(2)}, None))
    with pytest.raises(InvalidArgument):
        Taps(networks.cnn(), IMAGES, batch_size=0)
    huge = make_dataset({"x": np.full((1, 3, 12, 12), 3e38, np.float32)}, None)
    with pytest.raises(InvalidData, match="infinite"):
        list(Taps(networks.cnn(), huge).run(["y"]))
