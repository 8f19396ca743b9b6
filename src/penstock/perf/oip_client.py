"""Client side of the Open Inference Protocol: signatures, complete HTTP requests as bytes, responses as arrays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import orjson

from penstock.errors import InvalidArgument, InvalidData, NotFound, PenstockError, Unavailable, Unsupported
from penstock.inputs.meanings import meanings_of
from penstock.inputs.sizes import Shapes, free_axes
from penstock.inputs.values import plausible
from penstock.perf.http_client import Address, HttpAnswer, HttpSession
from penstock.protocol import messages
from penstock.tensor import Array, DataType, Signature, TensorSpec, as_bytes, from_wire, to_wire

_NO_JSON_FORM = (DataType.FP16, DataType.BF16)
_ERRORS: dict[int, type[PenstockError]] = {400: InvalidArgument, 404: NotFound, 501: Unsupported, 503: Unavailable}


class _Metadata(msgspec.Struct):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


async def fetch_signature(address: Address, model: str, timeout_s: float = 10.0) -> Signature:
    """Fetch the signature of ``model``. Raises Unavailable, NotFound, DeadlineExceeded, PenstockError."""
    session = HttpSession(address, timeout_s)
    try:
        answer = await session.ask(f"GET /v2/models/{quote(model, safe='')} HTTP/1.1\r\n{address.fields}\r\n".encode())
    finally:
        session.close()
    if answer.status != 200:
        raise _refusal(answer, f"{address.url} does not describe model '{model}'")
    try:
        metadata = msgspec.json.decode(answer.body, type=_Metadata)
    except msgspec.MsgspecError as error:
        raise _not_oip(f"{address.url} sent invalid metadata of model '{model}': {error}") from None
    return Signature(metadata.inputs, metadata.outputs)


async def infer_all(
    address: Address,
    model: str,
    requests: Sequence[Mapping[str, Array]],
    *,
    binary: bool = False,
    concurrency: int = 8,
    timeout_s: float = 30.0,
) -> list[dict[str, Array]]:
    """Send every request once, over up to ``concurrency`` connections. Returns the outputs of each request, in order.

    The arrays may be read-only. Stops at the first failure. A lost connection raises Unavailable, and a timeout raises
    DeadlineExceeded. An error response raises InvalidArgument (status 400), NotFound (404), Unsupported (501), or PenstockError
    (any other).
    """
    outputs: list[dict[str, Array]] = [{} for _ in requests]
    numbers = iter(range(len(requests)))  # shared by the workers

    async def work() -> None:
        session = HttpSession(address, timeout_s)
        try:
            for number in numbers:
                label = f"request {number}"
                outputs[number] = await infer_once(
                    session, address, model, requests[number], binary=binary, label=label
                )
        finally:
            session.close()

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(requests))):
                workers.create_task(work())
    except* PenstockError as group:
        raise group.exceptions[0] from None
    return outputs


async def infer_once(
    session: HttpSession,
    address: Address,
    model: str,
    inputs: Mapping[str, Array],
    *,
    binary: bool = True,
    label: str = "the request",
) -> dict[str, Array]:
    """Send one request over ``session``. Returns the outputs, and raises the errors, of ``infer_all``; they call it ``label``."""
    answer = await session.ask(infer_request(address, model, inputs, binary=binary))
    if answer.status != 200:
        raise _refusal(answer, f"{label} to model '{model}' failed")
    return decode_answer(answer.body, answer.json_size)


def infer_message(model: str, inputs: Mapping[str, Array]) -> bytes:
    """A serialized ``ModelInferRequest`` with ``inputs`` as raw tensors."""
    message = messages.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype=DataType.from_numpy(array.dtype).value, shape=array.shape)
        message.raw_input_contents.append(bytes(to_wire(array)))
    data: bytes = message.SerializeToString()
    return data


def infer_request(
    address: Address,
    model: str,
    inputs: Mapping[str, Array],
    *,
    binary: bool,
    parameters: Mapping[str, str | int | bool] = MappingProxyType({}),
) -> bytes:
    """Build a complete HTTP inference request. With ``binary``, request and response carry tensors as raw bytes after the JSON.

    ``parameters`` are request parameters, such as ``timeout`` in microseconds. Raises Unsupported if a datatype has no JSON form,
    InvalidData if a value has none.
    """
    entries: list[dict[str, Any]] = []
    raw: list[bytes | memoryview] = []
    for name, array in inputs.items():
        entry: dict[str, Any] = {
            "name": name,
            "shape": array.shape,
            "datatype": DataType.from_numpy(array.dtype).value,
        }
        if binary:
            raw.append(to_wire(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = _json_data(name, array)
        entries.append(entry)
    body: dict[str, Any] = {"inputs": entries}
    if binary or parameters:
        body["parameters"] = {**parameters, **({"binary_data_output": True} if binary else {})}
    header = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    tensors = b"".join(raw)
    kind = "application/octet-stream" if binary else "application/json"
    size_line = f"Inference-Header-Content-Length: {len(header)}\r\n" if binary else ""
    head = (
        f"POST /v2/models/{quote(model, safe='')}/infer HTTP/1.1\r\n{address.fields}"
        f"Content-Type: {kind}\r\n{size_line}Content-Length: {len(header) + len(tensors)}\r\n\r\n"
    )
    return head.encode() + header + tensors


def decode_answer(body: bytes, json_size: int | None) -> dict[str, Array]:
    """The outputs in a response, by name. Binary tensors are read-only views of ``body``. Raises PenstockError for an invalid body."""
    try:
        outputs: dict[str, Array] = {}
        offset = len(body) if json_size is None else json_size
        for output in _loads(body[:json_size])["outputs"]:
            datatype, shape = DataType(output["datatype"]), output["shape"]
            if min(shape, default=0) < 0:
                raise ValueError(f"the shape of output '{output['name']}' is {shape}")
            size = (output.get("parameters") or {}).get("binary_data_size")  # some servers write null
            if size is None:
                outputs[output["name"]] = _array(output["data"], datatype).reshape(shape)
            else:
                outputs[output["name"]] = from_wire(memoryview(body)[offset : offset + size], datatype, shape)
                offset += size
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError, InvalidArgument) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise _not_oip(f"the server's response is invalid: {reason}") from None
    if offset != len(body):
        raise _not_oip(f"the server's response has {len(body) - offset} bytes after the last output")
    return outputs


def request_shapes(signature: Signature, given: Mapping[str, tuple[int, ...]], batch: int | None = None) -> Shapes:
    """The shapes of a request's inputs: those in ``given``; for all others, a free first dimension becomes ``batch`` rows, or 1.

    Raises InvalidArgument if another dimension is free, if a given shape does not fit, or if it has a different number of rows.
    """
    if unknown := sorted(given.keys() - set(signature.input_names)):
        raise InvalidArgument(
            f"--shape names the input '{unknown[0]}', but the model's inputs are {list(signature.input_names)}",
            "use one of these names",
        )
    return {spec.name: _shape(spec, given.get(spec.name), batch) for spec in signature.inputs}


def random_inputs(signature: Signature, shapes: Shapes, count: int, seed: int = 0) -> list[dict[str, Array]]:
    """Generate inputs of ``shapes`` for ``count`` requests, with plausible values by names, types and shapes."""
    generator = np.random.default_rng(seed)
    meanings = meanings_of(signature)
    return [plausible(signature, meanings, shapes, generator) for _ in range(count)]


def _json_data(name: str, array: Array) -> Any:
    datatype = DataType.from_numpy(array.dtype)
    if datatype in _NO_JSON_FORM:
        raise Unsupported(f"input '{name}' is {datatype.value}, which has no JSON form", "send it as binary (--binary)")
    if datatype is DataType.BYTES:
        try:
            return [as_bytes(element).decode() for element in array.reshape(-1).tolist()]
        except UnicodeDecodeError:
            raise InvalidData(f"input '{name}' is not UTF-8 text", "send it as binary (--binary)") from None
    if datatype.is_float and not np.isfinite(array).all():
        raise InvalidData(
            f"input '{name}' contains NaN or infinity, which JSON cannot represent", "send it as binary (--binary)"
        )
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)  # accepts NaN and Infinity, which some servers write


def _array(data: list[Any], datatype: DataType) -> Array:
    if datatype is DataType.BYTES:
        array = np.empty(len(data), np.object_)
        array[:] = [as_bytes(element) for element in data]
        return array
    return np.array(data, datatype.dtype)


def _shape(spec: TensorSpec, given: tuple[int, ...] | None, batch: int | None) -> tuple[int, ...]:
    if given is not None:
        if not spec.admits(given):
            raise InvalidArgument(
                f"--shape gives input '{spec.name}' the shape {list(given)}, but the model takes {list(spec.shape)}",
                "-1 stands for any size; give a number for it, and the other sizes as they are",
            )
        if batch is not None and spec.shape[:1] == (-1,) and given[0] != batch:
            raise InvalidArgument(
                f"--shape gives input '{spec.name}' {given[0]} rows, but --batch is {batch}", "remove --batch"
            )
        return given
    if batch not in (None, 1) and spec.shape[:1] not in ((-1,), (batch,)):
        raise InvalidArgument(
            f"input '{spec.name}' of shape {list(spec.shape)} does not accept a batch of {batch}",
            "use a batch of 1",
        )
    rows = batch or 1
    if free := free_axes(spec):
        shown = ",".join(
            str(rows if not axis else "SIZE") if dim == -1 else str(dim) for axis, dim in enumerate(spec.shape)
        )
        raise InvalidArgument(
            f"input '{spec.name}' of shape {list(spec.shape)} has any size in dimension(s) {', '.join(map(str, free))}",
            f"give the size: --shape {spec.name}={shown}; or samples: --data FILE.npz",
        )
    return tuple(rows if dim == -1 else dim for dim in spec.shape)


def _refusal(answer: HttpAnswer, what: str) -> PenstockError:
    try:
        reason = str(_loads(answer.body)["error"])
    except (KeyError, TypeError, ValueError):
        reason = answer.body[:200].decode(errors="replace").strip()
    kind = _ERRORS.get(answer.status, PenstockError)
    return kind(f"{what}: HTTP {answer.status}" + (f", {reason}" if reason else ""))


def _not_oip(message: str) -> PenstockError:
    return PenstockError(message, "check that a server of the Open Inference Protocol (v2) listens at the URL")
