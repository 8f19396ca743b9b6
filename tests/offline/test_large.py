"""Every method gives the same answers for a model that exceeds the limit as for the same model below it, or refuses it. The limit is
lowered, so that the models are small.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import networks
import penstock
from penstock.artifact import Artifact
from penstock.bundle.open import open_bundle
from penstock.bundle.pack_model import pack_model
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.build import Compression, Recipe, build
from penstock.offline.compress.job import Job
from penstock.offline.compress.method import Method
from penstock.offline.compress.methods.distill import DistillMethod
from penstock.offline.compress.methods.low_rank import LowRankMethod
from penstock.offline.compress.methods.prune import PruneMethod
from penstock.offline.compress.methods.prune_channels import PruneChannelsMethod
from penstock.offline.compress.methods.quantize import QuantizeMethod
from penstock.offline.compress.methods.sensitivity import SensitivityMethod
from penstock.offline.compress.methods.share import ShareMethod
from penstock.offline.judge.contract import Contract
from penstock.offline.optimize import mapped
from penstock.offline.optimize.optimizer import optimize
from penstock.tensor import Array

LIMIT, LEAST = 16 << 10, 512


def low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LIMIT_BYTES", LIMIT)
    monkeypatch.setattr(mapped, "LEAST_BYTES", LEAST)


def words(rows: int = 600, width: int = 96) -> Artifact:
    """ids (N, 4) to y (N, 6): a table, and two layers."""
    n = networks.Network()
    table = n.normal(rows, 64)
    pooled = n.op("ReduceMean", n.op("Gather", table, "ids"), axes=[1], keepdims=0)
    n.gemm(n.op("Relu", n.gemm(pooled, 64, width)), width, 6, name="y")
    graph = onnx.helper.make_graph(
        n.nodes,
        "words",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["N", 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 6])],
        n.weights,
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(made.SerializeToString())


def images(count: int) -> dict[str, Array]:
    return {"x": networks.images(count)}


def ids(count: int) -> dict[str, Array]:
    return {"ids": np.random.default_rng(1).integers(0, 600, (count, 4))}


MODELS = {"words": (words, ids), "cnn": (networks.cnn, images)}


def outside(artifact: Artifact, folder: Path) -> Path:
    """``artifact`` as a file with external data."""
    path = folder / "net.onnx"
    proto = onnx.load_model_from_string(artifact.data)
    onnx.save(proto, path, save_as_external_data=True, location="net.bin", size_threshold=LEAST)
    return path


def answers(path: Path, inputs: dict[str, Array]) -> list[Array]:
    """The outputs of plain ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(path, options).run(None, inputs))


FAST = {"budget_s": 0.05, "metric": "fidelity"}
INT8 = QuantizeMethod(method="min-max", placement="linear", **FAST)
METHODS: dict[str, tuple[str, Method]] = {
    "int8": ("cnn", INT8),
    "int8-plain": ("cnn", QuantizeMethod(method="min-max", placement="linear", equalize=False, **FAST)),
    "int8-words": ("words", INT8),
    "int8-dynamic": ("words", QuantizeMethod(precision="int8-dynamic", **FAST)),
    "int8-weights": ("words", QuantizeMethod(precision="int8-weights", **FAST)),
    "int4-weights": ("words", QuantizeMethod(precision="int4-weights", **FAST)),
    "fp16-weights": ("words", QuantizeMethod(precision="fp16-weights", **FAST)),
    "bf16-weights": ("cnn", QuantizeMethod(precision="bf16-weights", **FAST)),
    "keep-float": ("words", QuantizeMethod(precision="int8-dynamic", keep_float=("y",), **FAST)),
    "prune": ("words", PruneMethod(sparsity=0.5, **FAST)),
    "prune-layers": ("cnn", PruneMethod(sparsity=0.5, per_layer=True, **FAST)),
    "prune-2-4": ("cnn", PruneMethod(n_m="2:4", **FAST)),
    "prune-channels": ("cnn", PruneChannelsMethod(width=0.5, **FAST)),
    "low-rank": ("words", LowRankMethod(rank=4, **FAST)),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_same_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, method = METHODS[name]
    network, samples = MODELS[kind]
    path = outside(network(), tmp_path)
    found = []
    for limit in ("as it is", "low"):
        if limit == "low":
            low(monkeypatch)
        target = tmp_path / f"{limit}.onnx"
        outcome = Job(method, path, samples(64), samples(40), target).run()
        assert outcome.comparison is not None
        found.append(answers(target, samples(10)))
        assert outcome.model.size_bytes == pytest.approx(
            sum(f.stat().st_size for f in tmp_path.glob(f"{limit}*")), 0.05
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def test_methods_that_need_one_file_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = outside(words(), tmp_path)
    low(monkeypatch)
    with pytest.raises(Unsupported, match="share supports only models below 2 GiB"):
        Job(ShareMethod(), path)
    recipe = Recipe(compression=Compression(budget_s=1.0))
    with pytest.raises(Unsupported, match="a compression plan supports only models below 2 GiB"):
        build(path, tmp_path / "a.bundle", ids(64), ids(40), recipe)


def test_training_refuses_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    path = outside(words(), tmp_path)
    low(monkeypatch)
    for method in (LowRankMethod(rank=4, recover=True), PruneMethod(iterative=True)):
        with pytest.raises(Unsupported, match="training supports only models below 2 GiB"):
            Job(method, path, ids(64))
    small = tmp_path / "small.onnx"
    small.write_bytes(words(rows=8, width=8).data)
    with pytest.raises(Unsupported, match=r"student '.*net.onnx': the model has .* training supports only"):
        Job(DistillMethod(student=str(path)), small, {"ids": ids(64)["ids"] % 8})


def test_the_weights_of_the_input_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = outside(words(), tmp_path)
    (tmp_path / "net.bin").rename(tmp_path / "out.onnx.data")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "out.onnx.data" if entry.key == "location" else entry.value
    path.write_bytes(proto.SerializeToString())
    low(monkeypatch)
    with pytest.raises(InvalidArgument, match="would overwrite another file"):
        Job(PruneMethod(), path, output=tmp_path / "out.onnx")


def test_sensitivity_measures_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = outside(words(), tmp_path)
    low(monkeypatch)
    assert Job(SensitivityMethod(metric="fidelity", budget_s=0.05), path, ids(64)).run().made.table


def test_optimize_gives_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = networks.Network()
    x = n.op("Identity", n.op("Relu", n.gemm("x", 16, 300)))
    n.gemm(x, 300, 4, name="y")
    path = outside(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), tmp_path)
    wanted, plain = optimize(Artifact.from_file(path))
    low(monkeypatch)
    made, report = optimize(Artifact.from_file(path))
    assert made.beside
    assert report.applied == plain.applied != []
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    assert made.path is not None
    (tmp_path / "wanted.onnx").write_bytes(wanted.data)
    np.testing.assert_array_equal(answers(made.path, {"x": x})[0], answers(tmp_path / "wanted.onnx", {"x": x})[0])


@pytest.mark.parametrize("objective", ["latency", "size"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_large_model_is_built_into_a_bundle(
    objective: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = outside(words(), tmp_path)
    want = answers(path, ids(10))[0]
    low(monkeypatch)
    # No candidate can be as exact as this, so that the original itself is packed.
    contract = Contract(max_output_error=1e-12)
    recipe = Recipe(contract, objective=objective, budget_s=5.0, folder=folder, threads=(1,))  # type: ignore[arg-type]
    build(path, tmp_path / "net.bundle", ids(64), ids(40), recipe)
    (variant, *_) = open_bundle(tmp_path / "net.bundle").manifest.variants
    assert variant.beside
    (tmp_path / "net.bin").unlink()
    with penstock.open(tmp_path / "net.bundle") as model:
        np.testing.assert_allclose(model.infer(ids(10))["y"], want, rtol=1e-5, atol=1e-6)


def test_a_large_result_is_packed_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = outside(words(), tmp_path)
    low(monkeypatch)
    made = Job(PruneMethod(sparsity=0.5), path).run().model
    pack_model(made, tmp_path / "pruned.bundle")
    assert made.path is not None
    want = answers(made.path, ids(10))[0]
    del made
    with penstock.open(tmp_path / "pruned.bundle") as model:
        np.testing.assert_allclose(model.infer(ids(10))["y"], want, rtol=1e-5, atol=1e-6)
