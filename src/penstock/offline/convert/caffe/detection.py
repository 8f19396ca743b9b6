"""Layers of SSD detectors (https://arxiv.org/abs/1512.02325): PriorBox and DetectionOutput."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.layer import Layer, Shape, Writer, check_size, scalar, whole
from penstock.tensor import Array


class PriorBox(Layer):
    """Boxes of several sizes around every pixel of a feature map, relative to the image, and their variances."""

    parameter = "prior_box_param"

    def _sides(self) -> list[tuple[float, float]]:
        """Width and height of each box of one pixel."""
        least, most = self.given.all("min_size", float), self.given.all("max_size", float)
        ratios: list[float] = []
        for ratio in self.given.all("aspect_ratio", float):
            if all(abs(ratio - one) >= 1e-6 for one in (1.0, *ratios)):
                ratios += [ratio, 1 / ratio] if self.given.get("flip", True) else [ratio]
        if not least or len(most) not in (0, len(least)) or min([*least, *most, *ratios]) <= 0:
            raise InvalidModel(f"{len(least)} 'min_size', {len(most)} 'max_size' and the ratios {ratios} do not fit")
        found = []
        for number, size in enumerate(least):
            found.append((size, size))
            found += [((size * most[number]) ** 0.5,) * 2] if most else []
            found += [(size * ratio**0.5, size / ratio**0.5) for ratio in ratios]
        return found

    def _boxes(self, feature: Shape, image: Shape) -> Array:
        given, (rows, columns), sides = self.given, feature[2:], self._sides()
        height = given.get("img_h", given.get("img_size", 0)) or image[2]
        width = given.get("img_w", given.get("img_size", 0)) or image[3]
        step_h = given.get("step_h", given.get("step", 0.0)) or height / rows
        step_w = given.get("step_w", given.get("step", 0.0)) or width / columns
        check_size([rows, columns, len(sides), 8])
        offset = given.get("offset", 0.5)
        y, x, side = np.meshgrid(
            (np.arange(rows) + offset) * step_h,
            (np.arange(columns) + offset) * step_w,
            range(len(sides)),
            indexing="ij",
        )
        w, h = np.array(sides)[side].transpose(3, 0, 1, 2) / 2
        boxes = np.stack([(x - w) / width, (y - h) / height, (x + w) / width, (y + h) / height], -1).reshape(-1)
        boxes = boxes.clip(0, 1) if given.get("clip", False) else boxes
        variances = given.all("variance", float) or [0.1]
        if len(variances) not in (1, 4):
            raise InvalidModel(f"{len(variances)} 'variance' are given, but 1 or 4 are needed")
        return np.stack([boxes, np.resize(variances, boxes.size)])[None].astype(np.float32)

    def run(self, *bottoms: Array) -> Array:
        feature, image = bottoms
        return self._boxes(feature.shape, image.shape)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Identity", self._boxes(shapes[0], shapes[1])))


class DetectionOutput(Layer):
    """Decodes boxes, drops those that overlap a better one of their class, and keeps the best of each image.

    Each row of the result has the image, the class, the score and the box. Without any box, each image has one row of -1.
    """

    parameter = "detection_output_param"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        given, nms = self.given, self.given.message("nms_param")
        self._classes, self._background = given.get("num_classes", 0), given.get("background_label_id", 0)
        self._code = given.get("code_type", "CORNER")
        self._is_in_target = given.get("variance_encoded_in_target", False)
        self._overlap, self._top = nms.get("nms_threshold", 0.3), nms.get("top_k", -1)
        self._keep, self._least = given.get("keep_top_k", -1), given.get("confidence_threshold", float("-inf"))

    def refusal(self) -> str:
        if self._code not in ("CORNER", "CENTER_SIZE"):
            return f"'code_type: {self._code}'"
        if not self.given.get("share_location", True):
            return "'share_location: false'"
        return "" if self.given.message("nms_param").get("eta", 1.0) == 1 else "'eta' other than 1"

    def run(self, *bottoms: Array) -> Array:
        places, scores, priors = bottoms
        scores = scores.reshape(len(scores), -1, self._classes)
        rows: list[list[float]] = []
        for image, boxes in enumerate(self._decoded(places.reshape(len(places), -1, 4), priors.reshape(2, -1, 4))):
            found = []
            for label in range(self._classes):
                if label != self._background:
                    found += [(label, at) for at in self._without_overlaps(boxes, scores[image, :, label])]
            if -1 < self._keep < len(found):
                best = sorted(found, key=lambda one: -scores[image, one[1], one[0]])[: self._keep]
                found = [one for one in found if one in set(best)]
            rows += [[image, label, scores[image, at, label], *boxes[at]] for label, at in found]
        found_rows = np.array(rows, np.float32) if rows else np.full((len(scores), 7), -1, np.float32)
        return found_rows.reshape(1, 1, -1, 7)

    def _decoded(self, places: Array, priors: Array) -> Array:
        boxes, variances = priors
        places = places if self._is_in_target else places * variances
        if self._code == "CORNER":
            return np.asarray(boxes + places)
        size = boxes[:, 2:] - boxes[:, :2]
        center = (boxes[:, :2] + boxes[:, 2:]) / 2 + places[..., :2] * size
        half = np.exp(places[..., 2:]) * size / 2
        return np.concatenate([center - half, center + half], -1)

    def _without_overlaps(self, boxes: Array, scores: Array) -> list[int]:
        order = np.argsort(-scores, kind="stable")
        order = order[scores[order] > self._least]
        order = order if self._top < 0 else order[: self._top]
        kept: list[int] = []
        while order.size:
            kept.append(int(order[0]))
            order = order[1:][_overlaps(boxes[order[0]], boxes[order[1:]]) <= self._overlap]
        return kept

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        places, scores, priors = bottoms
        boxes = self._write_boxes(
            to, to.node("Reshape", places, whole(0, -1, 4)), to.node("Reshape", priors, whole(2, -1, 4))
        )
        scores = to.node("Transpose", to.node("Reshape", scores, whole(0, -1, self._classes)), perm=[0, 2, 1])
        # Priors without a chance are moved below the least score: those of the background, and those beyond ``top_k``.
        ruled_out = np.zeros((1, self._classes, 1), np.float32)
        if 0 <= self._background < self._classes:
            ruled_out[0, self._background] = -np.inf
        ranked = to.node("Add", scores, ruled_out)
        count = shapes[2][2] // 4
        if -1 < self._top < count:
            least = to.node(
                "Slice",
                to.node("TopK", ranked, whole(self._top), count=2)[0],
                whole(self._top - 1),
                whole(self._top),
                whole(2),
            )
            ranked = to.node("Where", to.node("Less", ranked, least), scalar(-np.inf), ranked)
        limit = scalar(max(self._least, float(np.finfo(np.float32).min)))
        chosen = to.node(
            "NonMaxSuppression", boxes, ranked, whole(count), np.array([self._overlap], np.float32), limit.reshape(1)
        )
        image, label, at = to.node("Split", chosen, count=3, axis=1, num_outputs=3)
        score = to.node("GatherND", scores, chosen)
        box = to.node("GatherND", boxes, to.node("Concat", image, at, axis=1))
        columns = [
            to.node("Cast", image, to=1),
            to.node("Cast", label, to=1),
            to.node("Unsqueeze", score, whole(1)),
            box,
        ]
        rows = to.node("Concat", *columns, axis=1)
        images = to.node("Shape", scores, end=1)
        if self._keep > -1:
            rows = to.node("Compress", rows, self._write_best(to, image, score, images), axis=0)
        nothing = to.node("Expand", scalar(-1), to.node("Concat", images, whole(7), axis=0))
        length = to.node("Shape", rows, end=1)
        length = to.node("Where", to.node("Equal", length, whole(0)), images, length)
        rows = to.node("Slice", to.node("Concat", rows, nothing, axis=0), whole(0), length, whole(0))
        return str(to.node("Reshape", rows, whole(1, 1, -1, 7)))

    def _write_boxes(self, to: Writer, places: str, priors: str) -> str:
        boxes, variances = to.node("Split", priors, count=2, axis=0, num_outputs=2)
        places = places if self._is_in_target else to.node("Mul", places, variances)
        if self._code == "CORNER":
            return str(to.node("Add", boxes, places))
        low, high = to.node("Split", boxes, count=2, axis=2, num_outputs=2)
        shift, growth = to.node("Split", places, count=2, axis=2, num_outputs=2)
        size, half = to.node("Sub", high, low), scalar(0.5)
        center = to.node("Add", to.node("Mul", to.node("Add", low, high), half), to.node("Mul", shift, size))
        reach = to.node("Mul", to.node("Mul", to.node("Exp", growth), size), half)
        return str(to.node("Concat", to.node("Sub", center, reach), to.node("Add", center, reach), axis=2))

    def _write_best(self, to: Writer, image: str, score: str, images: str) -> str:
        """For each row, true if its score is among the ``keep_top_k`` best of its image."""
        order = to.node("TopK", score, to.node("Shape", score), count=2)[1]
        numbers = to.node("Range", whole(0).reshape(()), to.node("Squeeze", images), whole(1).reshape(()))
        is_of = to.node("Cast", to.node("Equal", to.node("Gather", image, order), numbers), to=1)
        rank = to.node(
            "ReduceSum", to.node("Mul", is_of, to.node("CumSum", is_of, whole(0).reshape(()))), whole(1), keepdims=0
        )
        is_best = to.node("Cast", to.node("LessOrEqual", rank, scalar(self._keep)), to=6)
        return str(to.node("Cast", to.node("ScatterElements", is_best, order, is_best), to=9))


def _overlaps(one: Array, others: Array) -> Array:
    """Intersection over union of a box with each other one."""
    low, high = np.maximum(one[:2], others[:, :2]), np.minimum(one[2:], others[:, 2:])
    shared, own, area = (
        np.maximum(size, 0).prod(-1) for size in (high - low, one[2:] - one[:2], others[:, 2:] - others[:, :2])
    )
    total = own + area - shared
    return np.asarray(np.divide(shared, total, out=np.zeros_like(total), where=total > 0))


LAYERS: dict[str, type[Layer]] = {"PriorBox": PriorBox, "DetectionOutput": DetectionOutput}
