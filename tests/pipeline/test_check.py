from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidConfig
from penstock.pipeline.check import checked
from penstock.pipeline.direct import Direct
from penstock.pipeline.function import ModelTraits
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.value import TEXT, Media
from penstock.tensor import DataType, Signature, TensorSpec
from pipelines import FEATURES, LOCAL, SCORES, declared, function

SOFTMAX = {"step": "softmax", "in": "logits", "out": "p"}
MODEL = {"model": "linear", "in": "features", "out": "logits"}
CROPS = {
    "inputs": {"image": {"media": "image"}, "boxes": {"shape": [-1, 4]}, "features": {"shape": [3]}},
    "labels": None,
    "examples": None,
}


def test_types_flow_from_end_to_end() -> None:
    found = function()
    assert {name: str(kind) for name, kind in found.outputs.items()} == {
        "label": "list of text",
        "p": "tensor FP32 [2]",
    }
    assert found.types["logits"].shape == (2,)
    assert found.models == ["linear"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": [MODEL, {**SOFTMAX, "step": "softmux"}]}, r"there is no step 'softmux' \(did you mean 'softmax'"),
        ({"steps": [{**MODEL, "model": "linar"}, SOFTMAX]}, "no step runs the model 'linear'"),
        ({"steps": [MODEL, {**SOFTMAX, "in": "logit"}]}, r"'logit', which no step produces \(did you mean 'logits'"),
        ({"steps": [MODEL, {**SOFTMAX, "axes": 1}]}, r"step 'softmax' has no option 'axes' \(did you mean 'axis'"),
        (
            {"steps": [MODEL, {**SOFTMAX, "axis": "x"}]},
            "option 'axis' of step 'softmax' is wrong: Expected 'whole number', got 'text'",
        ),
        (
            {
                "steps": [
                    MODEL,
                    {**SOFTMAX, "step": "argmax"},
                    {"step": "log_mel", "in": "p", "out": "q", "rate": 8000, "norm": "x"},
                ]
            },
            r"option 'norm' of step 'log_mel' is wrong: Invalid value 'x' \(use one of: slaney, none",
        ),
        (
            {"steps": [MODEL, {"step": "resize", "in": "logits", "out": "p", "size": 9}]},
            r"option 'size' of step 'resize' is wrong: Expected 'list', got 'whole number' \(Height and width of the result",
        ),
        ({"steps": [MODEL, {**SOFTMAX, "out": {"valve": "p"}}]}, r"no output 'valve' \(did you mean 'value'"),
        ({"steps": [MODEL, {**SOFTMAX, "in": {"valve": "logits"}}]}, r"no input 'valve' \(did you mean 'value'"),
        ({"steps": [MODEL, {"step": "softmax", "out": "p"}]}, "input 'value' has no value"),
        ({"steps": [MODEL, {**SOFTMAX, "in": ["logits", "p"]}]}, "2 inputs are given, but there are 1"),
        (
            {"steps": [{**MODEL, "in": "p"}, SOFTMAX], "inputs": {"x": {}}},
            "wait for one another: 'linear' -> 'softmax' -> 'linear'",
        ),
        ({"steps": [MODEL, SOFTMAX, {**SOFTMAX, "out": "q"}]}, "step 'softmax-2' is not needed for any output"),
        ({"inputs": {"features": {"shape": [3]}, "other": {}}}, "no step reads the input 'other'"),
        ({"constants": {"c": 1}, "steps": [MODEL, SOFTMAX]}, "step 'constant c' is not needed"),
        ({"outputs": ["p", "q"]}, "no step produces output 'q'"),
        ({"outputs": ["p", "p"]}, "an output is listed twice"),
        ({"optional": ["q"]}, "'q' is not an output"),
        (
            {"steps": [MODEL, SOFTMAX, {**SOFTMAX, "name": "softmax", "out": "q"}], "outputs": ["q"]},
            "2 steps are called 'softmax'",
        ),
        ({"steps": [MODEL, {**SOFTMAX, "when": "logits > 0"}]}, "'logits > 0' needs one number"),
        ({"steps": [MODEL, {**SOFTMAX, "when": "p >"}]}, "condition 'p >' cannot be read"),
        (
            {"inputs": {"features": {"shape": [4]}}},
            r"input 'x' of model 'linear' is tensor FP32 \[3\], but the value is .*\[4\]",
        ),
        ({"inputs": {"features": {"shape": [3], "datatype": "UINT8"}}}, "UINT8 .*step normalise"),
        ({"inputs": {"features": {"media": "image"}}}, "the value is file .*decode it first"),
        ({"inputs": {"features": {"media": "text", "shape": [3]}}}, "input 'features' is text, which has no shape"),
        ({"inputs": {"features": {"shape": [-1, 3]}}}, "batch: false"),
        ({"constants": {"c": {"a": 1}}, "outputs": ["p", "c"]}, "neither text nor numbers"),
    ],
)
def test_mistakes_are_found_when_the_pipeline_is_checked(changes: dict[str, Any], message: str) -> None:
    base = {"steps": [MODEL, SOFTMAX], "outputs": ["p"], "labels": None}
    with pytest.raises(InvalidConfig, match=message):
        function(**{**base, **changes})


def test_errors_name_the_line() -> None:
    with pytest.raises(InvalidConfig, match=r"^pipeline.yaml, line 10: step 'top_k': .*3 labels, but .* 2 classes"):
        function(SCORES.replace("[no, yes]", "[no, yes, maybe]"))
    with pytest.raises(InvalidConfig, match=r"^pipeline.yaml, line 9: step 'softmax' reads value 'logit'"):
        function(SCORES.replace("in: logits", "in: logit"))


def test_a_condition_and_a_constant() -> None:
    text = SCORES.replace("out: p}", "out: p, when: 'limit >= 1'}")
    text = text.replace("outputs:", "constants: {limit: 1}\noptional: [p, label]\noutputs:")
    found = function(text)
    assert Direct(found, LOCAL).call({"features": FEATURES}).keys() == {"label", "p"}
    skipped = function(text.replace("limit: 1}", "limit: 0}"))
    assert Direct(skipped, LOCAL).call({"features": FEATURES}) == {}


def _mapped(**changes: Any) -> Any:
    steps = [
        {"step": "decode_image", "in": "image", "out": "pixels"},
        {"step": "crop_boxes", "in": ["pixels", "boxes"], "out": "crops"},
        {
            "map": "crops",
            "as": "crop",
            "out": {"p": "ps"},
            "steps": [MODEL, {**SOFTMAX}],
            **changes,
        },
    ]
    return function(**{**CROPS, "steps": steps, "outputs": ["ps"]})


def test_steps_for_each_element_read_values_outside() -> None:
    with pytest.raises(InvalidConfig, match="'features' is also a value outside"):
        _mapped(**{"as": "features", "steps": [MODEL, SOFTMAX]}, map="crops", name="each")
    found = _mapped(
        steps=[MODEL, SOFTMAX, {"step": "constant", "value": 1, "out": "one"}], out={"p": "ps", "one": "ones"}
    )
    assert found.outputs["ps"].many


_EACH = {"map": "frames", "as": "frame", "out": {"y": "ys"}, "steps": [{**SOFTMAX, "in": "frame", "out": "y"}]}
_FRAMES = {"step": "frames", "in": "sound", "out": "frames", "length": 2, "hop": 2}


@pytest.mark.parametrize(("limit", "count"), [(0.0, 0), (1.0, 2)])
def test_a_condition_of_a_map_is_no_value_of_its_steps(limit: float, count: int) -> None:
    inputs = {"sound": {"shape": [-1]}, "limit": {"shape": []}}
    steps = [_FRAMES, {**_EACH, "when": "limit >= 1"}]
    found = function(**{**CROPS, "inputs": inputs, "steps": steps, "outputs": ["ys"], "models": None}, optional=["ys"])
    given = {"sound": np.zeros(4, np.float32), "limit": np.array(limit, np.float32)}
    for run in (Direct(found, {}).call, Stages(found, {}).call):
        assert len(run(given).get("ys", [])) == count


def test_the_steps_of_a_map_read_its_list_too() -> None:
    code = b"def numbered(all: list[Tensor['FP32', 2]], one: Tensor['FP32', 2]) -> str:\n    return f'{one[0]} of {len(all)}'"
    inner = {"python": "f.py:numbered", "in": {"all": "frames", "one": "frame"}, "out": "y"}
    changes = {**CROPS, "inputs": {"sound": {"shape": [-1]}}, "outputs": ["ys"], "models": None}
    found = function(
        allow_python=True, files={"f.py": code}, **{**changes, "steps": [_FRAMES, {**_EACH, "steps": [inner]}]}
    )
    for run in (Direct(found, {}).call, Stages(found, {}).call):
        assert run({"sound": np.arange(4, dtype=np.float32)}) == {"ys": ["0.0 of 2", "2.0 of 2"]}


def test_only_lists_are_mapped() -> None:
    step = {"map": "features", "as": "one", "out": {"y": "ys"}, "steps": [{**SOFTMAX, "in": "one", "out": "y"}]}
    with pytest.raises(InvalidConfig, match=r"'features' is tensor FP32 \[3\], not a list"):
        function(steps=[step], outputs=["ys"], labels=None, models=None)


def test_the_order_of_channels() -> None:
    signature = Signature(
        (TensorSpec("x", DataType.UINT8, (-1, -1, -1, 3)),), (TensorSpec("y", DataType.FP32, (-1, 2)),)
    )
    steps = [
        {"step": "decode_image", "in": "image", "out": "pixels", "colour": "rgb"},
        {"step": "resize", "in": "pixels", "out": "small", "size": [4, 4]},  # the order goes through other steps
        {"model": "net", "in": "small", "out": "y", "colour": "bgr"},
    ]
    given = {"inputs": {"image": {"media": "image"}}, "models": {"net": "net.onnx"}, "outputs": ["y"], "labels": None}
    with pytest.raises(
        InvalidConfig, match=r"needs channels in the order bgr, but they are rgb \(decode the picture with"
    ):
        checked(declared(SCORES, steps=steps, **given), {"net": ModelTraits(signature)}, StepResources())
    steps[0]["colour"] = "bgr"
    found = checked(declared(SCORES, steps=steps, **given), {"net": ModelTraits(signature)}, StepResources())
    assert found.inputs["image"].media is Media.IMAGE


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch", "with_batch", "shapes"),
    [
        ([(-1, 3)], [(-1, 2)], None, {"i0", "o0"}, [(2,)]),
        ([(1, 3)], [(1, 2), (-1, 4)], None, {"i0", "o0"}, [(2,), (-1, 4)]),
        ([(-1, 3)], [()], None, {"i0"}, [()]),
        ([(-1, 3)], [(-1, 2)], False, set(), [(-1, 2)]),
        ([(5, 3)], [(5,)], None, set(), [(5,)]),
    ],
)
def test_batch_axes(inputs: Any, outputs: Any, batch: bool | None, with_batch: set[str], shapes: Any) -> None:
    def specs(prefix: str, given: Any) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{n}", DataType.FP32, shape) for n, shape in enumerate(given))

    signature = Signature(specs("i", inputs), specs("o", outputs))
    whole = [shape if batch is False or f"i{n}" not in with_batch else shape[1:] for n, shape in enumerate(inputs)]
    names = [f"o{n}" for n in range(len(outputs))]
    step = {"model": "net", "in": "x", "out": {name: name for name in names}} | (
        {} if batch is None else {"batch": batch}
    )
    given = {
        "inputs": {"x": {"shape": list(whole[0])}},
        "models": {"net": "n"},
        "steps": [step],
        "outputs": names,
        "labels": None,
    }
    found = checked(declared(SCORES, **given), {"net": ModelTraits(signature, 4)}, StepResources())
    work = found.work["net"]
    assert work.with_batch == with_batch
    assert [found.outputs[name].shape for name in names] == shapes


def test_text_of_models() -> None:
    signature = Signature((TensorSpec("x", DataType.BYTES, (-1,)),), (TensorSpec("y", DataType.BYTES, (-1,)),))
    given = {"inputs": {"x": {"media": "text"}}, "models": {"net": "n"}, "labels": None, "outputs": ["y"]}
    found = checked(
        declared(SCORES, steps=[{"model": "net", "in": "x", "out": "y"}], **given),
        {"net": ModelTraits(signature)},
        StepResources(),
    )
    assert found.outputs == {"y": TEXT}
    work = found.work["net"]
    (array,) = work.to_model({"x": "héllo"}).values()
    assert (array.shape, array[0]) == ((1,), "héllo".encode())
    assert work.from_model({"y": array}) == {"y": "héllo"}
    assert isinstance(work.from_model({"y": np.array([b"\xff"], object)})["y"], str)


def test_a_value_of_two_steps_has_the_type_of_both() -> None:
    """The type must not claim the size of the step that is checked last."""
    inputs = {"a": {"shape": []}, "given": {"shape": [5]}}
    wiring = {"in": "given", "out": {"scores": "best", "labels": "labels"}}
    steps = [
        {"step": "threshold", **wiring, "at": 0.5, "when": "a > 0"},
        {"step": "top_k", **wiring, "k": 1, "when": "a <= 0"},
    ]
    changes: dict[str, Any] = {"inputs": inputs, "models": None, "labels": None, "examples": None}
    found = function(**changes, steps=steps, outputs=["best", "labels"])
    assert (found.types["best"].shape, found.types["labels"].count) == ((-1,), -1)
    alone = function(
        **changes | {"inputs": {"given": {"shape": [5]}}}, steps=[{**steps[1], "when": ""}], outputs=["labels"]
    )
    assert alone.types["labels"].count == 1
