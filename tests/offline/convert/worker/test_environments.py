import contextlib
import fcntl
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fake_worker
from penstock.errors import PermissionDenied, ResourceExhausted, Unavailable, Unsupported
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.registry import FormatEntry
from penstock.offline.convert.worker.environments import environment
from penstock.offline.convert.worker.remote import open_remote

ENTRY = FormatEntry("fake", "Fake", "fake", "", "fake", False, ("fakeframework==1.0",))


def write_wheel(folder: Path, files: dict[str, str]) -> None:
    """A wheel of a package 'fakeframework' with ``files``."""
    info = "fakeframework-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: fakeframework\nVersion: 1.0\n"
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    with zipfile.ZipFile(folder / "fakeframework-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One environment for all tests that need one: its cache folder, interpreter, and what was reported."""
    folder = tmp_path_factory.mktemp("environments")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    files = {"fakeframework.pth": "\n".join(packages), "fake_worker.py": Path(fake_worker.__file__).read_text()}
    write_wheel(folder, files)
    reported: list[str] = []
    with settings(folder):
        yield folder, environment(ENTRY, reported.append, base=()), reported


@contextlib.contextmanager
def settings(folder: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("PIP_TARGET", str(folder / "target"))
        patch.setenv("PIP_USER", "1")
        yield


def test_progress_is_reported(made):
    reported = made[2]
    assert reported[0] == "making an environment for Fake"
    assert any(line.startswith("Installing ") for line in reported)


def test_an_environment_is_made_once(made):
    _, python, _ = made
    reported: list[str] = []
    assert environment(ENTRY, reported.append, base=()) == python
    assert not reported


def test_a_process_there_has_the_same_penstock_and_nothing_else_of_this_one(made, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_worker.__file__).parent))
    code = """
import fake_worker, penstock, sys
if call == "forward":
    result = {"y": np.array([sys.prefix, penstock.__file__, fake_worker.__file__, repr(sys.path)], object)}
"""
    (tmp_path / "source").write_text(code)
    with open_remote("fake", tmp_path / "source", ConvertOptions(), made[1], program="fake_worker") as model:
        prefix, package, framework, paths = (
            text.decode() for text in model.forward({"x": np.ones((1, 2), np.float32)})["y"]
        )
    assert Path(prefix) == made[1].parent.parent
    assert Path(package).parent == Path(fake_worker.serve.__file__).parents[3]
    assert framework.startswith(prefix)
    assert str(Path(fake_worker.__file__).parent) not in paths


def test_other_requirements_get_another_environment_and_one_that_fails_leaves_nothing(made):
    folder, python, _ = made
    entry = FormatEntry("fake", "Fake", "fake", "", "fake", False, ("fakeframework==2.0",))
    with pytest.raises(Unavailable, match=r"environment for Fake cannot be made: .*fakeframework==2.0") as caught:
        environment(entry, base=())
    assert "fakeframework==2.0" in caught.value.hint
    assert [path for path in (folder / "penstock/environments").iterdir() if path.is_dir()] == [python.parent.parent]


def test_an_interrupt_leaves_nothing(made):
    folder, python, _ = made
    entry = FormatEntry("fake", "Fake", "fake", "", "other", False, ("fakeframework==1.0",))

    def interrupt(line: str) -> None:
        if not line.startswith("making"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment(entry, interrupt, base=())
    assert [path for path in (folder / "penstock/environments").iterdir() if path.is_dir()] == [python.parent.parent]


def test_an_environment_without_its_mark_is_made_again(made):
    python = made[1]
    (python.parent.parent / "penstock.complete").unlink()
    (python.parent.parent / "rest").touch()
    assert environment(ENTRY, base=()) == python
    assert not (python.parent.parent / "rest").exists()


def test_a_call_waits_for_another_process_that_makes_the_environment(made):
    python = made[1]
    waits = threading.Event()
    with python.parent.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found: list[Path] = []
        caller = threading.Thread(target=lambda: found.append(environment(ENTRY, lambda _: waits.set(), base=())))
        caller.start()
        assert waits.wait(20)
        assert not found
    caller.join(20)
    assert found == [python]


def test_a_format_without_requirements_has_no_environment():
    with pytest.raises(Unsupported, match="Plain has no isolated"):
        environment(FormatEntry("plain", "Plain", "plain", "", "", False))


def test_a_cache_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "penstock/environments").mkdir(parents=True)
    (tmp_path / "penstock/environments").chmod(0o777)
    with settings(tmp_path), pytest.raises(PermissionDenied, match="other users"):
        environment(ENTRY, base=())


def test_a_cache_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "penstock").touch()
    with settings(tmp_path), pytest.raises(ResourceExhausted, match="cache folder .* cannot be made"):
        environment(ENTRY, base=())


def test_a_relative_cache_folder_is_ignored(tmp_path, monkeypatch):
    """As the specification of these folders says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = tmp_path / ".cache" / "penstock" / "environments"
    usual.mkdir(parents=True)
    usual.chmod(0o777)
    with pytest.raises(PermissionDenied, match=str(usual)):
        environment(ENTRY, base=())
