from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra penstock[torch] is not installed")

import torch

import models
import torch_models
from conformance.engines import EngineConformance
from penstock.artifact import Artifact, Format
from penstock.engines.torch import TorchEngine
from penstock.errors import InvalidConfig, InvalidModel, PenstockError
from penstock.tensor import DataType

_NO_TEXT = "PyTorch has no string tensors"
_NO_UINT64 = "PyTorch does not add UINT64"
X = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
Y = {"name": "y", "datatype": "FP32", "shape": [-1, 2]}


class TestConformance(EngineConformance):
    """The suite for TorchScript; ``test_exported_program`` runs it for programs of torch.export."""

    engine = TorchEngine()
    zoo = torch_models.SCRIPTS
    failure = "invalid for input of size 6"
    excluded = {
        "test_carries_every_datatype[BYTES]": _NO_TEXT,
        "test_integers_beyond_32_bits[UINT64]": _NO_UINT64,
    }

    def options(self, artifact: Artifact) -> dict[str, Any]:
        return torch_models.SCRIPTS.declared.get(artifact.digest, {})

    @pytest.mark.slow  # imports torch anew
    def test_estimate_bounds_what_a_model_of_20_mb_takes(self, tmp_path: Path) -> None:
        super().test_estimate_bounds_what_a_model_of_20_mb_takes(tmp_path)


class Pair(torch.nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first - second, first + second


class OfDictionary(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["a"] - tensors["b"]


class Optional(torch.nn.Module):
    def forward(self, x: torch.Tensor, shift: int = 2) -> list[torch.Tensor]:
        return [x + shift]


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


def script(module: torch.nn.Module) -> Artifact:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    return Artifact.from_bytes(buffer.getvalue(), Format.TORCHSCRIPT)


def declare(inputs: list[str], outputs: list[str], datatype: str = "FP32") -> dict[str, Any]:
    def specs(names: list[str]) -> list[dict[str, Any]]:
        return [{"name": name, "datatype": datatype, "shape": [-1]} for name in names]

    return {"inputs": specs(inputs), "outputs": specs(outputs)}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["second", "first"], ["OUTPUT__0", "OUTPUT__1"]),
        (["INPUT__1", "INPUT__0"], ["DIFFERENCE__0", "SUM__1"]),
        (["INPUT__1", "INPUT__0"], ["difference", "sum"]),
    ],
    ids=["by argument", "by number", "in order"],
)
def test_names_of_inputs_and_outputs(inputs: list[str], outputs: list[str]) -> None:
    model = TorchEngine().load(script(Pair()), declare(inputs, outputs))
    a, b = np.array([5], np.float32), np.array([3], np.float32)
    answer = model.forward({inputs[0]: b, inputs[1]: a})
    assert {name: array.tolist() for name, array in answer.items()} == {outputs[0]: [2], outputs[1]: [8]}
    assert list(answer) == outputs


def test_a_part_of_the_outputs_by_number() -> None:
    model = TorchEngine().load(script(Pair()), declare(["first", "second"], ["sum__1"]))
    assert model.forward({name: np.ones(1, np.float32) for name in ("first", "second")}) == {"sum__1": [2]}


def test_a_forward_that_takes_one_dictionary() -> None:
    model = TorchEngine().load(script(OfDictionary()), declare(["b", "a"], ["y"]))
    assert model.forward({"a": np.array([5], np.float32), "b": np.array([3], np.float32)})["y"] == [2]


def test_arguments_with_defaults_need_not_be_declared() -> None:
    model = TorchEngine().load(script(Optional()), declare(["x"], ["y"]))
    assert model.forward({"x": np.array([5], np.float32)})["y"] == [7]
    with pytest.raises(InvalidModel, match=r"needs the inputs \['second'\], but only \['first'\] are declared"):
        TorchEngine().load(script(Pair()), declare(["first"], ["y"]))


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a__0", "b__2"], ["a__0", "b__0"]], ids=["many", "far", "twice"])
def test_names_that_do_not_fit(names: list[str]) -> None:
    with pytest.raises(
        InvalidModel, match=r"do not match the model's names \['first', 'second'\] \(use the model's names, or NAME__0"
    ):
        TorchEngine().load(script(Pair()), declare(names, ["y"]))


def test_a_script_must_be_declared() -> None:
    with pytest.raises(InvalidModel, match="none are declared .declare name, data type and dims of each"):
        TorchEngine().load(torch_models.SCRIPTS.linear(), {})


def test_an_output_of_another_type_than_declared() -> None:
    model = TorchEngine().load(script(Optional()), declare(["x"], ["y"], "INT32"))
    with pytest.raises(
        PenstockError, match="returned output 'y' as torch.int64, but it is declared as INT32 .declare it as INT64"
    ):
        model.forward({"x": np.ones(1, np.int64)})


def test_a_program_that_writes_to_its_input_leaves_the_callers_alone() -> None:
    model = TorchEngine().load(script(InPlace()), declare(["x"], ["y"]))
    x = np.ones(3, np.float32)
    assert model.forward({"x": x})["y"].tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def test_each_call_sets_the_threads_of_its_model() -> None:
    one, two = (
        TorchEngine().load(torch_models.SCRIPTS.linear(), {"threads": n, "inputs": [X], "outputs": [Y]}) for n in (1, 2)
    )
    x = np.ones((1, 3), np.float32)
    seen: list[int] = []

    def calls() -> None:
        for model in (one, two, one):
            model.forward({"x": x})
            seen.append(torch.get_num_threads())

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert seen == [1, 2, 1]


@pytest.mark.parametrize("what", ["module", "weights"])
@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
@pytest.mark.parametrize("format", [Format.TORCHSCRIPT, Format.EXPORTED_PROGRAM], ids=["pt", "pt2"])
def test_pickles_are_refused_unread(what: str, legacy: bool, format: Format) -> None:
    module, buffer = Pair(), io.BytesIO()
    value = module if what == "module" else {"w": torch.ones(1)}
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    artifact = Artifact.from_bytes(buffer.getvalue(), format)
    with pytest.raises(
        InvalidModel,
        match=r"(pickle of torch\.save|not an archive of torch|not an exported program).*torch\.export\.save",
    ):
        TorchEngine().load(artifact, {"inputs": [X], "outputs": [Y]})


def test_a_file_of_the_other_kind_is_told_its_name() -> None:
    data = torch_models.PROGRAMS.linear().data
    with pytest.raises(InvalidModel, match="exported program, not TorchScript .name it '.pt2'"):
        TorchEngine().load(Artifact.from_bytes(data, Format.TORCHSCRIPT), {})
    data = torch_models.SCRIPTS.linear().data
    with pytest.raises(InvalidModel, match="not an exported program .name it '.pt'"):
        TorchEngine().load(Artifact.from_bytes(data, Format.EXPORTED_PROGRAM), {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InvalidConfig, match=r"device 'cuda:1' does not exist: PyTorch .* sees 0 GPUs"):
        TorchEngine().load(torch_models.PROGRAMS.linear(), {"device": "cuda:1"})
    with pytest.raises(InvalidConfig, match="device"):
        TorchEngine().validate(torch_models.PROGRAMS.linear(), {"device": "meta"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("zoo", [torch_models.SCRIPTS, torch_models.PROGRAMS], ids=["script", "program"])
def test_on_a_gpu(zoo: torch_models.Zoo) -> None:
    artifact = zoo.linear()
    model = TorchEngine().load(artifact, {"device": "cuda", **zoo.declared[artifact.digest]})
    x = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(model.forward({"x": x})["y"], x @ models.linear_weight(), rtol=1e-3)


def test_text_is_refused() -> None:
    model = TorchEngine().load(script(InPlace()), declare(["x"], ["y"], DataType.BYTES.value))
    with pytest.raises(PenstockError, match="PyTorch has no string tensors"):
        model.forward({"x": np.array([b"a"], np.object_)})


class Batches(torch.nn.Module):
    """A module with buffers that it writes only in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Sums(Batches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        return self.layers(x) + self.total


class Writes(Sums):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total[0].copy_(x.sum())
        return self.layers(x) + self.total


class Counts(Batches):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layers(x) + self.count


@pytest.mark.parametrize(("kind", "expected"), [(Batches, False), (Sums, True), (Writes, True), (Counts, True)])
def test_a_script_that_writes_to_its_attributes_keeps_state(kind: type[torch.nn.Module], expected: bool) -> None:
    model = TorchEngine().load(script(kind().eval()), {"inputs": [X], "outputs": [Y]})
    assert model.keeps_state is expected


@pytest.mark.parametrize(("kind", "expected"), [(Batches, False), (Sums, True), (Writes, True)])
def test_a_program_that_writes_to_its_buffers_keeps_state(kind: type[torch.nn.Module], expected: bool) -> None:
    data = io.BytesIO()
    torch.export.save(torch.export.export(kind().eval(), (torch.zeros(2, 3),)), data)
    model = TorchEngine().load(Artifact.from_bytes(data.getvalue(), Format.EXPORTED_PROGRAM), {})
    assert model.keeps_state is expected
