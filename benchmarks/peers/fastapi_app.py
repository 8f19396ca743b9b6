"""FastAPI + uvicorn + ONNX Runtime behind the JSON form of the Open Inference Protocol, as its users write it; and the bytes
of one row at ``/raw``, for tensors that nobody would write as JSON.

    python -m benchmarks.peers.fastapi_app model.onnx

Of the ways tried this is the quickest: typed bodies, which pydantic reads and writes in Rust, as quick as orjson called by
hand, where a ``dict`` passes through Python's ``json`` and ``jsonable_encoder``; and ``async def``, which calls the model on
the event loop, where a ``def`` endpoint hops to a thread pool for each request. uvicorn finds uvloop and httptools; its
access log is off. The session has ONNX Runtime's defaults, with one exception, in its favour: by default it takes a thread
per core of the host and pins it there, even to cores that this process may not use; here it takes one per core that it may.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel


class Tensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[float]


class InferRequest(BaseModel):
    inputs: list[Tensor]


class InferResponse(BaseModel):
    model_name: str
    outputs: list[Tensor]


def make_app(session: onnxruntime.InferenceSession, url: str) -> FastAPI:
    """The application; prints the line ``ready http=…`` once it is started."""
    names = [output.name for output in session.get_outputs()]
    first, shape = session.get_inputs()[0].name, session.get_inputs()[0].shape[1:]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        print(f"ready http={url}", flush=True)
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v2/models/{model}/infer")
    async def infer(model: str, request: InferRequest) -> InferResponse:
        inputs = {tensor.name: np.array(tensor.data, np.float32).reshape(tensor.shape) for tensor in request.inputs}
        arrays = session.run(None, inputs)
        outputs = [
            Tensor(name=name, shape=list(array.shape), datatype="FP32", data=array.reshape(-1).tolist())
            for name, array in zip(names, arrays, strict=True)
        ]
        return InferResponse(model_name=model, outputs=outputs)

    @app.post("/raw")
    async def raw(request: Request) -> Response:
        (array,) = session.run(None, {first: np.frombuffer(await request.body(), np.float32).reshape(1, *shape)})
        return Response(array.tobytes(), media_type="application/octet-stream")

    return app


def main() -> None:
    """Serve the model named on the command line on a free port until told to stop."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(sys.argv[1], options)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    app = make_app(session, f"127.0.0.1:{listener.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()
