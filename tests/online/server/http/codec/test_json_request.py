import json
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.online.server.answer_form import BINARY, TEXT
from penstock.online.server.http.codec.json_request import (
    JsonLayout,
    plain_inputs,
    read,
    understand,
)
from penstock.online.server.request_layout import SharedSlice

X = {"name": "x", "datatype": "FP32", "shape": [2]}


def plan(*inputs: dict[str, Any], **more: Any) -> JsonLayout:
    return understand(read(json.dumps({"inputs": inputs, **more}).encode()))


def test_what_is_plain() -> None:
    def plain(*inputs: dict[str, Any], **more: Any) -> list[str] | None:
        found = plain_inputs(read(json.dumps({"inputs": inputs, **more}).encode()))
        return None if found is None else list(found)

    data = X | {"data": [1, 2]}
    whole = X | {"name": "z", "datatype": "INT8", "data": [1, 2]}
    assert plain(data, id="7") == ["x"]
    assert plain(data, whole) == ["x", "z"]
    for more in ({"parameters": {"a": 1}}, {"outputs": [{"name": "y"}]}):
        assert plain(data, **more) is None
    raw = X | {"name": "y", "parameters": {"binary_data_size": 8}}
    assert plain(raw) is None
    assert plain(data, raw) is None
    with pytest.raises(InvalidArgument, match="input 'x' has no data"):
        plain(X)
    with pytest.raises(InvalidArgument, match="input 'x' already exists"):
        plain(data, data)


def test_raw_inputs_lie_one_behind_the_other() -> None:
    raw = {"parameters": {"binary_data_size": 8}}
    found = plan(X | raw, X | {"name": "y", "data": [1, 2]}, X | {"name": "z"} | raw)
    assert [(one.tensor.name, one.start, one.end) for one in found.raw] == [("x", 0, 8), ("z", 8, 16)]
    assert found.size == 16
    assert list(found.arrays) == ["y"]


def test_places_in_shared_memory() -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 16}
    found = plan(X | {"parameters": place}, outputs=[{"name": "y", "parameters": place}])
    assert found.shared[0][1] == SharedSlice("r", 16, 8)
    assert found.placed == [("y", SharedSlice("r", 16, 8))]


def test_the_form_of_the_answer() -> None:
    data = X | {"data": [1, 2]}
    assert plan(data).form is TEXT
    assert plan(data, parameters={"binary_data_output": True}).form is BINARY
    assert plan(data, parameters={"binary_data_output": True, "kept": 1}).parameters == {"kept": 1}


def test_many_inputs_take_no_longer_than_their_bytes() -> None:
    inputs = [X | {"name": str(number), "parameters": {"binary_data_size": 8}} for number in range(4095)]
    assert len(plan(*inputs).raw) == 4095
    with pytest.raises(InvalidArgument, match="input '5' already exists"):
        plan(*inputs, inputs[5])


@pytest.mark.parametrize("how", [{"data": []}, {"parameters": {"binary_data_size": 4}}])
def test_bytes_elements_are_bounded_in_number(how: dict[str, Any]) -> None:
    """The limit applies to all tensors together, and is checked before any tensor is read."""
    texts = {"datatype": "BYTES", "shape": [4, 1 << 17]} | how
    with pytest.raises(InvalidArgument, match="1572864 BYTES elements exceed the limit of 1048576"):
        plan(*(texts | {"name": name} for name in "abc"))


@pytest.mark.parametrize("given", [0, 1])
def test_plain_bytes_elements_are_bounded_in_number(given: int) -> None:
    texts = {"name": "x", "datatype": "BYTES", "shape": [(1 << 20) + given], "data": []}
    error = "1048577 BYTES elements exceed" if given else "needs 1048576 elements"
    with pytest.raises(InvalidArgument, match=error):
        plain_inputs(read(json.dumps({"inputs": [texts]}).encode()))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"inputs": [{"name": str(n), "shape": [0], "datatype": "INT8", "data": []} for n in range(4097)]}, "inputs"),
        ({"inputs": [], "outputs": [{"name": str(n)} for n in range(4097)]}, "outputs"),
        ({"inputs": [], "parameters": {str(n): n for n in range(1025)}}, "parameters"),
    ],
)
def test_what_there_is_of_each_kind_is_bounded(body: dict[str, object], place: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"of length <= \d+ - at `\$\.{place}`"):
        read(json.dumps(body).encode())


def test_a_form_belongs_to_run() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n\x89PNG\r\n--b--\r\n'
    for text in (body, memoryview(body)):
        with pytest.raises(InvalidArgument, match="not an inference request") as raised:
            read(text)
        assert "'/run'" in raised.value.hint
    with pytest.raises(InvalidArgument, match="not an inference request") as raised:
        read(b"{")
    assert not raised.value.hint
