"""A voice model whose state has the batch on its second axis, in a real server process: sequences, and states fed back by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import call_models
from penstock.engines.registry import get_engine
from processes import ServerProcess

SETTINGS = """
[models.kept.sequence_batching]
oldest = { max_candidate_sequences = 4 }
max_sequence_idle_microseconds = 20000000
state = [{ input_name = "state", output_name = "next", data_type = "TYPE_FP32", dims = [2, -1, 16] }]
"""
CALLS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Its addresses."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("kept", "bare"):
        (folder / f"{name}.onnx").write_bytes(call_models.voice().data)
    (folder / "server.toml").write_text(SETTINGS)
    arguments = ("--config", str(folder / "server.toml"), "--json", "--grpc-port", "0")
    with ServerProcess(*sorted(Path(folder).glob("*.onnx")), arguments=arguments) as server:
        yield json.loads(server.line)


def chunks(seed: int) -> list[dict[str, np.ndarray]]:
    found = call_models.voice_calls(CALLS, seed=seed)
    return [{"sound": call["sound"], "rate": found[0]["rate"]} for call in found]


def by_hand(given: list[dict[str, np.ndarray]]) -> list[float]:
    """The answers of the bare model with its state fed back."""
    model = get_engine("onnxruntime").load(call_models.voice(), {"threads": 1})
    state, found = np.zeros((2, 1, call_models.HIDDEN), np.float32), []
    for call in given:
        outputs = model.forward({**call, "state": state})
        state = outputs["next"]
        found.append(float(outputs["speech"][0, 0]))
    model.unload()
    return found


def tensors(protocol: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    found = []
    for name, array in arrays.items():
        tensor = protocol.InferInput(name, list(array.shape), "INT64" if name == "rate" else "FP32")
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_streams_have_the_answers_of_the_bare_model(server: dict[str, str], name: str) -> None:
    protocol = {"http": tritonclient.http, "grpc": tritonclient.grpc}[name]
    streams = {number + 1: chunks(number) for number in range(3)}
    with protocol.InferenceServerClient(server[name]) as client:
        kept: dict[int, list[float]] = {number: [] for number in streams}
        for step in range(CALLS):  # the streams take turns
            for number, given in streams.items():
                place = {"sequence_start": step == 0, "sequence_end": step == CALLS - 1}
                answer = client.infer("kept", tensors(protocol, given[step]), sequence_id=number, **place)
                kept[number].append(float(answer.as_numpy("speech")[0, 0]))
        state, fed = np.zeros((2, 1, call_models.HIDDEN), np.float32), []
        for call in streams[1]:
            answer = client.infer("bare", tensors(protocol, {**call, "state": state}))
            state = answer.as_numpy("next")
            fed.append(float(answer.as_numpy("speech")[0, 0]))
    assert kept == {number: by_hand(given) for number, given in streams.items()}
    assert fed == kept[1]
