"""FastAPI, Pillow and ONNX Runtime: JPEG in, labels out, as users of FastAPI write it.

python -m benchmarks.pipelines.fastapi_app model.onnx

The endpoint takes the picture as the raw body, which is faster than a form. It is ``async def`` and works on the event loop: on one
core, a thread pool only adds switches.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import onnxruntime
from fastapi import FastAPI, Request
from PIL import Image

from benchmarks.peers.fastapi_app import serve
from benchmarks.pipelines.pictures import MEAN, SIDE, STD


def make_app(session: onnxruntime.InferenceSession, url: str) -> FastAPI:
    """The application. It prints the line ``ready http=…`` once it has started."""
    mean, std = np.array(MEAN, np.float32), np.array(STD, np.float32)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        print(f"ready http={url}", flush=True)
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, Any]:
        picture = Image.open(io.BytesIO(await request.body())).convert("RGB")
        small = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32)
        tensor = np.ascontiguousarray(((small / 255 - mean) / std).transpose(2, 0, 1))
        (logits,) = session.run(None, {"input": tensor[None]})
        powers = np.exp(logits[0] - logits[0].max())
        scores = powers / powers.sum()
        best = np.argsort(-scores, kind="stable")[:5]
        return {"labels": [str(one) for one in best], "best": scores[best].tolist(), "scores": scores.tolist()}

    return app


if __name__ == "__main__":
    serve(make_app)
