"""FastAPI, uvicorn and ONNX Runtime with the JSON form of the Open Inference Protocol, as users of FastAPI write it. ``/raw``
accepts the bytes of one row, for tensors that are too large for JSON.

python -m benchmarks.peers.fastapi_app model.onnx

This is the fastest of several tried variants. Typed bodies are read and written by pydantic in Rust, as fast as by orjson. A
``dict`` would pass through Python's ``json`` and ``jsonable_encoder``. The endpoints are ``async def`` and call the model on the
event loop. A ``def`` endpoint would use a thread pool for each request. uvicorn uses uvloop and httptools, without an access log.
The session has ONNX Runtime's defaults except for the number of threads. By default, ONNX Runtime starts and pins one thread per
core of the host, even on cores that this process may not use. Here it starts one thread per usable core, which is in FastAPI's
favour.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
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
    """The application. It prints the line ``ready http=…`` once it has started."""
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


def serve(make_app: Callable[[onnxruntime.InferenceSession, str], FastAPI]) -> None:
    """Serve the model named on the command line on a free port until told to stop."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(sys.argv[1], options)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    app = make_app(session, f"127.0.0.1:{listener.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    serve(make_app)
