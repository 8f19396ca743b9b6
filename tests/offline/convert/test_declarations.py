from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.declarations import (
    check_declared,
    check_inputs,
    chosen_outputs,
    declared_input,
    free_axes,
    input_text,
    parse_dynamic,
    parse_inputs,
)
from penstock.tensor import DataType, TensorSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("image:float32[N,3,224,224]", InputSpec("image", DataType.FP32, ("N", 3, 224, 224))),
        (" ids : INT64 [ batch , seq ] ", InputSpec("ids", DataType.INT64, ("batch", "seq"))),
        ("x:FP16[]", InputSpec("x", DataType.FP16, ())),
        ("x:string[N]", InputSpec("x", DataType.BYTES, ("N",))),
        ("x[?,-1,4]", InputSpec("x", None, ("x_0", "x_1", 4))),
        ("a.b:float", InputSpec("a.b", DataType.FP32, None)),
        ("image:0", InputSpec("image:0", None, None)),
        ("image:0:uint8[1]", InputSpec("image:0", DataType.UINT8, (1,))),
        ("x", InputSpec("x", None, None)),
    ],
)
def test_declarations(text: str, spec: InputSpec) -> None:
    assert parse_inputs([text]) == (spec,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not name the input"),
        (":float32[1]", "does not name the input"),
        ("x:floot32[1]", "unknown type 'floot32'"),
        ("x:float32[0]", "axis 0 of input 'x' the size '0'"),
        ("x:float32[-2]", "the size '-2'"),
        ("x:float32[1.5]", "the size '1.5'"),
        ("x:float32[99999999999]", "the size '99999999999'"),
        ("x:float32[1", "not the declaration|unknown type"),
        ("x:float32[1]]", "not the declaration|unknown type"),
        ("x:float32[" + "1," * 80 + "1]", "81 dimensions"),
    ],
)
def test_wrong_declarations(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        parse_inputs([text])
    assert raised.value.hint


def test_an_input_is_declared_once() -> None:
    with pytest.raises(InvalidArgument, match="declares input 'x' twice"):
        parse_inputs(["x", "x:int8"])


def test_free_dimensions() -> None:
    assert parse_dynamic(["image:0=batch,2=height, 3=width", "input:0:1=n", "y:0"]) == {
        "image": {0: "batch", 2: "height", 3: "width"},
        "input:0": {1: "n"},
        "y": {0: "y_0"},
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["image"], "does not name an input and its axes"),
        ([":0=n"], "does not name an input"),
        (["x:"], "the axis ''"),
        (["x:-1=n"], "the axis '-1=n'"),
        (["x:64=n"], "the axis '64=n'"),
        (["x:0=n,0=m"], "axis 0 of input 'x' twice"),
        (["x:0=n", "x:1=m"], "input 'x' twice"),
        (["x:0=a=b"], "the axis '0=a=b'"),
    ],
)
def test_wrong_free_dimensions(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_dynamic(texts)


_SIZES = st.integers(1, 9999) | st.from_regex(r"[a-zA-Z_][a-z0-9_]{0,5}", fullmatch=True).filter(
    lambda text: text.lower() != "none"
)


@given(
    st.from_regex(r"[a-z][a-z0-9_.:/]{0,9}[a-z]", fullmatch=True),
    st.sampled_from(list(DataType)),
    st.none() | st.lists(_SIZES, max_size=5).map(tuple),
)
def test_the_text_of_a_declaration_is_read_back(name: str, datatype: DataType, shape: tuple[int | str, ...]) -> None:
    spec = InputSpec(name, datatype, shape)
    assert parse_inputs([input_text(spec)]) == (spec,)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_inputs, parse_dynamic):
        try:
            parse([text])
        except InvalidArgument as error:
            assert error.hint  # noqa: PT017


OPTIONS = ConvertOptions(
    (InputSpec("x", None, ("N", 4)),), {"y": np.ones((2, 3), np.float16)}, {"x": {1: "L"}, "y": {0: "N"}}
)


def test_an_input_is_as_declared_or_as_in_the_sample():
    assert declared_input("x", OPTIONS) == InputSpec("x", None, ("N", "L"))
    assert declared_input("y", OPTIONS) == InputSpec("y", DataType.FP16, ("N", 3))
    assert declared_input("z", OPTIONS, (1, 2)) == InputSpec("z", None, (1, 2))
    assert declared_input("z", OPTIONS) == InputSpec("z", None, None)
    with pytest.raises(InvalidArgument, match="input 'x' has no axis 2"):
        declared_input("x", ConvertOptions(OPTIONS.inputs, dynamic={"x": {2: "L"}}))


def test_inputs_and_outputs_that_the_model_does_not_have_are_refused():
    check_inputs(OPTIONS, ["x", "y"])
    with pytest.raises(InvalidArgument, match="no input 'y'") as caught:
        check_inputs(OPTIONS, ["x"])
    assert caught.value.hint == "its inputs are x"
    assert chosen_outputs(OPTIONS, ["b", "a"]) == ["b", "a"]
    assert chosen_outputs(ConvertOptions(outputs=("a",)), ["b", "a"]) == ["a"]
    with pytest.raises(InvalidArgument, match="no output 'c'"):
        chosen_outputs(ConvertOptions(outputs=("c",)), ["b", "a"])


def test_free_dimensions_have_the_users_names():
    specs = [TensorSpec(name, DataType.FP32, (-1, -1)) for name in ("x", "y", "z")]
    found = {name: [axis.name for axis in axes] for name, axes in free_axes(specs, OPTIONS).items()}
    assert found == {"x": ["N", "L"], "y": ["N", "y_1"], "z": ["batch", "z_1"]}
    assert free_axes([TensorSpec("x", DataType.FP32, (3,))], OPTIONS) == {"x": ()}


@given(st.lists(st.tuples(st.sampled_from([-1, 1, 3]), st.sampled_from([1, 3, "N"])), max_size=4))
def test_a_declaration_is_refused_where_the_model_has_another_size(dims: list[tuple[int, int | str]]) -> None:
    spec = TensorSpec("x", DataType.FP32, tuple(size for size, _ in dims))
    options = ConvertOptions(inputs=(InputSpec("x", None, tuple(wanted for _, wanted in dims)),))
    if all(size == wanted or (size == -1 and wanted == "N") for size, wanted in dims):
        check_declared(spec, options)
    else:
        with pytest.raises(InvalidArgument, match="the model (fixes its size|leaves it free)"):
            check_declared(spec, options)
