"""The check-up of a model repository."""

from __future__ import annotations

from pathlib import Path

import pytest

import bundles
import models
from penstock.artifact import Artifact
from penstock.engines.base import Severity
from penstock.online.repository.layout import Layout
from penstock.online.repository.triton import doctor
from penstock.online.repository.triton.doctor import Diagnosis
from penstock.online.repository.triton.text import parse_text


def diagnose(folder: Path) -> Diagnosis:
    return doctor.diagnose(Layout((folder.parent,)).models(), folder.name)


def put(root: Path, name: str, text: str | None = None, model: Artifact | None = None) -> Path:
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes((model or models.linear(3, 2)).data)
    if text is not None:
        (folder / "config.pbtxt").write_text(text)
    return folder


def test_a_model_without_a_file_gets_one_that_is_right(tmp_path: Path) -> None:
    folder = put(tmp_path, "m")
    found = diagnose(folder)
    assert (found.findings, found.before, found.diff()) == ([], "", found.mended)
    assert found.mended is not None
    config = parse_text(found.mended.encode(), "f")
    assert (config.name, config.backend, config.max_batch_size) == ("m", "onnxruntime", 64)
    assert [(one.name, list(one.dims)) for one in [*config.input, *config.output]] == [("x", [3]), ("y", [2])]
    found.write()
    again = diagnose(folder)
    assert (again.findings, again.mended, again.before) == ([], None, found.mended)
    assert not (folder / "config.pbtxt.bak").exists()


def test_what_contradicts_the_model_is_mended_and_the_old_file_kept(tmp_path: Path) -> None:
    text = """\
name: "n"
max_batch_size: 8
input { name: "xx" data_type: TYPE_INT32 dims: 4 }
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] label_filename: "l" }, { name: "other" } ]
instance_group { count: 2 kind: KIND_GPU }
parameters { key: "mine" value { string_value: "kept" } }
"""
    folder = put(tmp_path, "m", text)
    (folder / "l").touch()
    found = diagnose(folder)
    assert found.is_sick
    assert {finding.message.split("'")[1] for finding in found.findings} == {
        "name",
        "input[0].name",
        "output[0].dims",
        "output[1].name",
        "instance_group[0].kind",
    }
    assert '-name: "n"\n+name: "m"\n' in found.diff()
    found.write()
    assert (folder / "config.pbtxt.bak").read_text() == text
    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt", "config.pbtxt.bak", "l"]
    again = diagnose(folder)
    assert (again.findings, again.mended) == ([], None)
    config = parse_text(again.before.encode(), "f")
    assert [(one.name, list(one.dims)) for one in [*config.input, *config.output]] == [("x", [3]), ("y", [2])]
    assert (config.output[0].label_filename, config.instance_group[0].count) == ("l", 2)
    assert config.parameters["mine"].string_value == "kept"


def test_batches_are_left_out_where_the_model_has_none(tmp_path: Path) -> None:
    text = 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 3 }'
    found = diagnose(put(tmp_path, "m", text, models.fixed_batch()))
    assert found.is_sick
    assert found.mended is not None
    config = parse_text(found.mended.encode(), "f")
    assert (config.HasField("max_batch_size"), config.max_batch_size, list(config.input[0].dims)) == (True, 0, [1, 3])


def test_what_nobody_can_mend_is_told(tmp_path: Path) -> None:
    found = diagnose(put(tmp_path, "typo", "nmae: 'typo'"))
    assert (found.mended, [finding.hint for finding in found.findings]) == (None, ["did you mean 'name'?"])
    (tmp_path / "empty").mkdir()
    assert "has no version" in diagnose(tmp_path / "empty").findings[0].message
    broken = put(tmp_path, "broken", model=Artifact.from_bytes(b"not a model"))
    assert diagnose(broken).is_sick


def test_warnings_are_no_sickness(tmp_path: Path) -> None:
    found = diagnose(put(tmp_path, "m", "optimization { cuda { graphs: true } }"))
    assert [finding.severity for finding in found.findings] == [Severity.WARNING]
    assert (found.is_sick, found.mended) == (False, None)


def test_a_python_model_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("raise SystemExit")
    assert diagnose(tmp_path / "m").findings == []


def test_an_ensemble_has_no_version_to_look_at(tmp_path: Path) -> None:
    put(tmp_path, "m")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "config.pbtxt").write_text(
        'input { name: "a" data_type: TYPE_FP32 dims: 3 } output { name: "b" data_type: TYPE_FP32 dims: 2 }'
        "ensemble_scheduling { step { model_name: 'm' input_map { key: 'x' value: 'a' } output_map { key: 'y' value: 'b' } } }"
    )
    assert diagnose(tmp_path / "e").findings == []


def test_the_newest_version_is_looked_at(tmp_path: Path) -> None:
    folder = put(tmp_path, "m", 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 5 }')
    (folder / "10").mkdir()
    (folder / "10" / "model.onnx").write_bytes(models.linear(5, 2).data)
    assert diagnose(folder).findings == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dynamic_batching { }", "cannot be batched"),
        ('output { name: "y" label_filename: "none.txt" }', "none.txt"),
        (
            'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: [1, 3] input_data_file: "gone" } } }',
            "gone",
        ),
        ('parameters { key: "isolation" value { string_value: "cell" } }', "'parameters[isolation]' is 'cell'"),
        ("instance_group { count: 2147483647 }", "more than 1024 instances"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "the group's instances run on the CPU only"),
    ],
    ids=["batching", "labels", "warm-up", "isolation", "instances", "devices"],
)
def test_what_only_the_server_would_refuse_is_told(tmp_path: Path, text: str, reason: str) -> None:
    found = diagnose(put(tmp_path, "m", text, models.fixed_batch()))
    assert any(reason in finding.message for finding in found.findings)
    assert found.is_sick


def test_an_ensemble_needs_its_parts(tmp_path: Path) -> None:
    put(tmp_path, "part")
    put(
        tmp_path,
        "e",
        'input { name: "a" data_type: TYPE_FP32 dims: 3 } output { name: "b" data_type: TYPE_FP32 dims: 2 }'
        "ensemble_scheduling { step { model_name: 'prat' input_map { key: 'x' value: 'a' } output_map { key: 'y' value: 'b' } } }",
    )
    (finding,) = diagnose(tmp_path / "e").findings
    assert "'ensemble_scheduling.step[0].model_name' is 'prat'" in finding.message
    assert finding.hint == "did you mean 'part'?"


def test_a_version_that_is_asked_for_and_not_there_is_told(tmp_path: Path) -> None:
    (finding,) = diagnose(put(tmp_path, "m", "version_policy { specific { versions: [1, 7] } }")).findings
    assert "names 7, which model 'm' does not have" in finding.message
    assert finding.hint == "use one of: 1"


def test_no_copy_of_an_old_file_is_written_over(tmp_path: Path) -> None:
    folder = put(tmp_path, "m", "name: 'a' # mine")
    diagnose(folder).write()
    (folder / "config.pbtxt").write_text("name: 'b'")
    diagnose(folder).write()
    assert (folder / "config.pbtxt.bak").read_text() == "name: 'a' # mine"
    assert (folder / "config.pbtxt.bak1").read_text() == "name: 'b'"


def test_a_version_is_a_number_as_the_server_takes_it(tmp_path: Path) -> None:
    folder = put(tmp_path, "m")
    (folder / "1").rename(folder / "01")
    assert "has no version" in diagnose(folder).findings[0].message


def test_a_name_in_two_repositories_is_told(tmp_path: Path) -> None:
    put(tmp_path / "a", "m")
    put(tmp_path / "b", "m")
    models = Layout((tmp_path / "a", tmp_path / "b")).models()
    (finding,) = doctor.diagnose(models, "m").findings
    assert "not unique" in finding.message


def test_a_bundle_tells_its_signature(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    bundles.packed(tmp_path / "m" / "1" / "model.bundle", {"model.onnx": models.linear(3, 2).data})
    (tmp_path / "m" / "config.pbtxt").write_text('input { name: "nobody" } instance_group { kind: KIND_GPU }')
    devices, tensor = diagnose(tmp_path / "m").findings
    assert "KIND_GPU" in devices.message
    assert "is 'nobody', but the model has no such input" in tensor.message


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (
            'model_warmup { name: "w" inputs { key: "x" value { zero_data: true } } }',
            "model_warmup[0].inputs[x].data_type",
        ),
        ("sequence_batching { state { } control_input { } }", "sequence_batching.state[0].input_name"),
        ("dynamic_batching { default_queue_policy { timeout_action: 7 } }", "timeout_action"),
        ('input { name: "x" data_type: 99 format: 9 }', "input[0].format"),
    ],
)
def test_a_field_that_cannot_be_does_not_keep_the_model_from_being_read(tmp_path: Path, text: str, field: str) -> None:
    found = diagnose(put(tmp_path, "m", text))
    assert field in "\n".join(finding.message for finding in found.findings)
    assert all(str(tmp_path) not in finding.message for finding in found.findings)
