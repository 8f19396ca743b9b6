"""What every converter must do, as tests: a test file of a framework subclasses ``ConverterConformance`` with its zoo.

::

    @pytest.fixture(params=MODELS, scope="module")
    def zoo_model(request: pytest.FixtureRequest) -> ZooModel:
        return MODELS[request.param]

    class TestConformance(ConverterConformance):
        pass

Each model of the zoo is opened once. A model with a ``diagnosis`` must fail with it instead, when it is opened or exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from benchmarks.zoo.model import ZooModel
from penstock.errors import InvalidArgument, PenstockError
from penstock.inputs.meanings import meanings_of
from penstock.offline.convert.base import Exported, FrameworkModel
from penstock.offline.convert.detect import detect
from penstock.offline.convert.parity.cases import Maker
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.weights import altered_weight, is_same
from penstock.offline.convert.registry import get_converter
from penstock.offline.convert.source import resolve
from penstock.tensor import Array, DataType

_OPSET = 21


def constant_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All constants of the outer graph, each under the name by which operators read it."""
    yield from proto.graph.initializer
    for node in proto.graph.node:
        for each in node.attribute if node.op_type == "Constant" else ():
            if each.name == "value":
                each.t.name = node.output[0]
                yield each.t


class Opened(msgspec.Struct):
    """A model of the zoo, and the error that it failed with."""

    zoo_model: ZooModel
    given: Any
    folder: Path
    source: FrameworkModel | None = None
    exported: Exported | None = None
    error: PenstockError | None = None

    @property
    def target(self) -> Path:
        return self.folder / "exported.onnx"

    def inputs(self, seed: int = 0) -> dict[str, Array]:
        """The sample of the zoo, or plausible inputs that the source accepts."""
        if self.zoo_model.options.sample:
            return {name: array.copy() for name, array in self.zoo_model.options.sample.items()}
        assert self.source is not None
        maker = Maker(self.source.signature, self.source.axes, meanings_of(self.source.signature), seed)
        for shapes in maker.shapes():
            for case in (maker.plausible(shapes), *maker.extremes(shapes)):
                with contextlib.suppress(PenstockError):
                    self.source.forward(case.inputs)
                    return case.inputs
        raise AssertionError("the source accepts none of the plausible inputs")


class ConverterConformance:
    """Subclass it as ``TestConformance``, beside a fixture ``zoo_model`` with the scope of a module."""

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, zoo_model: ZooModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
        folder = tmp_path_factory.mktemp("zoo")
        found = Opened(zoo_model, zoo_model.make(folder), folder)
        try:
            source = resolve(found.given, zoo_model.format, zoo_model.options.weights)
            found.source = get_converter(source.format).open(source.given, zoo_model.options)
            found.exported = found.source.export(found.target, _OPSET)
        except PenstockError as error:
            found.error = error
        yield found
        if found.source is not None:
            found.source.close()
            found.source.close()

    @pytest.fixture
    def source(self, opened: Opened) -> FrameworkModel:
        if opened.zoo_model.diagnosis:
            pytest.skip("cannot be converted")
        if opened.error is not None:
            raise opened.error
        assert opened.source is not None
        return opened.source

    def test_the_diagnosis_is_the_expected_one(self, opened: Opened) -> None:
        if not opened.zoo_model.diagnosis:
            assert opened.error is None, opened.error
            return
        assert opened.error is not None
        assert opened.zoo_model.diagnosis in str(opened.error)
        assert opened.error.hint

    def test_the_format_is_detected(self, opened: Opened) -> None:
        if isinstance(opened.given, Path):
            assert detect(opened.given) == opened.zoo_model.format

    def test_free_dimensions_have_axes(self, source: FrameworkModel) -> None:
        for specs in (source.signature.inputs, source.signature.outputs):
            assert len({spec.name for spec in specs}) == len(specs)
        assert source.signature.outputs
        assert set(source.axes) <= set(source.signature.input_names)
        for spec in source.signature.inputs:
            axes = source.axes.get(spec.name, ())
            assert [axis.index for axis in axes] == [at for at, size in enumerate(spec.shape) if size < 0], spec.name
            assert all(axis.name and (not axis.high or axis.low <= axis.high) for axis in axes)

    def test_outputs_fit_the_signature(self, opened: Opened, source: FrameworkModel) -> None:
        outputs = source.forward(opened.inputs())
        assert sorted(outputs) == sorted(source.signature.output_names)
        for spec in source.signature.outputs:
            assert outputs[spec.name].dtype == spec.datatype.dtype, spec.name
            assert spec.admits(outputs[spec.name].shape), spec.name

    def test_calls_do_not_influence_one_another(self, opened: Opened, source: FrameworkModel) -> None:
        assert opened.exported is not None
        inputs = opened.inputs()
        given = {name: array.copy() for name, array in inputs.items()}
        first = source.forward(inputs)
        kept = {name: array.copy() for name, array in first.items()}
        source.forward(opened.inputs(1))
        for name, array in given.items():
            np.testing.assert_array_equal(inputs[name], array)
        for name, array in kept.items():
            np.testing.assert_array_equal(first[name], array)
        if not opened.exported.random:
            for name, array in source.forward(inputs).items():
                np.testing.assert_array_equal(array, kept[name])

    def test_wrong_inputs_are_refused(self, opened: Opened, source: FrameworkModel) -> None:
        inputs = opened.inputs()
        name = next(iter(inputs))
        for wrong in ({}, {**inputs, name: np.zeros((1,) * 9, inputs[name].dtype)}):
            with pytest.raises(PenstockError):
                source.forward(wrong)

    def test_the_export_has_the_signature(self, opened: Opened, source: FrameworkModel) -> None:
        proto = onnx.load(opened.target)
        weights = {tensor.name for tensor in proto.graph.initializer}
        assert [one.name for one in proto.graph.input if one.name not in weights] == source.signature.input_names
        assert [one.name for one in proto.graph.output] == source.signature.output_names
        for value, spec in zip(
            (one for one in proto.graph.input if one.name not in weights), source.signature.inputs, strict=True
        ):
            assert DataType.from_onnx(value.type.tensor_type.elem_type) is spec.datatype
            sizes = tuple(dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim)
            assert sizes == spec.shape, spec.name
        versions = {one.domain: one.version for one in proto.opset_import}
        assert 7 <= versions.get("", versions.get("ai.onnx", _OPSET)) <= _OPSET

    def test_links_name_tensors_and_values(self, opened: Opened, source: FrameworkModel) -> None:
        exported = opened.exported
        assert exported is not None
        assert exported.exporter
        graph = onnx.load(opened.target).graph
        tensors = {name for node in graph.node for name in node.output} | {one.name for one in graph.input}
        tensors |= {one.name for one in graph.initializer}
        assert {link.tensor for link in exported.links} <= tensors
        names = [link.source for link in exported.links]
        found = source.values(opened.inputs(), names)
        assert set(found) <= set(names)
        if names:
            assert found
        for weight in (*exported.weights, *(exported.computed or ())):
            assert list(source.values({}, [weight])) == [weight]

    def test_two_exchanged_rows_of_a_weight_are_found(self, opened: Opened, source: FrameworkModel) -> None:
        assert opened.exported is not None
        proto = onnx.load(opened.target)
        stored = Nodes(proto).stored
        weights = [one for name in opened.exported.weights for one in source.values({}, [name]).values()]
        tables = [
            name
            for name, ours in stored.items()
            if ours.ndim > 1 and len(ours) > 3 and ours.dtype.kind == "f" and not np.array_equal(ours[0], ours[1])
            if any(ours.size == one.size and is_same(ours, one, is_exact=True) for one in weights)
        ]
        assert altered_weight(Nodes(proto), source, opened.exported) is None
        if not tables:
            pytest.skip("no constant of the model is a weight with several rows")
        for tensor in constant_tensors(proto):
            if tensor.name == tables[0]:
                array = onnx.numpy_helper.to_array(tensor).copy()
                array[[0, 1]] = array[[1, 0]]
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        found = altered_weight(Nodes(proto), source, opened.exported)
        assert found is not None
        assert tables[0] in found.where

    def test_an_unknown_free_dimension_is_refused(self, opened: Opened, source: FrameworkModel) -> None:
        options = msgspec.structs.replace(opened.zoo_model.options, dynamic={"no such input": {0: "n"}})
        found = resolve(opened.given, opened.zoo_model.format, options.weights)
        try:
            other = get_converter(found.format).open(found.given, options)
        except InvalidArgument as error:
            assert error.hint  # noqa: PT017
        else:  # ``convert`` refuses it then
            assert "no such input" not in other.signature.input_names
            other.close()

    @pytest.mark.parametrize("damage", ["empty", "truncated", "garbage"])
    def test_damaged_files_are_refused(self, opened: Opened, tmp_path: Path, damage: str) -> None:
        if not isinstance(opened.given, Path) or not opened.given.is_file():
            pytest.skip("the source is no file")
        data = opened.given.read_bytes()
        content = {"empty": b"", "truncated": data[: len(data) // 2], "garbage": b"\x93\xf7" * 500}[damage]
        target = tmp_path / opened.given.name
        target.write_bytes(content)
        with pytest.raises(PenstockError) as raised:
            get_converter(opened.zoo_model.format).open(target, opened.zoo_model.options).export(
                tmp_path / "out.onnx", _OPSET
            )
        assert raised.value.message
