"""The torch engine with programs of torch.export: their signatures, and the files that it refuses to load."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra penstock[torch] is not installed")

import torch

import torch_models
from conformance.engines import EngineConformance
from penstock.artifact import Artifact, Format
from penstock.engines.torch import TorchEngine
from penstock.errors import InvalidModel, Unsupported
from penstock.tensor import DataType, Signature, TensorSpec


class TestConformance(EngineConformance):
    engine = TorchEngine()
    zoo = torch_models.PROGRAMS
    failure = "Guard failed"
    excluded = {
        "test_carries_every_datatype[BYTES]": "PyTorch has no string tensors",
        "test_integers_beyond_32_bits[UINT64]": "PyTorch does not add UINT64",
    }

    @pytest.mark.slow  # imports torch anew
    def test_estimate_bounds_what_a_model_of_20_mb_takes(self, tmp_path: Path) -> None:
        super().test_estimate_bounds_what_a_model_of_20_mb_takes(tmp_path)

    @pytest.mark.slow  # as above
    def test_loads_in_a_process_of_its_own(self) -> None:
        super().test_loads_in_a_process_of_its_own()


class Nested(torch.nn.Module):
    """Takes nested tensors, a constant and an optional tensor; returns nested tensors and None; branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]], times: int, absent: Any = None) -> Any:
        self.calls += 1
        branch = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return branch, {"of": [more["a"][0] * times, more["b"][0].to(torch.int64)], "none": None}, x[: x.shape[0] // 2]


def program(module: torch.nn.Module, *inputs: Any, **shapes: Any) -> Artifact:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs, **shapes), buffer)
    return Artifact.from_bytes(buffer.getvalue(), Format.EXPORTED_PROGRAM)


@pytest.fixture(scope="module")
def nested() -> Artifact:
    free = {0: torch.export.Dim.AUTO}
    shapes = {"x": free, "more": {"a": [None], "b": [None]}, "times": None, "absent": None}
    return program(
        Nested(), torch.ones(4, 2), {"a": [torch.ones(3)], "b": [torch.ones(2)]}, 3, None, dynamic_shapes=shapes
    )


def test_signature_is_the_programs_own(nested: Artifact) -> None:
    fp32 = DataType.FP32
    model = TorchEngine().load(nested, {})
    assert model.signature == Signature(
        (TensorSpec("x", fp32, (-1, 2)), TensorSpec("more_a_0", fp32, (3,)), TensorSpec("more_b_0", fp32, (2,))),
        (
            TensorSpec("OUTPUT__0", fp32, (-1, 2)),
            TensorSpec("OUTPUT__1__of__0", fp32, (3,)),
            TensorSpec("OUTPUT__1__of__1", DataType.INT64, (2,)),
            TensorSpec("OUTPUT__2", fp32, (-1, 2)),
        ),
    )
    x, a, b = np.ones((6, 2), np.float32), np.arange(3, dtype=np.float32), np.array([1.5, -1], np.float32)
    outputs = list(model.forward({"more_a_0": a, "more_b_0": b, "x": x}).values())
    for got, expected in zip(outputs, (x + 1, a * 3, b.astype(np.int64), x[:3]), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_declared_names_go_before_its_own(nested: Artifact) -> None:
    def specs(names: list[str]) -> list[dict[str, Any]]:
        return [{"name": name, "datatype": "FP32", "shape": [-1]} for name in names]

    options = {"inputs": specs(["IN__0", "IN__2", "IN__1"]), "outputs": specs(["HALF__3", "ALL__0"])}
    model = TorchEngine().load(nested, options)
    assert model.signature.input_names == ["IN__0", "IN__1", "IN__2"]
    assert [(spec.name, spec.shape) for spec in model.signature.outputs] == [("ALL__0", (-1, 2)), ("HALF__3", (-1, 2))]
    x = -np.ones((4, 2), np.float32)
    outputs = model.forward({"IN__0": x, "IN__1": np.ones(3, np.float32), "IN__2": np.ones(2, np.float32)})
    np.testing.assert_array_equal(outputs["ALL__0"], x - 1)
    np.testing.assert_array_equal(outputs["HALF__3"], x[:2])


def test_inputs_that_are_no_tensors() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, by: int) -> torch.Tensor:
            return x * by

    artifact = program(Scaled(), torch.ones(2), 3, dynamic_shapes={"x": None, "by": torch.export.Dim.DYNAMIC})
    with pytest.raises(Unsupported, match=r"inputs \['by'\] are not tensors"):
        TorchEngine().load(artifact, {})


def forged(
    texts: dict[str, str] | None = None,
    records: dict[str, bytes] | None = None,
    added: dict[str, bytes] | None = None,
    compression: int = 0,
) -> Artifact:
    """The linear program with ``texts`` replaced in its JSON, ``records`` replaced and ``added``."""

    def edit(name: str, data: bytes) -> bytes:
        for old, new in (texts or {}).items() if name.endswith(".json") else ():
            data = data.replace(old.encode(), new.encode())
        return (records or {}).get(name, data)

    good = torch_models.PROGRAMS.linear().data
    return Artifact.from_bytes(torch_models.edited(good, edit, added, compression), Format.EXPORTED_PROGRAM)


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_a_forged_copy_is_as_good_where_nothing_is_changed() -> None:
    assert TorchEngine().load(forged(), {}).signature.input_names == ["x"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"torch.ops.aten.matmul.default": "torch.os.mkdir"}, "target 'torch.os.mkdir'"),
        ({"torch.ops.aten.matmul.default": "torch.ops.load_library"}, "target 'torch.ops.load_library'"),
        ({"torch.ops.aten.matmul.default": "_operator.methodcaller"}, "target '_operator.methodcaller'"),
        ({"positive=True, integer=True": "os.mkdir('PATH')"}, "expr_str"),
        ({"positive=True, integer=True": "exec('import os')"}, "expr_str"),
        ({"positive=True, integer=True": "[].__class__"}, "expr_str"),
        ({'"guards_code": [': "\"guards_code\": [\"__import__('os').mkdir('PATH')\""}, "guards_code"),
        ({'"guards_code": [': '"guards_code": ["L[\'x\'].size.__globals__"'}, "guards_code"),
        ({'"guards_code": [': '"guards_code": ["' + "(" * 500 + '"'}, "guards_code"),
        ({'{"name": "x"}': '{"name": "x=__import__(1)"}'}, "name 'x=__import__"),
        ({"builtins.dict": "collections.defaultdict"}, "(in|out)_spec"),
        ({'"use_pickle": false': '"use_pickle": true'}, "'weight' of the exported program is pickled"),
        ({"weight_0": "custom_obj_0"}, "'weight' of the exported program is pickled"),
    ],
    ids=[
        "module",
        "library",
        "caller",
        "size",
        "exec",
        "attribute",
        "guard",
        "globals",
        "deep",
        "name",
        "tree",
        "pickle",
        "object",
    ],
)
def test_what_would_run_code_is_refused(texts: dict[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    artifact = forged(texts={old: new.replace("PATH", str(path).replace("/", "\\/")) for old, new in texts.items()})
    assert artifact.data != forged().data
    with pytest.raises(InvalidModel, match=said):
        TorchEngine().load(artifact, {})
    assert not path.exists()


def test_pickled_records_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save((Touch(str(tmp_path / "made")),), buffer)
    bomb = buffer.getvalue()
    with pytest.raises(InvalidModel, match="example inputs contain values other than tensors"):
        TorchEngine().load(forged(records={"data/sample_inputs/model.pt": bomb}), {})
    with pytest.raises(InvalidModel, match=r"contains 'data/weights/model\.pt', which may run any code"):
        TorchEngine().load(forged(added={"data/weights/model.pt": bomb}), {})
    with pytest.raises(InvalidModel, match="native code of AOTInductor"):
        TorchEngine().load(forged(added={"data/aotinductor/model/model.so": b"x"}), {})
    with pytest.raises(InvalidModel):
        TorchEngine().load(
            Artifact.from_bytes(pickle.dumps(Touch(str(tmp_path / "made"))), Format.EXPORTED_PROGRAM), {}
        )
    assert not (tmp_path / "made").exists()


def test_an_archive_that_unpacks_to_much_more_is_not_unpacked() -> None:
    data = forged(added={"zeros": b"0" * 10_000_000}, compression=8).data
    with pytest.raises(InvalidModel, match="unpacks to more than 32 times its size"):
        TorchEngine().load(Artifact.from_bytes(data, Format.EXPORTED_PROGRAM), {})


def test_metadata_may_be_any_text() -> None:
    data = json.dumps("x = eval('1')  # \"quoted\"")
    assert TorchEngine().load(forged(texts={'"stack_trace": ': f'"other": {data}, "stack_trace": '}), {})
