import logging
from pathlib import Path
from typing import Any

import pytest

import models
from penstock.artifact import Artifact
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.loader import load
from penstock.online.repository.loading.merging import unmerged
from penstock.online.repository.resolved_version import LoadOptions, ResolvedVersion, find
from penstock.online.repository.triton.doctor import diagnose
from row_graphs import parsed

DEPENDENT = parsed("m = ReduceMean<axes = [0]>(x) d = Sub(m, c) r = Relu(d) y = Sub(x, r)", weights="float c = {100}")
REASON = (
    "requests to model 'm' are not merged: node 'm' (ReduceMean) mixes the rows of a batch; "
    "set 'max_batch_size' if its rows are independent"
)


def resolve(root: Path, config: str, artifact: Artifact, **load_options: Any) -> ResolvedVersion:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(config)
    (root / "m" / "1" / "model.onnx").write_bytes(artifact.data)
    return find(Layout((root,), "", False, {}).define("m"), "1", LoadOptions(**load_options))


def served(folder: Path, config: str, artifact: Artifact) -> int:
    loaded = load(resolve(folder, config, artifact))
    loaded.drop()
    return loaded.config.max_batch_size


def test_a_model_without_a_proof_is_not_merged_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert served(tmp_path, "", DEPENDENT) == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [REASON]


def test_a_model_with_a_proof_is_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert served(tmp_path, "", models.linear()) == 64
    assert not caplog.records


def test_a_configured_batch_size_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert served(tmp_path, "max_batch_size: 8", DEPENDENT) == 8
    assert not caplog.records


def test_batches_of_one_row_need_no_proof(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, "", DEPENDENT, max_batch=1)
    loaded = load(resolved)
    assert unmerged(resolved, loaded.models[0]) == ""
    loaded.drop()


def test_models_in_processes_are_examined_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(resolve(tmp_path, "", DEPENDENT, isolation="process"))
    loaded.drop()
    assert loaded.config.max_batch_size == 0
    assert REASON in caplog.text


def test_the_doctor_says_why_and_shows_what_the_server_makes_of_it(tmp_path: Path) -> None:
    resolve(tmp_path, "", DEPENDENT)
    found = diagnose({"m": tmp_path / "m"}, "m")
    assert [finding.message for finding in found.findings] == [REASON]
    assert not found.is_sick
    (tmp_path / "m" / "config.pbtxt").unlink()
    found = diagnose({"m": tmp_path / "m"}, "m")
    assert "max_batch_size: 0" in (found.mended or "")


FIXED = (
    "requests to model 'm' are not merged: input 'x' of the model, [1, 3], has no free first dimension; "
    "export the model with a free first dimension to merge its requests"
)


def test_a_fixed_first_dimension_is_named_by_the_log_and_the_doctor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert served(tmp_path, "", models.fixed_batch()) == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [FIXED]
    found = diagnose({"m": tmp_path / "m"}, "m")
    assert [finding.message for finding in found.findings] == [FIXED]
    assert not found.is_sick


def test_a_model_that_is_not_to_be_merged_needs_no_explanation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert served(tmp_path, "max_batch_size: 0", models.fixed_batch()) == 0
    assert not caplog.records
