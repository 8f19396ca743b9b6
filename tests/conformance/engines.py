"""What every engine must do, as tests: a test file of an engine subclasses ``EngineConformance``, once for each format.

The models come from ``zoo``, which has the functions of ``tests/models.py`` for the engine's own format. Its models must do what
their docstrings there say.

A case that an engine cannot pass stands in its ``excluded``, by the test's name (or ``name[parameter]``), with the reason.
An excluded case must fail: one that has come to pass has to leave the list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

import models
from penstock.artifact import SUFFIXES, Artifact, Format, sha256
from penstock.engines.base import Engine, Severity
from penstock.errors import Code, InvalidConfig, InvalidInput, InvalidModel, PenstockError, Unavailable
from penstock.online.instances.process_instance import ProcessModel
from penstock.resources import machine_facts
from penstock.tensor import DataType
from penstock.testing import assert_tensors_close


def values(datatype: DataType, batch: int = 3) -> np.ndarray:
    """An array (batch, 2) of values that tell every bit of ``datatype`` apart as far as each engine promises."""
    if datatype is DataType.BYTES:
        return np.array([[b"", "π".encode()], [b"nul \0 within", b"b"], [b"c" * 300, b"d"]], np.object_)[:batch]
    if datatype is DataType.BOOL:
        return np.array([[True, False], [False, False], [True, True]])[:batch]
    if datatype.is_float:
        return np.array([[1.5, -2.25], [0, np.inf], [0.15625, 1024]]).astype(datatype.dtype)[:batch]
    limits = np.iinfo(datatype.dtype)
    low, high = max(int(limits.min), -(2**31)), min(int(limits.max), 2**31 - 1)
    return np.array([[low, high], [0, 1], [7, 100]], datatype.dtype)[:batch]


_FP32_PAIRS = np.arange(8, dtype=np.float32).reshape(4, 2)


class EngineConformance:
    """Subclass it as ``TestConformance`` with ``engine`` and ``excluded``, and ``zoo`` for a format other than ONNX."""

    engine: ClassVar[Engine]
    excluded: ClassVar[dict[str, str]] = {}
    zoo: ClassVar[Any] = models
    failure: ClassVar[str] = "[Rr]eshape"
    rejects: ClassVar[bool] = False
    """Whether the engine tells inputs that an operator rejects from its own failures."""
    """What the engine tells of a reshape that does not fit."""

    @pytest.fixture(autouse=True)
    def _exclude(self, request: pytest.FixtureRequest) -> None:
        reason = self.excluded.get(request.node.name) or self.excluded.get(request.node.originalname)
        if reason:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    def options(self, artifact: Artifact) -> dict[str, Any]:
        """What the engine must be told of ``artifact``."""
        return {}

    def load(self, artifact: Artifact, **options: object):
        return self.engine.load(artifact, {**self.options(artifact), **options})

    # Tensors in and out

    @pytest.mark.parametrize("datatype", list(DataType), ids=lambda datatype: datatype.value)
    def test_carries_every_datatype(self, datatype: DataType) -> None:
        model = self.load(self.zoo.identity(datatype))
        x = values(datatype)
        assert [spec.datatype for spec in model.signature.inputs + model.signature.outputs] == [datatype, datatype]
        assert_tensors_close(model.forward({"x": x}), {"y": x}, rtol=0, atol=0)

    @pytest.mark.parametrize("batch", [0, 1, 2, 17])
    def test_any_batch_size(self, batch: int) -> None:
        model = self.load(self.zoo.linear())
        x = np.random.default_rng(1).standard_normal((batch, 3)).astype(np.float32)
        assert model.signature.batchable
        assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)

    def test_fixed_batch(self) -> None:
        model = self.load(self.zoo.fixed_batch())
        assert model.signature.inputs[0].shape == (1, 3)
        assert not model.signature.batchable
        x = np.ones((1, 3), np.float32)
        assert_tensors_close(model.forward({"x": x}), {"y": -x})

    def test_free_dimensions_may_change_from_call_to_call(self) -> None:
        model = self.load(self.zoo.dynamic_image())
        assert model.signature.inputs[0].shape == (-1, 2, -1, -1)
        for shape in ((1, 2, 4, 4), (3, 2, 5, 7), (1, 2, 1, 1), (2, 2, 4, 4)):
            x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
            expected = x.mean(axis=(2, 3), keepdims=True, dtype=np.float64).astype(np.float32)
            assert_tensors_close(model.forward({"x": x}), {"y": expected}, rtol=1e-4)

    def test_several_inputs_and_outputs_in_signature_order(self) -> None:
        model = self.load(self.zoo.sum_and_difference())
        assert (model.signature.input_names, model.signature.output_names) == (["a", "b"], ["sum", "difference"])
        a, b = _FP32_PAIRS, _FP32_PAIRS[::-1].copy()
        outputs = model.forward({"b": b, "a": a})
        assert list(outputs) == ["sum", "difference"]
        assert_tensors_close(outputs, {"sum": a + b, "difference": a - b})

    def test_input_that_is_also_an_output(self) -> None:
        model = self.load(self.zoo.input_as_output())
        outputs = model.forward({"x": -_FP32_PAIRS})
        assert_tensors_close(outputs, {"y": np.zeros_like(_FP32_PAIRS), "x": -_FP32_PAIRS})
        assert not np.shares_memory(outputs["x"], _FP32_PAIRS)

    def test_input_that_no_node_reads(self) -> None:
        model = self.load(self.zoo.unread_input())
        assert model.signature.input_names == ["x", "unread"]
        assert_tensors_close(model.forward({"x": _FP32_PAIRS, "unread": _FP32_PAIRS}), {"y": _FP32_PAIRS})

    @pytest.mark.parametrize("datatype", [DataType.INT64, DataType.UINT64], ids=lambda datatype: datatype.value)
    def test_integers_beyond_32_bits(self, datatype: DataType) -> None:
        x = np.array([2**40, 2**31, 2**32 - 1], datatype.dtype)
        assert_tensors_close(self.load(self.zoo.increment(datatype)).forward({"x": x}), {"y": x + 1})

    def test_64_bit_floats_keep_their_precision(self) -> None:
        x = np.array([1e-12, 2e-12])
        outputs = self.load(self.zoo.increment(DataType.FP64)).forward({"x": x})
        assert_tensors_close(outputs, {"y": x + 1}, rtol=1e-15, atol=0)

    # Who owns which memory

    def test_outputs_are_the_callers(self) -> None:
        model = self.load(self.zoo.linear(2, 2))
        first = model.forward({"x": _FP32_PAIRS})["y"]
        kept = first.copy()
        model.forward({"x": _FP32_PAIRS + 1})
        model.unload()
        np.testing.assert_array_equal(first, kept)
        first[:] = 0  # writable

    def test_inputs_are_not_written_to_and_not_kept(self) -> None:
        model = self.load(self.zoo.identity(DataType.FP32))
        x = _FP32_PAIRS.copy()
        y = model.forward({"x": x})["y"]
        np.testing.assert_array_equal(x, _FP32_PAIRS)
        x[:] = -1
        np.testing.assert_array_equal(y, _FP32_PAIRS)

    @pytest.mark.parametrize("datatype", [DataType.FP32, DataType.BF16, DataType.INT64], ids=lambda d: d.value)
    @pytest.mark.parametrize("layout", ["read-only", "unaligned", "strided", "column-major"])
    def test_input_layouts(self, layout: str, datatype: DataType) -> None:
        expected = _FP32_PAIRS.astype(datatype.dtype)
        x = {
            "read-only": np.frombuffer(expected.tobytes(), datatype.dtype).reshape(4, 2),
            "unaligned": np.frombuffer(b"." + expected.tobytes(), datatype.dtype, offset=1).reshape(4, 2),
            "strided": np.repeat(expected, 2, axis=0)[::2],
            "column-major": np.asfortranarray(expected),
        }[layout]
        assert_tensors_close(self.load(self.zoo.identity(datatype)).forward({"x": x}), {"y": expected})

    # Options

    def test_unknown_option(self) -> None:
        for call in (self.engine.validate, self.engine.estimate, self.engine.load):
            with pytest.raises(InvalidConfig, match="unknown option.*threadz.*use one of: .*threads"):
                call(self.zoo.linear(), {"threadz": 1})

    @pytest.mark.parametrize("threads", ["two", 1.5, -1, None])
    def test_bad_option_value(self, threads: object) -> None:
        with pytest.raises(InvalidConfig, match="threads"):
            self.load(self.zoo.linear(), threads=threads)

    @pytest.mark.parametrize("threads", [0, 1, 2])
    def test_threads(self, threads: int) -> None:
        model = self.load(self.zoo.linear(), threads=threads)
        x = np.ones((1, 3), np.float32)
        assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)
        assert self.engine.estimate(self.zoo.linear(), {"threads": threads}).cores == max(1, threads)

    # Bad models

    @pytest.mark.parametrize("how", ["empty", "nul", "text", "cut", "start"])
    def test_corrupt_model(self, how: str, tmp_path: Path) -> None:
        good = self.zoo.linear()
        texts = {"empty": b"", "nul": b"\0", "text": b"this is not a model"}
        data = texts.get(how, good.data[:-20] if how == "cut" else good.data[:64])
        path = None
        if good.path:
            path = tmp_path / good.path.name
            path.write_bytes(data)
            for file in good.path.parent.glob(good.path.stem + ".*"):
                if file != good.path:
                    (tmp_path / file.name).write_bytes(file.read_bytes())
        with pytest.raises(InvalidModel):
            self.engine.load(Artifact(data, good.format, sha256(data), path), self.options(good))

    def test_unknown_operator(self) -> None:
        with pytest.raises(InvalidModel, match="Frobnicate"):
            self.load(self.zoo.unknown_operator())

    @pytest.mark.parametrize("threads", [0, 1, 2])
    def test_failure_at_run_time_leaves_the_model_usable(self, threads: int, capfd: pytest.CaptureFixture[str]) -> None:
        model = self.load(self.zoo.fails_on_odd_batch(), threads=threads)
        capfd.readouterr()  # LiteRT says once which kernels it has
        told = "the model rejects these inputs" if self.rejects else "the model failed"
        with pytest.raises(PenstockError, match=f"{told}: .*{self.failure}") as caught:
            model.forward({"x": np.ones((3, 2), np.float32)})
        assert caught.value.code is (Code.INVALID_ARGUMENT if self.rejects else Code.INTERNAL)
        for _ in range(2):  # a failed run must not answer with the outputs of an earlier run
            outputs = model.forward({"x": _FP32_PAIRS})
            assert_tensors_close(outputs, {"y": _FP32_PAIRS.reshape(2, 4)})
            with pytest.raises(PenstockError, match=told):
                model.forward({"x": np.ones((3, 2), np.float32)})
        assert capfd.readouterr() == ("", "")

    # Life

    def test_validate_finds_nothing_against_a_good_model(self) -> None:
        model = self.zoo.linear()
        assert self.engine.validate(model, self.options(model)) == []

    def test_validate_and_estimate_do_not_load(self) -> None:
        # A model that cannot be loaded shows it: neither call notices.
        broken = self.zoo.unknown_operator()
        assert self.engine.validate(broken, self.options(broken)) == []
        assert self.engine.estimate(broken, {}).memory_bytes > 0

    def test_unload_is_idempotent_and_final(self) -> None:
        model = self.load(self.zoo.linear())
        model.unload()
        model.unload()
        with pytest.raises(Unavailable, match="unloaded"):
            model.forward({"x": np.ones((1, 3), np.float32)})

    def test_models_do_not_disturb_each_other(self) -> None:
        one, other = self.load(self.zoo.linear(seed=1)), self.load(self.zoo.linear(seed=2))
        x = np.ones((1, 3), np.float32)
        one.unload()
        assert_tensors_close(other.forward({"x": x}), {"y": x @ models.linear_weight(seed=2)}, rtol=1e-5)

    def test_threads_run_at_once_and_answers_stay_apart(self) -> None:
        # One model for all threads if it is reentrant, else one each, loaded at once.
        shared, weight = self.load(self.zoo.linear(64, 64), threads=1), models.linear_weight(64, 64)
        start = threading.Barrier(4, timeout=30)

        def wrong_answers(number: int) -> list[int]:
            start.wait()
            model = shared if shared.reentrant else self.load(self.zoo.linear(64, 64), threads=1)
            wrong = []
            for batch in range(1, 30):
                x = np.full((batch, 64), number * 100 + batch, np.float32)
                if not np.allclose(model.forward({"x": x})["y"], x @ weight, rtol=1e-3, atol=1e-1):
                    wrong.append(batch)
            return wrong

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(wrong_answers, range(4))) == [[], [], [], []]

    def test_estimate_bounds_what_a_model_of_20_mb_takes(self, tmp_path: Path) -> None:
        artifact = self.zoo.linear(2240, 2240)
        told = [(str(_file(one, tmp_path)), self.options(one)) for one in (self.zoo.linear(1, 1), artifact)]
        command = [sys.executable, "-c", _MEMORY_GROWTH, self.engine.name, json.dumps(told)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        grown = int(done.stdout)
        assert artifact.size_bytes > 20e6
        assert artifact.size_bytes / 2 < grown <= self.engine.estimate(artifact, {}).memory_bytes

    def test_loads_from_memory_with_all_its_files(self) -> None:
        artifact = in_memory(self.zoo.linear())
        model = self.load(artifact)
        x = np.ones((2, 3), np.float32)
        assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)

    def test_loads_in_a_process_of_its_own(self) -> None:
        self.loads_apart(self.zoo.linear())

    def loads_apart(self, artifact: Artifact) -> None:
        file = artifact.in_memory()
        try:
            model = ProcessModel.load(self.engine.name, artifact, self.options(artifact), file)
        finally:
            os.close(file)
        try:
            x = np.ones((2, 3), np.float32)
            assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)
        finally:
            model.unload()


class OnnxConformance(EngineConformance):
    """Of engines that read ONNX models: their files with weights beside them, and their products of integers."""

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("ids", [[10], [-11], [3, 1 << 20], [-(1 << 30)]])
    def test_an_id_out_of_range_is_the_clients_error(self, ids: list[int], threads: int) -> None:
        model = self.load(models.embedding(), threads=threads)
        good = np.array([[0], [9], [-1], [-10]])
        expected = np.repeat(np.float32([0, 9, 9, 0])[:, None, None], 4, axis=2)
        assert_tensors_close(model.forward({"ids": good}), {"y": expected})
        with pytest.raises(InvalidInput, match=rf"ind.*[ =]{ids[-1]}[ ,].*range \[-10,9\]"):
            model.forward({"ids": np.array(ids)[:, None]})
        assert_tensors_close(model.forward({"ids": good}), {"y": expected})

    @pytest.mark.parametrize("weight", [64, 127, -128])
    @pytest.mark.parametrize("isa", [machine_facts().isa, ()], ids=["this CPU", "a CPU without integer dot product"])
    def test_products_of_bytes_do_not_saturate(self, isa: tuple[str, ...], weight: int) -> None:
        """Two products of 255 and 127 exceed 16 bits, in which a CPU without an integer dot product adds them. Their sums are exact
        in FP32.
        """
        machine = msgspec.structs.replace(machine_facts(), isa=isa)
        engine = type(self.engine)(machine)
        model = engine.load(models.product_of_bytes(weight), {"threads": 1})
        x = np.random.default_rng(0).integers(128, 256, (3, 64)).astype(np.float32)
        np.testing.assert_array_equal(model.forward({"x": x})["y"], np.tile(x.sum(axis=1, keepdims=True) * weight, 16))

    @pytest.mark.parametrize("per_channel", [False, True])
    def test_activations_are_not_rounded_because_weights_are_stored_as_integers(self, per_channel: bool) -> None:
        model = self.load(models.product_with_stored_weights(per_channel))
        x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
        weight = models.stored_weight(per_channel)
        assert_tensors_close(model.forward({"x": x}), {"y": x @ weight}, rtol=1e-4, atol=1e-4 * np.abs(weight).max())

    def test_bytes_never_load_files_of_the_folder_that_the_process_is_in(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = models.external_linear(tmp_path).read_bytes()
        monkeypatch.chdir(tmp_path)
        artifact = Artifact.from_bytes(data)
        (finding,) = self.engine.validate(artifact, {})
        assert finding.severity is Severity.ERROR
        with pytest.raises(InvalidModel, match="external files.*embed the data"):
            self.load(artifact)

    def test_files_beside_a_model_file_are_found(self, tmp_path: Path) -> None:
        model = self.load(Artifact.from_file(models.external_linear(tmp_path)))
        x = np.ones((1, 3), np.float32)
        assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)

    def test_files_beside_a_model_in_memory_are_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        path = models.external_linear(tmp_path)
        artifact = in_memory(Artifact.from_file(path))
        (tmp_path / "w.bin").write_bytes(bytes(24))
        model = self.load(artifact)
        (tmp_path / "w.bin").unlink()
        x = np.ones((1, 3), np.float32)
        assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)

    def test_a_model_in_memory_must_bring_every_file(self, tmp_path: Path) -> None:
        data = models.external_linear(tmp_path).read_bytes()
        with pytest.raises(InvalidModel, match="external files.*embed the data"):
            self.load(Artifact.from_files("m.onnx", {"m.onnx": data, "other.bin": b"weights"}, Format.ONNX))

    def test_a_folder_holds_a_model_and_its_weights(self, tmp_path: Path) -> None:
        folder = tmp_path / "model.onnx"
        folder.mkdir()
        models.external_linear(folder).rename(folder / "model.onnx")
        model = self.load(Artifact.from_file(folder))
        x = np.ones((1, 3), np.float32)
        assert_tensors_close(model.forward({"x": x}), {"y": x @ models.linear_weight()}, rtol=1e-5)

    def test_a_missing_file_beside_a_model_file_is_named(self, tmp_path: Path) -> None:
        path = models.external_linear(tmp_path)
        (tmp_path / "w.bin").unlink()
        with pytest.raises(InvalidModel, match=r"'w\.bin' is missing \(put 'w\.bin' in the model's folder\)"):
            self.load(Artifact.from_file(path))


def in_memory(artifact: Artifact) -> Artifact:
    """``artifact`` as a bundle gives it: with all its files, and no path."""
    return Artifact.from_files(artifact.file_name, artifact.files(), artifact.format)


def _file(artifact: Artifact, folder: Path) -> Path:
    """What ``Artifact.from_file`` opens as ``artifact``."""
    if artifact.path:
        return artifact.path.parent if artifact.format is Format.SAVED_MODEL else artifact.path
    suffix = next(suffix for suffix, format in SUFFIXES.items() if format is artifact.format)
    path = folder / f"{artifact.digest[:8]}{suffix}"
    path.write_bytes(artifact.data)
    return path


# In a fresh process, past what the engine takes once for all models: the peak of loading and running one more.
_MEMORY_GROWTH = """
import json, sys
from pathlib import Path
import numpy as np
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine

def kib(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

def load_and_run(artifact, options):
    model = engine.load(artifact, {**options, "threads": 1})
    model.forward({"x": np.ones((1, model.signature.inputs[0].shape[1]), np.float32)})
    return model

engine = get_engine(sys.argv[1])
small, large = [(Artifact.from_file(path), options) for path, options in json.loads(sys.argv[2])]
keep = load_and_run(*small)
before = kib("VmRSS")
large = load_and_run(*large)
print((kib("VmHWM") - before) * 1024)
"""
