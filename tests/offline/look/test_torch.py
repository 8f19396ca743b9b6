from __future__ import annotations

import io
import zipfile

import pytest

pytest.importorskip("torch", reason="the extra penstock[torch] is not installed")

import torch

import torch_models
from penstock.artifact import Artifact, Format
from penstock.engines.torch import TorchEngine
from penstock.errors import InvalidModel
from penstock.offline.look.facts import TensorFacts
from penstock.offline.look.torch import read
from penstock.tensor import DataType


@pytest.mark.parametrize("name", ["linear", "fixed_batch", "dynamic_image", "sum_and_difference"])
def test_a_program_says_the_inputs_that_the_engine_reads(name: str) -> None:
    artifact = getattr(torch_models.PROGRAMS, name)()
    signature, found = TorchEngine().load(artifact, {}).signature, read(artifact).signature
    assert found is not None
    assert found.inputs == signature.inputs
    assert [(one.datatype, one.shape) for one in found.outputs] == [(o.datatype, o.shape) for o in signature.outputs]


def test_operators_and_weights_of_a_program() -> None:
    found = read(torch_models.PROGRAMS.linear())
    assert list(found.operators) == ["aten.matmul.default"]
    assert (found.parameters, found.weight_bytes) == (6, 24)


def test_a_script_says_its_arguments_operators_and_size() -> None:
    found = read(torch_models.SCRIPTS.sum_and_difference())
    assert found.inputs == (TensorFacts("a", "Tensor", None), TensorFacts("b", "Tensor", None))
    assert found.operators == {"add": 1, "sub": 1}
    assert read(torch_models.SCRIPTS.linear()).weight_bytes == 24
    assert found.signature is None


def test_nothing_of_an_archive_is_executed() -> None:
    """A pickle that would end the process is read for its names only."""

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Nested().eval()), buffer)
    evil = b"cos\n_exit\n(I7\ntR."

    def edit(name: str, data: bytes) -> bytes:
        return evil if name == "data.pkl" else data

    found = read(Artifact.from_bytes(torch_models.edited(buffer.getvalue(), edit), Format.TORCHSCRIPT))
    assert found.operators["relu"] == 1
    assert found.inputs == ()


def test_identity_of_every_type() -> None:
    for kind in (DataType.FP16, DataType.BF16, DataType.INT64, DataType.BOOL, DataType.UINT8):
        found = read(torch_models.PROGRAMS.identity(kind)).signature
        assert found is not None
        assert found.inputs[0].datatype is kind


def test_what_is_no_archive_of_torch_is_refused() -> None:
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/readme.txt", "text")
        archive.writestr("a/models/model.json", "{}")
    for data, match in ((b"not a model", "not an archive"), (other.getvalue(), "corrupt|TorchScript")):
        for format in (Format.TORCHSCRIPT, Format.EXPORTED_PROGRAM):
            with pytest.raises(InvalidModel, match=match):
                read(Artifact.from_bytes(data, format))
