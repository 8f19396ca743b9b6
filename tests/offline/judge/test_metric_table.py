from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.errors import InvalidArgument
from penstock.offline.judge.metric_table import METRICS, metric_named


def test_every_metric_says_what_it_takes() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.shapes
        assert metric.of.__doc__


def test_an_unknown_metric_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidArgument, match="no metric 'accuracy'") as error:
        metric_named("accuracy")
    assert "top-1" in (error.value.hint or "")
    assert "module:function" in (error.value.hint or "")


def test_a_function_of_the_user_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_metric.py").write_text("def score(output, labels):\n    return 0.5\nlimit = 3\n")
    (tmp_path / "my_broken_metric.py").write_text("1 / 0\n")
    (tmp_path / "my_ending_metric.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert metric_named("my_own_metric:score").of(None, None) == 0.5  # type: ignore[arg-type]
    assert sys.path == before
    for name, cause in {
        "my_own_metric:none": "AttributeError",
        "my_own_metric:limit": "is not a function",
        "my_broken_metric:score": "ZeroDivisionError",
        "my_ending_metric:score": "SystemExit",
        "no_such_module:score": "ModuleNotFoundError",
    }.items():
        with pytest.raises(InvalidArgument, match=cause):
            metric_named(name)


def test_a_metric_that_changes_the_working_directory_moves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_moving_metric.py").write_text(
        "import os, sys\nos.chdir('/')\nsys.path.pop(0)\ndef score(output, labels):\n    os.chdir('/')\n    return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    score = metric_named("my_moving_metric:score").of
    assert Path.cwd() == tmp_path
    assert score(None, None) == 0.5  # type: ignore[arg-type]
    assert Path.cwd() == tmp_path
    assert sys.path == before


def test_what_a_metric_prints_is_no_output_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_loud_metric.py").write_text(
        "import os, sys\nprint('loaded')\ndef score(output, labels):\n    print('scored')\n    os.system('echo ran')\n"
        "    sys.stdout.close()\n    os.close(1)\n    return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    assert metric_named("my_loud_metric:score").of(None, None) == 0.5  # type: ignore[arg-type]
    print("answer")
    found = capfd.readouterr()
    assert found.out == "answer\n"
    assert sorted(found.err.split()) == ["loaded", "ran", "scored"]
