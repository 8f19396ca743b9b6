import operator
import os

import numpy as np
import pytest

import models
from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.apart import Apart, NotStarted, forked
from row_graphs import parsed


@pytest.fixture
def apart():
    found = Apart()
    yield found
    found.close()


def contracts() -> Artifact:
    """A contraction over an axis that may be empty, for which ONNX Runtime 1.31 divides by the axis's size."""
    return parsed('y = Einsum<equation = "ia...,ja...->ij...">(x, x)', "float[N,M,K] x", "float[N,P,Q] y")


def test_outputs_are_those_of_the_model(apart):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(apart.forward(parsed("y = Neg(x)"), {"x": x})["y"], -x)


def test_relative_paths_are_those_of_the_parent(apart, tmp_path, monkeypatch):
    apart.call(os.path.getsize, os.devnull)  # starts the process, in another folder
    (tmp_path / "data").write_bytes(bytes(7))
    monkeypatch.chdir(tmp_path)
    assert apart.call(os.path.getsize, "data") == 7


def test_a_parent_whose_folder_was_removed_can_still_ask(apart, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert apart.call(os.path.getsize, os.devnull) == 0


def test_a_model_that_ends_its_process_is_an_error_and_the_next_call_works(apart):
    x = np.ones((2, 4, 3), np.float32)
    assert apart.forward(contracts(), {"x": x})["y"].shape == (2, 2, 3)
    with pytest.raises(PenstockError, match="ended its process with status -"):
        apart.forward(contracts(), {"x": x[:, :0, :0]})
    assert apart.forward(contracts(), {"x": x})["y"].shape == (2, 2, 3)


def test_a_model_that_fails_is_an_error(apart):
    with pytest.raises(PenstockError, match="the model rejects these inputs: Reshape"):
        apart.forward(parsed("y = Reshape(x, s)", weights="int64[1] s = {3}"), {"x": np.ones((2, 4), np.float32)})
    with pytest.raises(PenstockError, match="rubbish|refuses"):
        apart.forward(models.unknown_operator(), {"x": np.ones((2, 4), np.float32)})


def test_any_function_of_a_module_is_called_in_the_child(apart):
    assert apart.call(os.getpid) == apart.call(os.getpid) != os.getpid()
    assert apart.call(operator.add, 2, 3) == 5


def test_what_an_engine_prints_is_no_answer(apart):
    assert apart.call(os.write, 1, b"a warning\n") == 10
    assert apart.call(operator.add, 2, 3) == 5


def test_an_answer_that_nobody_waited_for_is_not_given_to_the_next_call(apart, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    assert apart.call(operator.add, 1, 1) == 2
    with monkeypatch.context() as patch:
        patch.setattr("select.select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            apart.call(operator.add, 2, 2)
    assert apart.call(operator.add, 3, 3) == 6


def test_a_call_that_takes_too_long_is_an_error(apart):
    with pytest.raises(PenstockError, match="more than 0 s"):
        apart.call(operator.add, 1, 1, patience_s=0.0)


def test_a_copy_of_the_process_ends_with_its_call(apart):
    pid = apart.call(os.getpid)
    first, second = (apart.call(forked, os.getpid) for _ in range(2))
    assert len({pid, first, second}) == 3
    with pytest.raises(PenstockError, match="ended its process with status -6"):
        apart.call(forked, os.abort)
    assert apart.call(os.getpid) == pid


def test_files_of_the_working_directory_are_not_imported(apart, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('a file of the working directory was run')")
    monkeypatch.chdir(tmp_path)
    assert apart.call(operator.add, 2, 3) == 5


def test_a_process_that_cannot_start_is_told_apart_from_a_model_that_fails(apart, tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise ImportError('no such library')")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        for _ in range(2):
            with pytest.raises(NotStarted, match="could not start: ImportError: no such library") as caught:
                apart.forward(models.linear(), {})
            assert "PYTHONPATH" in caught.value.hint
    assert apart.call(operator.add, 2, 3) == 5


def test_a_process_that_dies_while_it_starts_says_how(apart, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(NotStarted, match="could not start: it ended with status 1"):
        apart.call(os.getpid)
