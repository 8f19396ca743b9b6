"""Scripts of ``examples/``, and the answers of the pipelines that they pack, by every way of asking."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from commands import Command
from penstock.runtime import Pipeline
from processes import ServerProcess

EXAMPLES = Path(__file__).parent.parent / "examples"


@contextmanager
def script(path: str) -> Iterator[dict[str, Any]]:
    """The names of the script ``path`` below ``examples/``. The modules of its folder can be imported within the context."""
    before = set(sys.modules)
    folder = str((EXAMPLES / path).parent)
    sys.path.insert(0, folder)
    try:
        yield runpy.run_path(str(EXAMPLES / path))
    finally:
        sys.path.remove(folder)
        for name in sys.modules.keys() - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


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

    Only ``batch``, and the command with several items, may differ by the rounding of a batch.
    """
    with Pipeline.open(bundle) as pipeline:
        (name,) = pipeline.inputs
        answers = [pipeline.to_json(pipeline(item)) for item in items]
        assert close([pipeline.to_json(one) for one in pipeline.batch(items)], answers)
        assert pipeline.to_json(asyncio.run(pipeline.arun(items[0]))) == answers[0]
        kinds, tensors = pipeline.outputs, pipeline(items[0])
    for some in (items[:1], items):
        done = penstock("infer", bundle, *some, "--json")
        assert done.code == 0, done.err
        found = [one["outputs"] for one in done.json["items"]]
        assert found == answers[:1] if len(some) == 1 else close(found, answers)
    contents = [item.read_bytes() if isinstance(item, Path) else item.encode() for item in items]
    with ServerProcess(bundle, arguments=("--grpc-port", "0")) as server:
        with closing(HTTPConnection(*server.address, timeout=30)) as connection:
            for content, answer in zip(contents, answers, strict=True):
                path = f"/v2/models/{bundle.stem}/run"
                connection.request("POST", path, content, {"Content-Type": content_type})
                assert json.loads(connection.getresponse().read()) == answer
        address = next(word for word in server.line.split() if word.startswith("grpc=")).removeprefix("grpc=")
        with tritonclient.grpc.InferenceServerClient(address) as client:
            tensor = tritonclient.grpc.InferInput(name, [1], "BYTES")
            tensor.set_data_from_numpy(np.array([contents[0]], object))
            result = client.infer(bundle.stem, [tensor])
            for output, value in tensors.items():
                array = result.as_numpy(output)
                if array.dtype.kind == "O":
                    texts = [text.decode() for text in array]
                    assert (texts if kinds[output].many else texts[0]) == value
                else:
                    assert array.tobytes() == np.asarray(value).tobytes()
    return answers
