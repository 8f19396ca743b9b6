from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import call_models
import evidences
import input_models
import models
from bundles import packed
from networks import Network
from penstock.bundle.manifest import ServingConfig
from penstock.bundle.open import open_bundle
from penstock.bundle.pack_model import pack_model
from penstock.cli.infer import write_npz
from penstock.engines.registry import get_engine
from penstock.errors import ResourceExhausted
from penstock.offline.sessions import signature_of
from penstock.tensor import DataType

ROWS = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)


def test_a_bundle_answers_a_file(penstock, folder: Path) -> None:
    packed(folder / "linear.bundle", {"model.onnx": models.linear(3, 2).data})
    done = penstock("infer", "linear.bundle", "--inputs", "data.npz", "--outputs", "out.npz", "--json")
    assert done.code == 0
    found = done.json
    assert (found["model"], found["variant"], found["rows"]) == ("test", "fp32", 20)
    assert (found["metric"], found["accuracy"]) == ("top-1", 1.0)
    assert (found["outputs"], found["written"]) == ({"y": [20, 2]}, "out.npz")
    assert found["rows_per_second"] > 0
    with np.load("data.npz") as data, np.load("out.npz") as out:
        np.testing.assert_allclose(out["y"], data["x"] @ models.linear_weight(3, 2), rtol=1e-5)


@pytest.mark.parametrize("packed_first", [True, False])
def test_an_openvino_model_of_two_files(penstock, folder: Path, packed_first: bool) -> None:
    pytest.importorskip("openvino")
    import openvino_models  # noqa: PLC0415 - the package is optional

    model = openvino_models.linear()
    assert model.path is not None
    if packed_first:
        pack_model(model, "ir.bundle")
    target = "ir.bundle" if packed_first else model.path
    found = penstock("infer", target, "--inputs", "data.npz", "--outputs", "out.npz", "--json").json
    assert (found["variant"], found["accuracy"]) == ("openvino" if packed_first else None, 1.0)


def test_an_onnx_bundle_with_external_data(penstock, folder: Path) -> None:
    pack_model(models.external_linear(folder), "a.bundle")
    (folder / "w.bin").unlink()
    assert penstock("infer", "a.bundle", "--inputs", "data.npz", "--json").json["accuracy"] == 1.0


def test_a_person_reads_shapes_and_accuracy(penstock, folder: Path) -> None:
    done = penstock("infer", "linear.onnx", "--inputs", "data.npz", "--batch", "7")
    assert done.code == 0
    assert "20 rows in" in done.out
    assert "y  float32[20, 2]" in done.out
    assert "accuracy  100.00% top-1 of 20 labels" in done.out


def test_without_labels_there_is_no_accuracy(penstock, folder: Path) -> None:
    np.savez("plain.npz", x=np.ones((3, 3), np.float32))
    assert penstock("infer", "linear.onnx", "--inputs", "plain.npz", "--json").json["accuracy"] is None


def test_labels_beyond_the_classes_give_no_accuracy(penstock, folder: Path) -> None:
    np.savez("many.npz", x=np.ones((3, 3), np.float32), labels=np.array([0, 1, 7]))
    found = penstock("infer", "linear.onnx", "--inputs", "many.npz", "--json").json
    assert found["accuracy"] is None
    assert "labels go up to 7" in found["accuracy_note"]
    assert "accuracy  not computed: labels go up to 7" in penstock("infer", "linear.onnx", "--inputs", "many.npz").out


@pytest.mark.parametrize(
    ("labels", "metric", "accuracy"),
    [
        (np.array(["0", "1", "1"]), None, None),
        (np.zeros((3, 3), np.int64), None, None),
        (np.zeros(3, np.float32), None, None),
        ((ROWS @ models.linear_weight(3, 2) > 0).astype(np.int64), "average-precision", 1.0),
        (ROWS @ models.linear_weight(3, 2), "r2", 1.0),
    ],
    ids=["text", "square", "numbers", "several classes", "regression"],
)
def test_labels_are_compared_by_a_metric_that_suits_them(
    penstock, folder: Path, labels: np.ndarray, metric: str | None, accuracy: float | None
) -> None:
    np.savez("odd.npz", x=ROWS, labels=labels)
    found = penstock("infer", "linear.onnx", "--inputs", "odd.npz", "--json").json
    assert found["metric"] == metric
    assert found["accuracy"] == (None if accuracy is None else pytest.approx(accuracy))
    assert bool(found["accuracy_note"]) == (accuracy is None)


def test_the_contract_of_a_bundle_names_the_metric(penstock, folder: Path) -> None:
    files = {"model.onnx": models.linear(3, 2).data}
    np.savez("classes.npz", x=ROWS, labels=(ROWS @ models.linear_weight(3, 2)).argmax(axis=1))
    for metric, expected in {"auc": ("auc", 1.0), "fidelity": ("top-1", 1.0), "os:getpid": ("os:getpid", None)}.items():
        found = evidences.evidence(evidences.record("int8"), metric=metric, metric_outputs=("y",))
        packed(folder / f"{metric[:2]}.bundle", files, evidence=found)
        answer = penstock("infer", f"{metric[:2]}.bundle", "--inputs", "classes.npz", "--json").json
        assert (answer["metric"], answer["accuracy"]) == expected


@pytest.mark.parametrize("cut", [0.0, 0.5, None])
def test_the_contract_of_a_bundle_has_the_cut(penstock, folder: Path, cut: float | None) -> None:
    """Logits that are all from 0 to 1 on these rows are not probabilities; bundles of older versions have no cut."""
    logits = np.linspace(0.02, 0.48, 24, dtype=np.float32)[:, None]
    np.savez("logits.npz", x=logits / models.linear_weight(1, 1), labels=np.ones(24, np.int64))
    found = evidences.evidence(evidences.record("fp32"), metric="top-1", metric_outputs=("y",))
    found = msgspec.structs.replace(found, metric_cut=cut, trust_labels=True)
    packed(folder / "one.bundle", {"model.onnx": models.linear(1, 1).data}, evidence=found)
    answer = penstock("infer", "one.bundle", "--inputs", "logits.npz", "--json").json
    assert answer["accuracy"] == (1.0 if cut == 0 else 0.0)
    assert f"scores above {0.5 if cut is None else cut:g} are class 1" in answer["metric_reason"]


@pytest.mark.parametrize("metric", ["top-1", "agreement"])
def test_the_contract_of_a_bundle_names_the_output(penstock, folder: Path, metric: str) -> None:
    x = np.random.default_rng(3).normal(size=(60, 3)).astype(np.float32)
    labels = (x @ models.linear_weight(seed=1)).argmax(axis=1)  # of the second output
    np.savez("second.npz", x=x, labels=labels)
    found = evidences.evidence(evidences.record("int8"), metric=metric, metric_outputs=("z",))
    packed(folder / "two.bundle", {"model.onnx": models.two_linear().data}, evidence=found)
    answer = penstock("infer", "two.bundle", "--inputs", "second.npz", "--json").json
    assert (answer["metric"], answer["metric_outputs"], answer["accuracy"]) == ("top-1", ["z"], 1.0)
    assert "the bundle's contract" in answer["metric_reason"]
    told = penstock("infer", "two.bundle", "--inputs", "second.npz").out
    assert "100.00% top-1 of 60 labels, output 'z' (the metric of the bundle's contract" in told


def test_labels_are_accepted_by_the_rule_of_the_build(penstock, folder: Path) -> None:
    x = np.random.default_rng(3).normal(size=(60, 3)).astype(np.float32)
    labels = (x @ models.linear_weight()).argmax(axis=1)
    np.savez("wrong.npz", x=x, labels=np.random.default_rng(4).permutation(labels))
    found = evidences.evidence(evidences.record("int8"), metric="top-1", metric_outputs=("y",))
    files = {"model.onnx": models.linear(3, 2).data}
    packed(folder / "a.bundle", files, evidence=found)
    packed(folder / "b.bundle", files, evidence=msgspec.structs.replace(found, trust_labels=True))
    for target in ("a.bundle", "linear.onnx"):
        answer = penstock("infer", target, "--inputs", "wrong.npz", "--json").json
        assert answer["accuracy"] is None
        assert "the model is no better than chance on the labels" in answer["accuracy_note"]
        assert "--trust-labels" in answer["accuracy_note"]
        assert "--metric" not in answer["accuracy_note"], "infer has no such option"
    for arguments in (("a.bundle", "--trust-labels"), ("b.bundle",)):
        answer = penstock("infer", *arguments, "--inputs", "wrong.npz", "--json").json
        assert 0.2 < answer["accuracy"] < 0.8


def test_rows_that_may_depend_on_each_other_are_noted(penstock, folder: Path) -> None:
    n = Network()
    n.op("Sub", "x", n.op("ReduceMean", "x", axes=[0], keepdims=1), name="y")
    model = n.artifact({"x": ["N", 3]}, {"y": ["N", 3]})
    (folder / "centred.onnx").write_bytes(model.data)
    serving = ServingConfig("fp32", 1, 1, max_batch=1)
    packed(folder / "centred.bundle", {"model.onnx": model.data}, signature=signature_of(model), serving=serving)
    for target in ("centred.onnx", "centred.bundle"):
        (note,) = penstock("infer", target, "--inputs", "data.npz", "--json").json["notes"]
        assert "rows of the model may depend on each other (" in note
        assert note.endswith("every row was run alone, as the server runs it")
        assert "note: rows of" in penstock("infer", target, "--inputs", "data.npz").out
        (note,) = penstock("infer", target, "--inputs", "data.npz", "--batch", "5", "--json").json["notes"]
        assert "calls of 5 rows" in note
    assert penstock("infer", "linear.onnx", "--inputs", "data.npz", "--json").json["notes"] == []


def test_outputs_that_are_not_finite_have_no_accuracy(penstock, folder: Path) -> None:
    huge = np.sign(models.linear_weight(3, 2)).T.repeat(2, 0)[:3] * np.float32(3e38)
    np.savez("huge.npz", x=huge, labels=np.array([0, 1, 1]))
    found = penstock("infer", "linear.onnx", "--inputs", "huge.npz", "--json").json
    assert found["accuracy"] is None
    assert "NaN or infinite" in found["accuracy_note"]


def test_mistakes(penstock, folder: Path) -> None:
    np.savez("wrong.npz", image=np.ones((3, 3), np.float32))
    for arguments, code in (
        (("none.bundle", "--inputs", "data.npz"), 3),
        (("linear.onnx", "--inputs", "none.npz"), 3),
        (("linear.onnx", "--inputs", "wrong.npz"), 2),
        (("data.npz", "--inputs", "data.npz"), 2),
        (("linear.onnx", "--inputs", "data.npz", "--outputs", "linear.onnx/out.npz"), 2),
        (("linear.onnx", "--inputs", "data.npz", "--outputs", "data.npz/out.npz"), 2),
        (("linear.onnx", "--inputs", "none.npz", "--outputs", "."), 2),
    ):
        done = penstock("infer", *arguments)
        assert done.code == code, arguments
        assert done.err.startswith("error: ")
        assert "Traceback" not in done.err


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
def test_what_is_read_is_never_overwritten(penstock, folder: Path, as_folder: bool) -> None:
    bundle = packed(folder / "b.bundle", {"model.onnx": models.linear(3, 2).data}, folder=as_folder)
    inside = ["b.bundle/out.npz"] if as_folder else []
    for target in ("data.npz", "./b.bundle", str(folder / "data.npz"), *inside):
        done = penstock("infer", "b.bundle", "--inputs", "data.npz", "--outputs", target)
        assert (done.code, "would overwrite" in done.err) == (2, True), target
    assert open_bundle(bundle).name == "test"
    with np.load("data.npz") as data:
        assert data["x"].shape == (20, 3)


def test_the_folder_of_the_outputs_is_made(penstock, folder: Path) -> None:
    assert (
        penstock("infer", "linear.onnx", "--inputs", "data.npz", "--outputs", "new/deep/out.npz", "--parents").code == 0
    )
    with np.load("new/deep/out.npz") as out:
        assert out["y"].shape == (20, 2)


def test_text_is_written_without_pickles(tmp_path: Path) -> None:
    write_npz(tmp_path / "out.npz", {"y": np.array([[b"a", "grün".encode()]], object)})
    with np.load(tmp_path / "out.npz", allow_pickle=False) as found:
        assert found["y"].astype(object).tolist() == [[b"a", "grün".encode()]]


def test_text_goes_in_and_comes_out(penstock, folder: Path) -> None:
    (folder / "text.onnx").write_bytes(models.identity(DataType.BYTES).data)
    np.savez("words.npz", x=np.array([["a", "grün"]]))
    assert penstock("infer", "text.onnx", "--inputs", "words.npz", "--outputs", "out.npz").code == 0
    with np.load("out.npz") as out:
        assert out["y"].astype(object).tolist() == [[b"a", "grün".encode()]]


def test_outputs_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "file" / "out.npz", tmp_path / "folder"):
        with pytest.raises(ResourceExhausted):
            write_npz(target, {"y": np.ones(3)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("place", ["loop.onnx", "loop/x.npz"])
def test_a_link_to_itself_is_reported(penstock, tmp_path: Path, place: str) -> None:
    loop = tmp_path / place
    (tmp_path / place.partition("/")[0]).symlink_to(place.partition("/")[0])
    model, data = tmp_path / "m.onnx", tmp_path / "x.npz"
    model.write_bytes(models.linear().data)
    np.savez(data, x=np.zeros((2, 3), np.float32))
    for arguments in (
        ("infer", loop, "--inputs", data),
        ("infer", loop, "--inputs", data, "--outputs", tmp_path / "y.npz"),
        ("infer", model, "--inputs", loop),
        ("infer", model, "--inputs", data, "--outputs", loop),
        ("build", loop, "-o", tmp_path / "a.bundle"),
        ("build", model, "-o", loop),
        ("quantize", loop, "-o", tmp_path / "q.onnx"),
        ("quantize", model, "-o", loop),
        ("inspect", loop),
    ):
        done = penstock(*arguments)
        assert done.code in (2, 3, 7), done.err
        assert done.err.startswith("error: "), arguments
        assert "Traceback" not in done.err


def saved(folder: Path, samples: list[dict[str, np.ndarray]]) -> None:
    folder.mkdir()
    for number, sample in enumerate(samples):
        np.savez(folder / f"{number}.npz", **sample)


def test_calls_of_a_model_without_rows_are_run_one_by_one(penstock, folder: Path) -> None:
    (folder / "voice.onnx").write_bytes(call_models.voice().data)
    saved(folder / "calls", call_models.voice_calls(5, (256, 128)))
    done = penstock("infer", "voice.onnx", "--inputs", "calls", "--outputs", "out.npz")
    assert done.code == 0, done.err
    assert "5 calls in" in done.out
    with np.load("out.npz") as out:
        assert {name: out[name].shape for name in out.files} == {"speech": (5, 1), "next": (5, 2, 1, 16)}


def test_outputs_of_different_shapes_need_a_folder(penstock, folder: Path) -> None:
    (folder / "tokens.onnx").write_bytes(call_models.text(per_token=True).data)
    saved(folder / "texts", call_models.texts((3, 5, 3)))
    done = penstock("infer", "tokens.onnx", "--inputs", "texts", "--outputs", "out.npz")
    assert (done.code, (folder / "out.npz").exists()) == (2, False)
    assert "has shape [1, 3, 4] in sample 0, but [1, 5, 4] in sample 1" in done.err
    assert "--outputs out" in done.err
    assert penstock("infer", "tokens.onnx", "--inputs", "texts", "--outputs", "out").code == 0
    files = sorted((folder / "out").iterdir())
    assert [np.load(file)["logits"].shape for file in files] == [(1, 3, 4), (1, 5, 4), (1, 3, 4)]
    again = penstock("infer", "tokens.onnx", "--inputs", "texts", "--outputs", "out")
    assert (again.code, sorted((folder / "out").iterdir())) == (2, files)
    assert "exists" in again.err


def test_lines_and_tables_are_inputs_too(penstock, folder: Path) -> None:
    (folder / "rows.csv").write_text("a,b,c,labels\n1,0,0,0\n0,1,0,1\n")
    (folder / "rows.jsonl").write_text('{"x": [1, 0, 0]}\n{"x": [0, 1]}\n')
    assert penstock("infer", "linear.onnx", "--inputs", "rows.csv", "--json").json["rows"] == 2
    done = penstock("infer", "linear.onnx", "--inputs", "rows.jsonl")
    assert done.code == 2
    assert "sample 1 of 'rows.jsonl': input 'x' has shape [-1, 3], but the sample has shape [1, 2]" in done.err


def test_sequences_get_the_states_that_the_model_returns(penstock, folder: Path) -> None:
    (folder / "voice.onnx").write_bytes(input_models.voice_activity().data)
    sounds = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32)
    np.savez("voice.npz", input=sounds, sr=np.array(16000), sequence=[0, 0, 0, 1, 1])
    assert penstock("infer", "voice.onnx", "--inputs", "voice.npz", "--outputs", "out.npz", "--json").code == 0
    model = get_engine("onnxruntime").load(input_models.voice_activity(), {"threads": 1})
    state = np.zeros((2, 1, 8), np.float32)
    with np.load("out.npz") as out:
        for number, sound in enumerate(sounds):
            state = state * (number != 3)
            found = model.forward({"input": sound[np.newaxis], "state": state, "sr": np.array(16000)})
            np.testing.assert_array_equal(out["stateN"][number], found["stateN"])
            assert number in (0, 3) or state.any()
            state = found["stateN"]
    model.unload()
