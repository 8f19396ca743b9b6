"""Scripts of ``examples/``, and the answers of the pipelines that they pack, by every way of asking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from commands import Command
from penstock.pipeline.value import ValueType
from penstock.runtime import Pipeline
from processes import ServerProcess


def close(found: Any, expected: Any) -> bool:
    """Whether texts are equal, and numbers are equal but for the rounding of other batch sizes: engines may sum in another order."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], one) for name, one in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return (
        bool(found == pytest.approx(expected, rel=1e-4, abs=1e-6)) if isinstance(expected, float) else found == expected
    )


def same_answers(
    penstock: Command, bundle: Path, items: Sequence[Path | str], content_type: str
) -> list[dict[str, Any]]:
    """The answers of a call for each of ``items``: files, or texts. Fails unless all other ways give the same, to the bit.

    Only ways that take several items at once may differ by the rounding of a batch.
    """
    with Pipeline.open(bundle) as pipeline:
        (name,) = pipeline.inputs
        tensors = [pipeline(item) for item in items]
        answers = [pipeline.to_json(one) for one in tensors]
        assert close([pipeline.to_json(one) for one in pipeline.batch(items)], answers)
        assert close([pipeline.to_json(one) for one in pipeline.stream(items)], answers)
        assert pipeline.to_json(asyncio.run(pipeline.arun(items[0]))) == answers[0]
        kinds = pipeline.outputs
    for some in (items[:1], items):
        done = penstock("infer", bundle, *some, "--json")
        assert done.code == 0, done.err
        found = [one["outputs"] for one in done.json["items"]]
        assert found == answers[:1] if len(some) == 1 else close(found, answers)
    contents = [item.read_bytes() if isinstance(item, Path) else item.encode() for item in items]
    with ServerProcess(bundle, arguments=("--grpc-port", "0")) as server, ThreadPoolExecutor(len(items)) as threads:
        by_http = partial(_by_http, server, bundle.stem, content_type)
        assert [by_http(content) for content in contents] == answers
        assert close(list(threads.map(by_http, contents)), answers)
        address = next(word for word in server.line.split() if word.startswith("grpc=")).removeprefix("grpc=")
        with tritonclient.grpc.InferenceServerClient(address) as client:
            by_grpc = partial(_by_grpc, client, bundle.stem, name, kinds)
            for content, expected in zip(contents, tensors, strict=True):
                assert _bits(by_grpc(content)) == _bits(expected)
            together = [pipeline.to_json(one) for one in threads.map(by_grpc, contents)]
            assert close(together, answers)
    return answers


def _by_http(server: ServerProcess, model: str, content_type: str, content: bytes) -> Any:
    with closing(HTTPConnection(*server.address, timeout=30)) as connection:
        connection.request("POST", f"/v2/models/{model}/run", content, {"Content-Type": content_type})
        return json.loads(connection.getresponse().read())


def _by_grpc(
    client: tritonclient.grpc.InferenceServerClient,
    model: str,
    name: str,
    kinds: Mapping[str, ValueType],
    content: bytes,
) -> dict[str, Any]:
    """The values of the outputs, as a call in Python returns them."""
    tensor = tritonclient.grpc.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([content], object))
    result, found = client.infer(model, [tensor]), {}
    for output, kind in kinds.items():
        array = result.as_numpy(output)
        if array.dtype.kind == "O":
            texts = [text.decode() for text in array]
            found[output] = texts if kind.many else texts[0]
        else:
            found[output] = list(array) if kind.many else array
    return found


def _bits(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Texts as they are, and the bytes of numbers."""
    arrays = {name: np.asarray(value) for name, value in answer.items()}
    return {name: array.tolist() if array.dtype.kind == "U" else array.tobytes() for name, array in arrays.items()}
