"""The requests that ``model_warmup`` describes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidConfig
from penstock.online.repository.config import ModelConfig, WarmUpInput, WarmUpRequest
from penstock.online.repository.loading.warm_up_samples import WarmUpSample, read_samples
from penstock.tensor import DataType


def samples(folder: Path, *requests: WarmUpRequest, max_batch_size: int = 4) -> list[WarmUpSample]:
    config = ModelConfig(name="net", max_batch_size=max_batch_size, model_warmup=requests)
    return list(read_samples(config, folder))


def one(datatype: DataType = DataType.FP32, *, batch_size: int = 0, count: int = 0, **options: object) -> WarmUpRequest:
    given = WarmUpInput(datatype, (3,), **options)  # type: ignore[arg-type]
    return WarmUpRequest(name="first", batch_size=batch_size, count=count, inputs={"x": given})


def test_a_sample_is_one_row_and_its_counts(tmp_path: Path) -> None:
    (found,) = samples(tmp_path, one(batch_size=4, count=5))
    assert (found.name, found.rows, found.count) == ("first", 4, 5)
    np.testing.assert_array_equal(found.request.inputs["x"], np.zeros((1, 3), np.float32))
    (found,) = samples(tmp_path, one(), max_batch_size=0)
    assert (found.rows, found.count, found.request.inputs["x"].shape) == (1, 1, (3,))


@pytest.mark.parametrize("datatype", [DataType.FP32, DataType.INT64, DataType.BOOL, DataType.BYTES])
def test_random_data_are_the_same_each_time(datatype: DataType, tmp_path: Path) -> None:
    (first,), (second,) = (samples(tmp_path, one(datatype, random_data=True)) for _ in range(2))
    np.testing.assert_array_equal(first.request.inputs["x"], second.request.inputs["x"])
    assert first.request.inputs["x"].dtype == datatype.dtype


def test_data_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "data").write_bytes(np.array([1, 2, 3], np.float32).tobytes())
    (found,) = samples(tmp_path, one(input_data_file="data"))
    assert found.request.inputs["x"].tolist() == [[1, 2, 3]]
    (tmp_path / "warmup" / "data").write_bytes(bytes(13))
    with pytest.raises(InvalidConfig, match="failed to run warmup sample 'first': input 'x'"):
        samples(tmp_path, one(input_data_file="data"))


@pytest.mark.parametrize(("size", "says"), [(4, "at most 4 rows are merged"), (0, "no requests are merged")])
def test_more_rows_than_the_model_merges_are_refused(size: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f"'batch_size' is 5, but {says}"):
        samples(tmp_path, one(batch_size=5), max_batch_size=size)


def test_too_much_data_is_refused(tmp_path: Path) -> None:
    huge = WarmUpRequest(name="huge", inputs={"x": WarmUpInput(DataType.FP32, (1 << 29,))})
    with pytest.raises(InvalidConfig, match="'huge': input 'x': 1 rows .* take more than"):
        samples(tmp_path, huge)
