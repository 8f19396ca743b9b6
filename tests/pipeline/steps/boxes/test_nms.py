"""Non-maximum suppression against its definition, OpenCV and ONNX."""

from __future__ import annotations

import cv2
import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.boxes.nms import Nms
from penstock.pipeline.value import ValueType
from penstock.tensor import Array


def torchvision_nms(boxes: Array, scores: Array, iou: float) -> list[int]:
    """The loop of torchvision's ``nms_kernel.cpp``, in FP32, with a stable sort."""
    x1, y1, x2, y2 = boxes.T
    areas = (x2 - x1) * (y2 - y1)
    order = np.argsort(-scores, kind="stable")
    suppressed, keep = np.zeros(len(boxes), bool), []
    for position, i in enumerate(order):
        if suppressed[i]:
            continue
        keep.append(int(i))
        for j in order[position + 1 :]:
            width = max(np.float32(0), min(x2[i], x2[j]) - max(x1[i], x1[j]))
            height = max(np.float32(0), min(y2[i], y2[j]) - max(y1[i], y1[j]))
            inter = width * height
            union = areas[i] + areas[j] - inter
            # 0 / 0 is NaN in C++, which is not greater. C++ compares a float with a double.
            if union != 0 and float(inter / union) > iou:
                suppressed[j] = True
    return keep


@st.composite
def detections(draw: st.DrawFn, least_side: int = 0) -> tuple[Array, Array, Array]:
    """Boxes that overlap much, also without area, with equal scores."""
    count = draw(st.integers(0, 25))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    starts = rng.integers(0, 12, (count, 2))
    boxes = np.concatenate([starts, starts + rng.integers(least_side, 12, (count, 2))], 1).astype(np.float32)
    return boxes, (rng.integers(1, 30, count) / 31).astype(np.float32), rng.integers(0, 3, count)


@settings(deadline=None, max_examples=200)
@given(st.one_of(detections(), detections(least_side=-4)), st.sampled_from([0.0, 0.3, 0.45, 0.5, 1.0]))
def test_equals_the_loop_of_torchvision(found: tuple[Array, Array, Array], iou: float) -> None:
    boxes, scores, classes = found
    result = Nms(iou=iou).run({"boxes": boxes, "scores": scores})
    kept = torchvision_nms(boxes, scores, iou)
    np.testing.assert_array_equal(result["boxes"], boxes[kept])
    np.testing.assert_array_equal(result["scores"], scores[kept])
    assert not result["classes"].any()
    by_class = [torchvision_nms(boxes[classes == one], scores[classes == one], iou) for one in range(3)]
    kept = sorted(
        (np.flatnonzero(classes == one)[index] for one, them in enumerate(by_class) for index in them),
        key=lambda i: (-scores[i], i),
    )
    result = Nms(iou=iou).run({"boxes": boxes, "scores": scores, "classes": classes})
    np.testing.assert_array_equal(result["boxes"], boxes[kept])
    np.testing.assert_array_equal(result["classes"], classes[kept])


@st.composite
def close_calls(draw: st.DrawFn) -> tuple[Array, Array, float]:
    """Boxes with any coordinates, and a limit that is the intersection over union of two of them, or one of its neighbours."""
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    starts = rng.uniform(0, 40, (draw(st.integers(2, 12)), 2))
    boxes = np.concatenate([starts, starts + rng.uniform(1, 60, starts.shape)], 1).astype(np.float32)
    width, height = np.clip(np.minimum(boxes[0, 2:], boxes[1, 2:]) - np.maximum(boxes[0, :2], boxes[1, :2]), 0, None)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    inter = width * height
    exact = float(inter / (areas[0] + areas[1] - inter))
    limit = draw(st.sampled_from([exact, np.nextafter(exact, 0), np.nextafter(exact, 1), round(exact, 7)]))
    return boxes, rng.random(len(boxes), np.float32), min(max(float(limit), 0.0), 1.0)


@settings(deadline=None, max_examples=300)
@given(close_calls())
def test_equals_the_loop_of_torchvision_next_to_the_limit(found: tuple[Array, Array, float]) -> None:
    boxes, scores, iou = found
    result = Nms(iou=iou).run({"boxes": boxes, "scores": scores})
    np.testing.assert_array_equal(result["boxes"], boxes[torchvision_nms(boxes, scores, iou)])


def test_a_limit_that_fp32_rounds_up() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 3]], np.float32)  # 0.3 in FP32 is greater than 0.3
    assert len(Nms(iou=0.3).run({"boxes": boxes, "scores": np.array([1, 0.5], np.float32)})["scores"]) == 1
    assert len(Nms(iou=0.3000001).run({"boxes": boxes, "scores": np.array([1, 0.5], np.float32)})["scores"]) == 2


def by_onnx(boxes: Array, scores: Array, iou: float) -> list[int]:
    """The boxes that ONNX's NonMaxSuppression keeps."""
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["kept"])
    inputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, None, 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 1, None]),
    ]
    constants = [
        helper.make_tensor("most", TensorProto.INT64, [1], [1000]),
        helper.make_tensor("iou", TensorProto.FLOAT, [1], [iou]),
    ]
    outputs = [helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3])]
    model = helper.make_model(
        helper.make_graph([node], "nms", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=10,
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    kept = session.run(None, {"boxes": boxes[None], "scores": scores[None, None]})[0]
    return [int(index) for _, _, index in kept]


@settings(deadline=None, max_examples=40)
@given(detections(least_side=1), st.sampled_from([0.31, 0.47]))
def test_equals_opencv_and_onnx(found: tuple[Array, Array, Array], iou: float) -> None:
    boxes, scores, _ = found
    scores = np.linspace(1, 0.1, len(scores), dtype=np.float32)  # they order equal scores otherwise
    kept = Nms(iou=iou).run({"boxes": boxes, "scores": scores})["scores"].tolist()
    assert kept == scores[by_onnx(boxes, scores, iou)].tolist()
    rectangles = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    by_opencv = list(cv2.dnn.NMSBoxes(rectangles.tolist(), scores.tolist(), 0.0, iou)) if len(boxes) else []
    assert kept == scores[by_opencv].tolist() if len(boxes) else kept == []


def test_more_classes_than_one_matrix_of_scores_holds() -> None:
    boxes, classes = np.tile(np.array([[0, 0, 10, 10]], np.float32), (1200, 1)), np.arange(1200) % 1000
    scores = np.linspace(1, 0, 1200, dtype=np.float32)
    found = Nms(max_boxes=2000).run({"boxes": boxes, "scores": scores, "classes": classes})
    assert found["classes"].tolist() == list(range(1000))
    np.testing.assert_array_equal(found["scores"], scores[:1000])


def test_areas_beyond_fp32_have_no_intersection_over_union() -> None:
    boxes = np.array([[0, 0, 3e38, 3e38]] * 2, np.float32)
    assert len(Nms().run({"boxes": boxes, "scores": np.ones(2, np.float32)})["scores"]) == 2


def test_options() -> None:
    boxes, scores = np.array([[0, 0, 10, 10]] * 3, np.float32), np.array([0.1, 0.3, 0.2], np.float32)
    classes = np.array([0, 1, 2])
    inputs = {"boxes": boxes, "scores": scores, "classes": classes}
    assert Nms().run(inputs)["classes"].tolist() == [1, 2, 0]
    assert Nms(max_boxes=2).run(inputs)["classes"].tolist() == [1, 2]
    assert Nms(across_classes=True).run(inputs)["classes"].tolist() == [1]


def test_wrong_values() -> None:
    one = np.ones((1, 4), np.float32)
    with pytest.raises(InvalidInput, match="'scores' contains NaN"):
        Nms().run({"boxes": one, "scores": np.array([np.nan], np.float32)})
    with pytest.raises(InvalidInput, match="'boxes' contains NaN or infinity"):
        Nms().run({"boxes": one * np.inf, "scores": np.ones(1, np.float32)})
    with pytest.raises(InvalidInput, match="1 boxes, 2 scores"):
        Nms().run({"boxes": one, "scores": np.ones(2, np.float32)})
    with pytest.raises(InvalidInput, match=r"'boxes' has the shape \[1, 5\], not \[n, 4\]"):
        Nms().run({"boxes": np.ones((1, 5), np.float32), "scores": np.ones(1, np.float32)})
    types = {"boxes": ValueType(shape=(-1, 4)), "scores": ValueType(shape=(-1,))}
    assert Nms().check(types)["boxes"].shape == (-1, 4)
    with pytest.raises(InvalidConfig, match=r"floating-point numbers \[n, 4\]"):
        Nms().check({**types, "boxes": ValueType(shape=(-1, 5))})
    with pytest.raises(InvalidConfig, match="INT64"):
        Nms().check({**types, "classes": ValueType(shape=(-1,))})
