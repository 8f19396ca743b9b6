"""Repositories on disk: the models found, the layouts refused, and the changes that affect a fingerprint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import models
from penstock.bundle.pack_model import pack_model
from penstock.errors import AlreadyExists, InvalidArgument, InvalidConfig, InvalidModel, NotFound, PenstockError
from penstock.online.repository.layout import Layout, check_name
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override
from penstock.online.repository.resolved_version import define


def write(root: Path, *paths: str, text: str = "x") -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_versions_are_folders_with_a_number_above_zero(tmp_path: Path) -> None:
    root = write(tmp_path, *(f"m/{name}/model.onnx" for name in ("2", "10", "1", "01", "0", "-1", "1a", ".3", "١")))
    write(root, "m/4", "m/labels.txt")
    model = Layout((root,)).define("m")
    assert list(model.versions) == ["1", "2", "10"]
    assert model.versions["10"] == root / "m" / "10"
    assert model.folder == root / "m"


def test_a_broken_model_does_not_hide_the_others(tmp_path: Path) -> None:
    root = write(
        tmp_path, "good/1/model.onnx", "bad/1/model.onnx", "back\\slash/1/model.onnx", "README.md", ".git/config"
    )
    write(root, "bad/config.pbtxt", text="no such field")
    (root / "nowhere").symlink_to(root / "absent")
    layout = Layout((root,))
    assert layout.models()["good"] == root / "good"
    assert set(layout.models()) == {"good", "bad", "back?slash"}
    assert isinstance(layout.models()["back?slash"], InvalidArgument)
    assert set(layout.scan()) == set(layout.models())
    assert layout.define("good").versions
    with pytest.raises(InvalidConfig, match=r"bad/config\.pbtxt:1"):
        layout.define("bad")
    with pytest.raises(InvalidArgument, match="is not a valid model name"):
        layout.define("back?slash")
    with pytest.raises(NotFound, match="the repositories contain no model 'absent'"):
        layout.define("absent")


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    for scan in (Layout((tmp_path / "absent",)).models, Layout((write(tmp_path, "file") / "file",)).scan):
        with pytest.raises(NotFound, match="model repository"):
            scan()


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    root = write(tmp_path, "m/1/model.onnx", "other/1/model.onnx")
    (root / "m").chmod(0)
    try:
        with pytest.raises(PenstockError, match="Permission denied"):
            Layout((root,)).define("m")
        assert "Permission denied" in Layout((root,)).scan()["m"]
    finally:
        (root / "m").chmod(0o700)


def test_one_name_in_two_repositories_is_refused_unless_namespaces_tell_them_apart(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first", "m/1/f", "own/1/f"), write(tmp_path / "second", "m/1/f")
    layout = Layout((first, second))
    with pytest.raises(AlreadyExists, match="model 'm' is not unique across all model repositories"):
        layout.define("m")
    assert layout.define("own").versions
    spaces = Layout((first, second), namespacing=True)
    assert set(spaces.models()) == {"first/m", "second/m", "own"}
    assert spaces.define("second/m").folder == second / "m"
    check_name("second/m")
    alike = Layout((first, write(tmp_path / "other" / "first", "m/1/f")), namespacing=True)
    assert set(alike.models()) == {"first-1/m", "first-2/m", "own"}


def test_with_namespaces_an_ensemble_finds_its_own_repository_first_then_the_one_that_it_names(tmp_path: Path) -> None:
    step = (
        'step { model_name: "m" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } '
    )
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    roots = [write(tmp_path / name, "m/1/f") for name in ("first", "second")]
    third = tmp_path / "third"
    for root, name, more in ((roots[1], "own", ""), (third, "other", f'model_namespace: "{roots[0]}"')):
        text = f'platform: "ensemble" {tensors} ensemble_scheduling {{ {step} {more} }} }}'
        write(root, f"{name}/config.pbtxt", text=text)
        (root / name / "1").mkdir()
    layout = Layout((*roots, third), namespacing=True)
    assert layout.define("own").parts == ["second/m"]
    assert layout.define("other").parts == ["first/m"]


def test_a_target_is_listed_beside_the_repositories(tmp_path: Path) -> None:
    root = write(tmp_path, "repository/m/1/f", "linear.onnx", "m.onnx") / "repository"
    targets = {name: ModelSource(name, tmp_path, {"1": tmp_path / f"{name}.onnx"}) for name in ("linear", "m")}
    layout = Layout((root,), targets=targets)
    model = layout.define("linear")
    write(tmp_path, "linear.onnx", text="longer")
    assert layout.define("linear").fingerprints["1"] != model.fingerprints["1"]
    assert layout.fingerprint("linear") != model.fingerprint
    assert layout.define("linear", Override('{"max_batch_size": 3}')).given.max_batch_size == 3
    with pytest.raises(InvalidArgument, match="cannot be replaced"):
        layout.define("linear", Override("{}", str(tmp_path)))
    with pytest.raises(AlreadyExists, match="'m' is not unique"):
        layout.define("m")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("m/1/model.onnx", {"1"}),
        ("m/1/deep/er/weights.bin", {"1"}),
        ("m/2/model.onnx", {"2"}),
        ("m/labels.txt", {""}),
        ("m/config.pbtxt", set()),
        ("m/configs/other.pbtxt", set()),
        ("m/1/.part", None),
        ("m/1/model.onnx.0123456789abcdef.partial", None),
    ],
    ids=[
        "a-version",
        "below-a-version",
        "another-version",
        "labels",
        "configuration",
        "alternative",
        "hidden",
        "partial",
    ],
)
def test_what_changes_which_fingerprint(tmp_path: Path, change: str, parts: set[str] | None) -> None:
    root = write(
        tmp_path, "m/1/model.onnx", "m/1/deep/er/weights.bin", "m/2/model.onnx", "m/labels.txt", "m/configs/a.pbtxt"
    )
    write(root, "m/config.pbtxt", text="max_batch_size: 8")
    layout = Layout((root,))
    before = layout.define("m")
    assert layout.define("m") == before
    assert layout.scan() == {"m": before.fingerprint}
    write(root, change, text="max_batch_size: 16")
    after = layout.define("m")
    assert {part for part in after.fingerprints if after.fingerprints[part] != before.fingerprints.get(part)} == (
        parts or set()
    )
    assert (after.fingerprint != before.fingerprint) == (parts is not None)


def test_a_file_put_in_the_place_of_another_of_its_size_and_time_is_seen(tmp_path: Path) -> None:
    root = write(tmp_path, "m/1/model.onnx")
    path, layout = root / "m/1/model.onnx", Layout((root,))
    stat, before = path.stat(), layout.fingerprint("m")
    (root / "new").write_text("y")
    os.utime(root / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (root / "new").replace(path)
    assert layout.fingerprint("m") != before


def test_a_link_in_a_circle_is_no_model_and_hides_none(tmp_path: Path) -> None:
    root = write(tmp_path, "good/1/model.onnx", "bad/1/model.onnx")
    for circle in (root / "circle", root / "bad" / "2"):
        circle.symlink_to(circle)
    layout = Layout((root,))
    assert set(layout.models()) == set(layout.scan()) == {"good", "bad"}
    with pytest.raises(InvalidModel, match=r"cannot read '2' in the folder of model 'bad': Too many levels"):
        layout.define("bad")


def test_a_file_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, "m/1/model.onnx")
    (root / "m" / "1" / "weights.bin").symlink_to(root / "absent")
    with pytest.raises(InvalidModel, match=r"a link is broken: '1/weights\.bin'"):
        Layout((root,)).define("m")


def test_too_many_files_and_circles_of_links_are_bounded(tmp_path: Path) -> None:
    root = write(tmp_path, "m/1/model.onnx")
    (root / "m/1/round").symlink_to(root / "m")
    with pytest.raises(InvalidModel, match="has more than 10000 files, or more than 16 levels"):
        Layout((root,)).define("m")
    assert "16 levels" in Layout((root,)).scan()["m"]


def test_what_replaces_a_configuration_and_the_files(tmp_path: Path) -> None:
    root, other = write(tmp_path / "r", "m/1/f"), write(tmp_path / "o", "7/f")
    layout = Layout((root,))
    model = layout.define("m", Override('{"max_batch_size": 2}', str(other)))
    assert model.versions == {"7": other / "7"}
    assert model.given.max_batch_size == 2
    assert model.fingerprint == layout.fingerprint("m"), "that of what lies in the repository"
    assert layout.define("new", Override("{}", str(other))).fingerprint == ""
    with pytest.raises(NotFound):
        layout.define("new", Override("{}"))


@pytest.mark.parametrize(
    "name",
    ["", " ", ".", "..", "a/../b", "../m", "/m", "m\n", "a\\b", "\0", ".hidden", "x" * 256, "模" * 86, "a//b"],
    ids=repr,
)
def test_names_that_no_model_can_have(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid model name"):
        check_name(name)


def test_a_bundle_target_that_is_replaced_brings_its_version(tmp_path: Path) -> None:
    target = tmp_path / "m.bundle"
    pack_model(models.linear(), target, version="4")
    (first,) = define([target])
    layout = Layout(targets={"m": first})
    assert list(first.versions) == list(layout.define("m").versions) == ["4"]
    target.unlink()
    pack_model(models.linear(seed=1), target, version="5")
    found = layout.define("m")
    assert (found.versions, set(found.fingerprints)) == ({"5": target}, {"", "5"})
