"""What keeps a server from starting on a repository is told by name, with what to do, and an exit code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from processes import ServerProcess

_EXPLICIT = ("--model-control-mode", "explicit", "--load-model")


@pytest.mark.parametrize(
    ("arguments", "config", "code", "said"),
    [
        (
            (*_EXPLICIT, "nope"),
            "",
            3,
            ["the repositories contain no model 'nope'"],
        ),
        ((*_EXPLICIT, "linaer"), "", 3, ["the repositories contain no model 'linaer'", "did you mean 'linear'?"]),
        (
            (),
            "version_policy { specific { versions: [7] } }",
            3,
            ["version 7 of model 'linear' is not in the repository", "1"],
        ),
        (
            (),
            'input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] optional: true } max_batch_size: 0',
            2,
            ["linear/config.pbtxt", "model 'linear': input 'x' cannot be 'optional'"],
        ),
    ],
    ids=["unknown model", "misspelt model", "absent version", "input that has to be given"],
)
def test_refusals_at_the_start(
    tmp_path: Path, arguments: tuple[str, ...], config: str, code: int, said: list[str]
) -> None:
    (tmp_path / "linear/1").mkdir(parents=True)
    (tmp_path / "linear/1/model.onnx").write_bytes(models.linear().data)
    (tmp_path / "linear/config.pbtxt").write_text(config)
    given = [argument.format(root=tmp_path) for argument in arguments]
    with ServerProcess(arguments=("--model-repository", str(tmp_path), *given)) as server:
        assert server.line == ""
        exit_code, errors = server.end()
    assert (exit_code, [part for part in said if part not in errors]) == (code, []), errors


def test_recorded_requests_in_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    model = tmp_path / "linear.onnx"
    model.write_bytes(models.linear().data)
    with ServerProcess(model, warmup_folder=model) as server:
        code, errors = server.end()
    assert code == 2
    assert "'warmup_folder' is a file" in errors


@pytest.mark.parametrize("is_target", [False, True], ids=["repository", "target"])
def test_an_empty_folder(tmp_path: Path, is_target: bool) -> None:
    arguments = (str(tmp_path),) if is_target else ("--model-repository", str(tmp_path))
    with ServerProcess(arguments=arguments) as server:
        assert server.line == ""
        code, errors = server.end()
    assert code == (2 if is_target else 3)
    assert f"'{tmp_path}' is empty" in errors
    assert "e.g. models/digits/1/model.onnx; see `penstock help repository`" in errors


def test_a_folder_of_model_files(tmp_path: Path) -> None:
    (tmp_path / "linear.onnx").write_bytes(models.linear().data)
    with ServerProcess(tmp_path) as server:
        code, errors = server.end()
    assert code == 2
    assert f"fix: name the model, '{tmp_path / 'linear.onnx'}'" in errors


@pytest.mark.parametrize(
    "arguments",
    [("--model-control-mode", "explicit"), ("--model-control-mode", "poll"), ("--no-exit-on-error",)],
    ids=" ".join,
)
def test_a_repository_that_may_fill_later(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with ServerProcess(arguments=("--model-repository", str(tmp_path), *arguments)) as server:
        assert server.line.startswith("ready ")
