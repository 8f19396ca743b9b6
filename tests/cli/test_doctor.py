from __future__ import annotations

from pathlib import Path

import models


def repository(root: Path) -> Path:
    for name, text in (("good", "max_batch_size: 8"), ("bad", "max_batch_size: -1")):
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "1" / "model.onnx").write_bytes(models.linear(3, 2).data)
        (root / "models" / name / "config.pbtxt").write_text(text)
    return root / "models"


def test_a_person_reads_what_is_wrong_and_the_difference(penstock, folder: Path) -> None:
    repository(folder)
    done = penstock("doctor", "models")
    assert done.code == 1
    assert "good  no findings" in done.out
    assert "error  'max_batch_size' is -1, but must not be negative" in done.out
    assert "-max_batch_size: -1" in done.out
    assert "2 model(s), 1 with errors" in done.out


def test_a_script_reads_json(penstock, folder: Path) -> None:
    repository(folder)
    done = penstock("doctor", "models", "--json")
    assert (done.code, done.json["sick"]) == (1, 1)
    bad, good = done.json["models"]
    assert (good["name"], good["findings"], good["mended"]) == ("good", [], None)
    assert bad["findings"][0]["severity"] == "error"
    assert done.json["written"] is False


def test_a_mended_repository_is_well(penstock, folder: Path) -> None:
    root = repository(folder)
    done = penstock("doctor", "models", "--write", "--json")
    assert (done.code, done.json["written"]) == (1, True)
    assert (root / "bad" / "config.pbtxt.bak").read_text() == "max_batch_size: -1"
    assert penstock("doctor", "models").code == 0


def test_only_one_model(penstock, folder: Path) -> None:
    repository(folder)
    done = penstock("doctor", "models", "--model", "good", "--json")
    assert (done.code, [model["name"] for model in done.json["models"]]) == (0, ["good"])
    missing = penstock("doctor", "models", "--model", "goood")
    assert missing.code == 3
    assert "did you mean 'good'?" in missing.err


def test_no_repository(penstock, folder: Path) -> None:
    assert penstock("doctor", "nowhere").code == 3


def test_an_empty_repository_is_refused_with_an_example(penstock, folder: Path) -> None:
    root = repository(folder)
    (folder / "empty").mkdir()
    for arguments in (["empty"], ["models", "empty"]):
        done = penstock("doctor", *arguments)
        assert done.code == 3
        assert done.err.splitlines()[0] == "error: model repository 'empty' is empty"
        assert "models/digits/1/model.onnx" in done.err
    assert root.exists()


def test_what_is_no_repository_is_named(penstock, folder: Path) -> None:
    root = repository(folder)
    (folder / "files").mkdir()
    (folder / "files" / "linear.onnx").touch()
    assert "has no folder of a model, only files such as 'linear.onnx'" in penstock("doctor", "files").err
    done = penstock("doctor", root / "good")
    assert (done.code, "but the folder of one model, with its versions" in done.err) == (3, True)
