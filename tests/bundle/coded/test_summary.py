from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from penstock.bundle import coded
from penstock.bundle.coded.summary import describe
from penstock.errors import IntegrityError

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "sparse": np.where(RANDOM.random((100, 100)) < 0.1, np.float32(0.3), np.float32(0)),
    "dense": RANDOM.choice(np.float32([-0.1, 0.1, 0.3, 0.7]), (100, 50)),
    "noise": RANDOM.standard_normal((100, 50)).astype(np.float32),
}


@pytest.fixture(scope="module")
def model() -> bytes:
    graph = helper.make_graph(
        [], "g", [], [], [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()]
    )
    return bytes(helper.make_model(graph).SerializeToString())


@pytest.fixture(scope="module")
def data(model: bytes) -> bytes:
    return coded.encode(model)


def test_every_byte_of_the_file_is_accounted_for(model: bytes, data: bytes) -> None:
    summary = describe(data)
    assert (summary.model_bytes, summary.coded_bytes) == (len(model), len(data))
    assert summary.header_bytes + sum(one.code_bytes + one.gap_bytes for one in summary.tensors) == len(data)
    assert summary.graph_bytes + sum(one.dense_bytes for one in summary.tensors) == len(model)
    assert summary.ratio == len(model) / len(data)


def test_each_tensor_is_described(data: bytes) -> None:
    found = {one.name: one for one in describe(data).tensors}
    for name, array in WEIGHTS.items():
        assert (found[name].shape, found[name].dense_bytes) == (array.shape, array.nbytes)
        assert found[name].sparsity == pytest.approx(1 - np.count_nonzero(array) / array.size)
    sparse, dense, noise = found["sparse"], found["dense"], found["noise"]
    assert (sparse.codec, sparse.symbols, sparse.values) == ("sparse", 1, np.count_nonzero(WEIGHTS["sparse"]))
    assert (dense.codec, dense.symbols, dense.values, dense.gap_bytes) == ("huffman", 4, 5000, 0)
    assert 1250 * 0.95 < dense.entropy_bytes < dense.code_bytes < 1250 * 1.1
    assert sparse.entropy_bytes < sparse.code_bytes + sparse.gap_bytes
    assert noise.codec in ("verbatim", "deflate")
    assert noise.entropy_bytes == noise.code_bytes


def test_what_is_no_coded_model_is_refused(model: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a coded model"):
        describe(model)
    with pytest.raises(IntegrityError):
        describe(b"")
