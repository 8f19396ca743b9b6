import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from penstock.errors import InvalidArgument
from penstock.online.repository.loading import recorded_requests
from penstock.online.repository.loading.recorded_requests import decode, encode, folder_of, read_recorded
from penstock.request import InferRequest
from penstock.storage.local import LocalStorage
from penstock.tensor import Array, DataType
from penstock.testing import assert_tensors_close

SHAPES = of_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    datatype, shape = draw(st.sampled_from(list(DataType))), draw(SHAPES)
    count = int(np.prod(shape))
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
        return array.reshape(shape)
    values = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return np.array(values).astype(datatype.dtype).reshape(shape)


PARAMETERS = st.dictionaries(
    st.text(max_size=5),
    st.text(max_size=5)
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False),
    max_size=3,
)


@given(st.dictionaries(st.text(max_size=5), arrays(), max_size=3), PARAMETERS)
def test_what_is_written_is_read(inputs: dict[str, Array], parameters: dict[str, object]) -> None:
    read = decode(encode(InferRequest("m", inputs, id="7", client="alice", parameters=parameters)), "n")
    assert_tensors_close(read.inputs, inputs)
    assert list(read.inputs) == list(inputs)
    assert (read.model_name, read.parameters, read.id, read.client) == ("n", parameters, "", "")


@given(st.binary(max_size=200), st.booleans())
def test_anything_else_is_refused(content: bytes, has_header: bool) -> None:
    if has_header:
        content = b"Inference-Header-Content-Length: %d\n" % len(content) + content
    with pytest.raises(InvalidArgument):
        decode(content, "m")


GOOD = encode(InferRequest("m", {"x": np.arange(4, dtype=np.int32)}))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_damaged_file_is_refused_or_still_a_request(position: int, value: int) -> None:
    damaged = bytearray(GOOD)
    damaged[position] = value
    for content in (bytes(damaged), GOOD[:position]):
        try:
            read = decode(content, "m")
        except InvalidArgument:
            continue
        assert sum(array.nbytes for array in read.inputs.values()) == 16


def written(head: str, data: bytes = b"", length: int | None = None) -> bytes:
    text = head.encode()
    return b"Inference-Header-Content-Length: %d\n" % (len(text) if length is None else length) + text + data


def one(datatype: str, count: int, size: int, times: int = 1) -> str:
    tensor = {"name": "x", "datatype": datatype, "shape": [count], "parameters": {"binary_data_size": size}}
    return json.dumps({"inputs": [tensor] * times})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "must begin with"),
        (b"Inference-Header-Content-Length: 99999999999\n{}", "must begin with"),
        (b"Inference-Header-Content-Length: -1\n{}", "must begin with"),
        (written("{}", length=3), "3 bytes of JSON, but only 2 follow"),
        (written("{}"), "missing required field `inputs`"),
        (written('{"inputs":[],"outputs":[]}'), "unknown field `outputs`"),
        (written(one("FP32", 2, 8), bytes(7)), "more bytes than follow"),
        (written(one("FP32", 2, -8), bytes(8)), "more bytes than follow"),
        (written(one("FP32", 2, 8), bytes(9)), "it has 1 bytes after its last input"),
        (written(one("FP32", 3, 8), bytes(8)), "takes 12 bytes, but 8"),
        (written(one("FP32", 2**60, 8), bytes(8)), "too large"),
        (written(one("BYTES", 2**21, 8), bytes(8)), "BYTES elements exceed"),
        (written(one("BYTES", 1, 4), struct.pack("<I", 9)), "declares 9 bytes"),
        (written(one("INT8", 0, 0, times=2)), "appears twice"),
        (written(one("FP31", 2, 8), bytes(8)), "Invalid enum value"),
    ],
)  # fmt: skip
def test_why_a_file_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        decode(content, "m")


def test_names_of_models_stay_in_their_folder(tmp_path: Path) -> None:
    for name in ("..", "../../etc", "a/b", ".", "m.v1", "ü"):
        assert folder_of(str(tmp_path), name).resolve().parent == tmp_path.resolve()
    assert folder_of(str(tmp_path), "linear") == tmp_path / "linear"


def test_names_whose_folder_would_be_too_long_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = {
        folder_of(str(tmp_path), "模" * 85),
        folder_of(str(tmp_path), "模" * 84 + "a"),
        folder_of(str(tmp_path), "a/" + "." * 250),
    }
    assert len(folders) == 3
    for folder in folders:
        folder.mkdir()
        assert list(read_recorded(LocalStorage(folder), "m")) == []


def test_a_folder_that_is_not_there_holds_nothing_and_files_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(read_recorded(LocalStorage(tmp_path / "absent"), "m")) == []
    (tmp_path / "a.request").write_bytes(GOOD)
    (tmp_path / "b.request").mkdir()
    (tmp_path / "c.other").write_bytes(GOOD)
    (name, request), (_, error) = read_recorded(LocalStorage(tmp_path), "m")
    assert name == "a.request"
    assert isinstance(request, InferRequest)
    assert request.inputs["x"].tolist() == [0, 1, 2, 3]
    assert "cannot read" in str(error)
    monkeypatch.setattr(recorded_requests, "MAX_BYTES", 20)
    assert "has more than 40 bytes" in str(next(read_recorded(LocalStorage(tmp_path), "m"))[1])
