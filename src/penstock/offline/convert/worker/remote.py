"""``RemoteSource``: a model that its framework has loaded in a process of its own.

``offline/apart.py`` runs Penstock's functions in a child process and trusts it, so it uses pickles. This process runs files and
packages of strangers: it has no network and limits of time and memory, its answers are checked, and its packages may be others.
"""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from penstock.errors import InvalidArgument, PenstockError, bounded, printable, revive
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, Probes, UnsupportedOperators
from penstock.offline.convert.tree_arrays import TreeArrays
from penstock.offline.convert.worker import wire
from penstock.offline.convert.worker.process import UNLIMITED, Limits, Process
from penstock.tensor import MAX_RANK, Array, Signature

T = TypeVar("T", wire.Opened, wire.Arrays, wire.Calls, wire.Forests, wire.Written)
_SERVE = "penstock.offline.convert.worker.serve"
_SHOWN_BYTES = 8 << 10
_MOST_PROBES = 64
"""Largest number of calls that an untrusted process may ask for."""


def open_remote(
    format: str,
    source: Path,
    options: ConvertOptions,
    python: Path | None = None,
    limits: Limits = UNLIMITED,
    program: str = _SERVE,
) -> RemoteSource:
    """Load ``source`` in a new process, with the converter of ``format``. Raises the errors of ``Converter.open``, and of ``_call``.

    ``python`` is the interpreter of another environment, see ``environment``. ``program`` is the module that answers.
    """
    absolute = {name: path.absolute() for name in ("weights", "ops") if (path := getattr(options, name)) is not None}
    question = wire.Open(format, source.absolute(), msgspec.structs.replace(options, **absolute))
    return RemoteSource(question, python, limits, program)


class RemoteSource:
    """A ``FrameworkModel`` in a process of its own. If the process dies, the next call starts a new one."""

    def __init__(self, question: wire.Open, python: Path | None, limits: Limits, program: str) -> None:
        self._question, self._python, self._limits, self._program = question, python, limits, program
        self._process: Process | None = None
        self._closed = False
        opened = self._started()
        self.signature = opened.signature
        self.axes: Mapping[str, tuple[Axis, ...]] = opened.axes
        self.framework, self.version = printable(opened.framework), printable(opened.version)
        self.notes = tuple(map(printable, opened.notes))
        """Protections that the operating system does not permit, for the warnings of the conversion."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._call(wire.Compute(dict(inputs)), wire.Arrays).arrays

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        return self._call(wire.Values(dict(inputs), tuple(names)), wire.Arrays).arrays

    def trees(self) -> tuple[TreeArrays, ...]:
        """As in ``HasTrees``. Empty if the source in the process has no trees."""
        forests = self._call(wire.Trees(), wire.Forests).forests
        if not all(forest.is_valid for forest in forests):
            raise PenstockError("the process of the source's framework describes its trees inconsistently")
        return forests

    def probes(self, seed: int, *, brief: bool = False) -> Probes:
        """As in ``Probing``. Empty if the source in the process has no probes."""
        found = self._call(wire.Probe(seed, brief), wire.Calls)
        return Probes(found.calls[:_MOST_PROBES], tuple(map(printable, found.notes[:_MOST_PROBES])))

    def export(self, target: Path, opset: int) -> Exported:
        process = self._running()
        folder = Path(tempfile.mkdtemp(dir=process.folder))
        exported = self._call(wire.Export(folder / target.name, opset), wire.Written).exported
        for file in list(_files(folder)):
            shutil.move(file, target.parent / file.name)
        return exported

    def close(self) -> None:
        self._closed = True
        self._end()

    def _running(self) -> Process:
        if self._closed:
            raise InvalidArgument("the source is closed")
        if self._process is None:
            self._started()
        assert self._process is not None
        return self._process

    def _started(self) -> wire.Opened:
        options = self._question.options
        reads = [path for path in (self._question.source, options.weights, options.ops) if path is not None]
        self._process = Process.start(self._program, self._python, self._limits, reads)
        try:
            opened = self._answer(self._process, self._question, wire.Opened)
            _check(opened.signature, opened.axes)
        except BaseException:
            self._end()
            raise
        return opened

    def _call(self, question: wire.Question, kind: type[T]) -> T:
        return self._answer(self._running(), question, kind)

    def _answer(self, process: Process, question: wire.Question, kind: type[T]) -> T:
        """The answer of ``process``. Raises the error of the converter, and the errors of ``Process.ask``."""
        parts = wire.encode(question)
        try:
            header, body = process.ask(parts)
            answer: T | wire.Refused = wire.decode(header, body, kind | wire.Refused)
        except BaseException:  # Otherwise the next call could read the answer to this one.
            self._end()
            raise
        if isinstance(answer, wire.Refused):
            raise _revived(answer)
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _revived(refused: wire.Refused) -> PenstockError:
    message, hint = bounded(refused.message, _SHOWN_BYTES), bounded(refused.hint)
    if refused.kind == UnsupportedOperators.__name__:
        error = UnsupportedOperators(message, hint)
        error.operators = refused.operators
        return error
    return revive(refused.kind, message, hint)


def _check(signature: Signature, axes: Mapping[str, Sequence[Axis]]) -> None:
    """Raise PenstockError unless an untrusted process describes its model consistently."""
    specs = signature.inputs + signature.outputs
    shapes = {spec.name: spec.shape for spec in signature.inputs}
    if (
        any(len(spec.shape) > MAX_RANK or min(spec.shape, default=0) < -1 for spec in specs)
        or not all(len({spec.name for spec in some}) == len(some) for some in (signature.inputs, signature.outputs))
        or any(not 0 <= axis.index < len(shapes.get(name, ())) for name, some in axes.items() for axis in some)
    ):
        raise PenstockError("the process of the source's framework describes the model inconsistently")


def _files(folder: Path) -> Iterator[Path]:
    """The files in ``folder``. A link could lead to any file, so it is an error."""
    for path in sorted(folder.iterdir()):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise PenstockError(
                f"the export of the source contains '{printable(path.name)}', which is not a regular file"
            )
        yield path
