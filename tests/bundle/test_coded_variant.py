"""A bundle with a coded variant opens anywhere and decodes to exactly the packed model; otherwise it is rejected."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock
from bundles import manifest_for
from penstock.artifact import file_entries, sha256
from penstock.bundle.manifest import Manifest, Variant, decode, encode
from penstock.bundle.open import open_bundle
from penstock.bundle.pack import code_variants, pack
from penstock.errors import IntegrityError
from penstock.resources import machine_facts
from penstock.tensor import DataType, Signature, TensorSpec

_PATH = "models/m.onnx"


def _model() -> bytes:
    weight = np.random.default_rng(0).choice(np.float32([0, 0, 0, 0.5, -0.25]), (64, 64))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString(deterministic=True))


_MODEL = _model()


def _manifest() -> Manifest:
    spec = TensorSpec("x", DataType.FP32, (-1, 64)), TensorSpec("y", DataType.FP32, (-1, 64))
    return manifest_for(
        {_PATH: _MODEL},
        signature=Signature((spec[0],), (spec[1],)),
        machine=machine_facts(),
        variants=(
            Variant("fp32", _PATH, "onnxruntime", "fp32", options={"threads": 1}),
            Variant("two", _PATH, "onnxruntime", "fp32"),
        ),
    )


def test_it_opens_and_answers_as_the_plain_one(tmp_path: Path) -> None:
    manifest, files = code_variants(_manifest(), {_PATH: _MODEL})
    assert list(files) == ["models/m.coded"]
    assert len(files["models/m.coded"]) * 10 < len(_MODEL)
    pack(_manifest(), {_PATH: _MODEL}, tmp_path / "plain.bundle")
    pack(manifest, files, tmp_path / "coded.bundle")
    opened = open_bundle(tmp_path / "coded.bundle")
    for variant in opened.manifest.variants:
        assert opened.artifact(variant).data == _MODEL
    sample = {"x": np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)}
    answers = []
    for name in ("plain", "coded"):
        with penstock.open(tmp_path / f"{name}.bundle") as model:
            answers.append(model.infer(sample)["y"])
    assert np.array_equal(*answers)


def test_only_bundles_with_a_coded_variant_have_the_new_schema() -> None:
    manifest, _ = code_variants(_manifest(), {_PATH: _MODEL})
    assert decode(encode(_manifest())).schema_version == 1
    assert decode(encode(manifest)).schema_version == 2
    forged = encode(manifest).replace(b'"schema_version":2', b'"schema_version":1')
    with pytest.raises(IntegrityError, match="schema version 1, but its content needs version 2"):
        decode(forged)
    with pytest.raises(IntegrityError, match="manifest cannot be read.*coding"):
        decode(encode(manifest).replace(b'"coding":"coded"', b'"coding":"zipped"'))


def test_a_model_that_does_not_shrink_stays_as_it_is() -> None:
    noise = {_PATH: np.random.default_rng(0).bytes(1000)}
    with pytest.raises(penstock.PenstockError, match="not an ONNX file"):
        code_variants(manifest_for(noise, variants=(Variant("fp32", _PATH, "onnxruntime", "fp32"),)), noise)
    tiny = {_PATH: onnx.ModelProto(ir_version=8).SerializeToString()}
    manifest = manifest_for(tiny, variants=(Variant("fp32", _PATH, "onnxruntime", "fp32"),))
    assert code_variants(manifest, tiny) == (manifest, tiny)


@pytest.mark.parametrize(
    "change",
    [
        {"decoded_bytes": len(_MODEL) - 1},
        {"decoded_bytes": len(_MODEL) + 1},
        {"decoded_bytes": 0},
        {"decoded_bytes": -1},
        {"decoded_sha256": sha256(b"another")},
    ],
)
def test_what_decodes_to_another_model_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    manifest, files = code_variants(_manifest(), {_PATH: _MODEL})
    variants = tuple(msgspec.structs.replace(variant, **change) for variant in manifest.variants)
    pack(msgspec.structs.replace(manifest, variants=variants), files, tmp_path / "a.bundle")
    opened = open_bundle(tmp_path / "a.bundle")
    with pytest.raises(IntegrityError, match=r"decodes to"):
        opened.artifact(opened.manifest.variants[0])


def test_a_file_that_is_no_coded_model_is_refused(tmp_path: Path) -> None:
    manifest, files = code_variants(_manifest(), {_PATH: _MODEL})
    files = dict.fromkeys(files, _MODEL)
    pack(msgspec.structs.replace(manifest, files=file_entries(files)), files, tmp_path / "a.bundle")
    opened = open_bundle(tmp_path / "a.bundle")
    with pytest.raises(IntegrityError, match="not a coded model"):
        opened.artifact(opened.manifest.variants[0])
