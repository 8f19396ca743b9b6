"""BentoML, Pillow and ONNX Runtime: JPEG in, labels out, as users of BentoML write it.

python -m benchmarks.pipelines.bentoml_app model.onnx

The endpoint takes the picture as the raw body, which is faster than a form. It does not merge requests: on one core, a batch of this
network takes as long per picture as a single picture.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import bentoml
from PIL import Image

from benchmarks.peers.announce import session
from benchmarks.peers.bentoml_app import serve
from benchmarks.pipelines.by_hand import answer


@bentoml.service(
    workers=1,
    traffic={"timeout": 60, "max_concurrency": 4096},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Pictures:
    def __init__(self) -> None:
        self.session = session(os.environ["PEER_MODEL"])

    @bentoml.api(route="/classify")
    def classify(self, image: Image.Image, /) -> dict[str, Any]:
        return answer(self.session, image.convert("RGB"))


if __name__ == "__main__":
    sys.exit(serve("benchmarks.pipelines.bentoml_app:Pictures"))
