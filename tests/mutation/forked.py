"""Run the tests of one module, changed in memory, in a fork of a process that has already imported what the tests need.

A fresh process would spend seconds on imports for each of thousands of mutations. A fork starts with them, but imports the module
itself and all that depends on it anew, so that nothing of the original is left.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import msgspec
import pytest

from tests.mutation.targets import ROOT, SOURCE, paths_of_tests
from tests.test_imports import graph

_PLUGINS = ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
_REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that the process has already imported
_OPTIONS = ["-q", "-x", "-m", "not slow and not real", "-W", _REWRITTEN, *_PLUGINS]
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # The others would take a second to import.
_MEMORY_BYTES = 16 << 30
_SPARE_S = 3.0
_PATIENCE = 20.0
"""The time by the clock after which tests are ended, relative to the processor time that they may take."""
_SLOWEST_S = 2.0
"""Slower tests are left out, since a survivor runs all of them. What they alone notice counts as a survivor."""


class Test(msgspec.Struct):
    """A test of the unchanged module."""

    name: str
    seconds: float
    reached: set[str]
    """The names of the module's functions that the test calls. Those that set-ups call count for all tests of the file."""


class _Unchanged(msgspec.Struct):
    """A run of all tests of the unchanged module, and the modules that it has imported."""

    tests: list[Test]
    imported: list[str]


class Module:
    """A module of the package whose mutations are tested."""

    def __init__(self, file: str) -> None:
        self.path = SOURCE / file
        self.source = self.path.read_bytes()
        self._name = ".".join(("penstock", *Path(file).with_suffix("").parts))
        self._tests = [str(ROOT / test) for test in paths_of_tests(file)]
        unchanged = self._run_unchanged()
        self.tests = [test for test in unchanged.tests if test.seconds <= _SLOWEST_S]
        self._warm_up(unchanged.imported)

    def tests_reaching(self, function: str) -> list[Test]:
        """The tests to run for a mutation of ``function``, the quickest first. All of them for code outside of functions."""
        found = [test for test in self.tests if function in test.reached] or self.tests
        return sorted(found, key=lambda test: test.seconds)

    def survives(self, source: bytes, tests: Sequence[Test]) -> bool:
        """True if all ``tests`` pass with the module's ``source`` replaced. Tests that take three times as much processor
        time as usual fail.
        """
        limit = _SPARE_S + 3 * sum(test.seconds for test in tests)

        def run() -> int:
            resource.setrlimit(resource.RLIMIT_CPU, (round(limit), round(limit) + 1))
            sys.meta_path.insert(0, _Finder(self._name, self.path, source))
            return int(pytest.main([*_OPTIONS, *self._tests], [_Chosen([test.name for test in tests])]))

        return forked(run, _PATIENCE * limit) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

    def _warm_up(self, imported: Sequence[str]) -> None:
        """Import those of the modules ``imported`` that do not depend on this one, and are not tests."""
        if self._name in sys.modules:
            raise RuntimeError(f"{self._name} is already imported; judge each file in a process of its own")
        # A module needs its package, too.
        edges = {name: needs | {name.rpartition(".")[0]} for name, needs in graph().items()}
        dependents, waiting = {self._name}, [self._name]
        while waiting:
            one = waiting.pop()
            found = {name for name, needs in edges.items() if one in needs} - dependents
            dependents |= found
            waiting += found
        for name in imported:
            if name not in dependents:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        assert self._name not in sys.modules
        gc.freeze()

    def _run_unchanged(self) -> _Unchanged:
        receiver, sender = os.pipe()

        def run() -> int:
            recorder = _Recorder(str(self.path))
            status = pytest.main([*_OPTIONS, *self._tests], [recorder])
            with os.fdopen(sender, "wb") as file:
                file.write(msgspec.json.encode(_Unchanged(recorder.tests(), _imported())))
            return int(status)

        with os.fdopen(receiver, "rb") as file:
            pid = _fork(run)
            os.close(sender)
            data = file.read()
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError(f"the tests {self._tests} fail without any mutation")
        return msgspec.json.decode(data, type=_Unchanged)


def forked(work: Callable[[], int], seconds: float) -> int | None:
    """The exit status of ``work`` in a fork; None if it was ended by a signal, or has not ended after ``seconds``."""
    pid = _fork(work)
    watch = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([watch], [], [], seconds)
        # Ends what the tests have started, too.
        for end in (os.killpg, os.kill) if not ready else (os.killpg,):
            try:
                end(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    finally:
        os.close(watch)
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def _fork(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silent, stream)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = work()
    finally:
        os._exit(status)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module with another source."""

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        self._name, self._loader = name, _Loader(name, str(path), source)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self._loader) if name == self._name else None


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Chosen:
    """A plugin that runs the tests of these names, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (one for one in items if one.nodeid in self._places), key=lambda one: self._places[one.nodeid]
        )


class _Recorder:
    """A plugin that records which functions of the module at ``path`` each test calls."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._called: defaultdict[str, set[str]] = defaultdict(set)
        self._set_up: defaultdict[Path, set[str]] = defaultdict(set)
        self._items: dict[str, tuple[Path, float]] = {}
        self._current: set[str] = set()

    def tests(self) -> list[Test]:
        return [
            Test(name, seconds, self._called[name] | self._set_up[path])
            for name, (path, seconds) in self._items.items()
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._trace(self._set_up[item.path])
        try:
            return (yield)
        finally:
            self._trace(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        start = time.process_time()
        self._trace(self._called[item.nodeid])
        try:
            return (yield)
        finally:
            self._trace(None)
            self._items[item.nodeid] = item.path, time.process_time() - start

    def _trace(self, called: set[str] | None) -> None:
        if called is not None:
            self._current = called
        trace = None if called is None else self._called_function
        threading.settrace(trace)  # type: ignore[arg-type]
        sys.settrace(trace)  # type: ignore[arg-type]

    def _called_function(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_filename == self._path:
            self._current.add(frame.f_code.co_qualname.split(".<locals>")[0])


def _imported() -> list[str]:
    """The imported modules, except those of the tests."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    tests = str(ROOT / "tests"), str(ROOT / "examples"), str(ROOT / "benchmarks")
    return [name for name, file in files.items() if file and not file.startswith(tests) and name != "__main__"]
