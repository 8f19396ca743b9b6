"""FastAPI, Pillow and ONNX Runtime: JPEG in, labels out, as users of FastAPI write it.

python -m benchmarks.pipelines.fastapi_app model.onnx

The endpoint takes the picture as the raw body, which is faster than a form. It is ``async def`` and works on the event loop: on one
core, a thread pool only adds switches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import onnxruntime
from fastapi import FastAPI, Request

from benchmarks.peers.fastapi_app import serve
from benchmarks.pipelines.by_hand import answer, opened


def make_app(session: onnxruntime.InferenceSession, url: str) -> FastAPI:
    """The application. It prints the line ``ready http=…`` once it has started."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        print(f"ready http={url}", flush=True)
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, Any]:
        return answer(session, opened(await request.body()))

    return app


if __name__ == "__main__":
    serve(make_app)
