"""A pipeline in the calling process: files, texts and arrays in; labels, texts and arrays out."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.bundle.local import NO_LIMITS, DeviceLimits
from penstock.bundle.local_models import LocalModels
from penstock.bundle.manifest import PipelineManifest
from penstock.bundle.pipeline import PipelineBundle, open_pipeline
from penstock.errors import InvalidArgument, NotFound, PenstockError, Unavailable, prefixed, shortened
from penstock.pipeline.direct import Direct
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.stages import Stages
from penstock.pipeline.streaming.timeline import Timeline
from penstock.pipeline.value import Media, Value, ValueType, check_inputs
from penstock.pipeline.wire import to_json, to_tensors

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file that is an input."""
_MANY_ITEMS = 16
"""Fewer items take less time than loading copies of the models would."""
Item = Any
"""The inputs of one item: a dict by name or, if the pipeline has one input, its value."""


class Pipeline:
    """A loaded pipeline; also a context manager. It may be used from several threads at the same time.

    Outputs are arrays, texts (``str``) and lists of these. An output that is declared as optional may be absent. A picture, a sound or
    a file is given as a path, as the content of the file (``bytes``) or as an array of pixels or samples; a text as ``str`` or as the
    path of a file (``Path``).
    """

    def __init__(self, bundle: PipelineBundle, limits: DeviceLimits = NO_LIMITS, allow_python: bool = False) -> None:
        """Load the models and replay the golden samples. Raises the errors of ``penstock.open``."""
        bundle.check_python(allow_python)
        self._function = function = bundle.function(allow_python)
        self._manifest = bundle.manifest
        self._models = LocalModels(bundle, function, limits)
        self._direct, self._alone = Direct(function, self._models.single), Stages(function, self._models.single)
        self._threads = limits.threads or None
        self._idle = threading.Condition()
        self._calls: list[_Call] = []
        self._is_closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        threads: int = 0,
        max_memory: int = 0,
        power_saving: bool = False,
        allow_python: bool = False,
    ) -> Self:
        """Open the bundle of a pipeline. See ``penstock.open``."""
        return cls(open_pipeline(path), DeviceLimits(threads, max_memory, power_saving), allow_python)

    @property
    def name(self) -> str:
        return self._manifest.name

    @property
    def manifest(self) -> PipelineManifest:
        return self._manifest

    @property
    def inputs(self) -> Mapping[str, ValueType]:
        """The types of the inputs by name, in the declared order."""
        return self._function.inputs

    @property
    def outputs(self) -> Mapping[str, ValueType]:
        """The types of the outputs by name."""
        return self._function.outputs

    def __call__(self, *given: Value, **named: Value) -> dict[str, Value]:
        """The outputs for one item. Inputs are given in the declared order, or by name.

        Raises InvalidArgument for wrong inputs, NotFound for a missing file, InvalidInput if a step rejects a value.
        """
        if len(given) > len(self.inputs):
            raise InvalidArgument(f"{len(given)} inputs are given, but there are {len(self.inputs)}")
        inputs = dict(zip(self.inputs, given, strict=False))
        if both := inputs.keys() & named.keys():
            raise InvalidArgument(f"input '{min(both)}' is given twice")
        return self.infer({**inputs, **named})

    def infer(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs for one item, whose inputs are given by name."""
        values = self._read(inputs)
        with self._running():
            return self._direct.call(values)

    async def arun(self, *given: Value, **named: Value) -> dict[str, Value]:
        """Like a call, without blocking the event loop. If the task is cancelled, the result is dropped."""
        return await asyncio.to_thread(self, *given, **named)

    def batch(self, items: Iterable[Item]) -> list[dict[str, Value]]:
        """The outputs for all ``items``, in order. Raises the error of the first item that fails, with its position from 0."""
        return list(self.stream(items))

    def stream(self, items: Iterable[Item], *, keep_errors: bool = False) -> Stream:
        """The outputs for each of ``items``, in order. The steps of different items overlap, and model calls are batched.

        The first stream loads copies of the models that have fewer threads, unless ``items`` has few. It raises IntegrityError if the
        golden samples have other results with them.

        Only a bounded number of items is read ahead. An item that fails raises its error, which ends the stream; with ``keep_errors``,
        the error takes the place of the outputs, and the stream goes on.
        """
        if isinstance(items, str | bytes | Path | Mapping):
            raise InvalidArgument(f"the items are one {type(items).__name__}", "give a list of items")
        return Stream(lambda call: self._results(call, items, keep_errors))

    def _results(self, call: _Call, items: Iterable[Item], keep_errors: bool) -> Generator[Any, None, None]:
        with self._running(call):
            for number, told in enumerate(self._outcomes(items)):
                if isinstance(told, PenstockError) and not keep_errors:
                    raise prefixed(f"item {number}: ", told)
                yield told if isinstance(told, PenstockError) else dict(told)

    def _outcomes(self, items: Iterable[Item]) -> Iterator[Told]:
        """The outcomes in order. An item whose inputs cannot be read has no run, but keeps its place."""
        is_short = isinstance(items, Sized) and len(items) < _MANY_ITEMS
        stages = self._alone if is_short else self._streaming
        return stages.stream(map(self._readable, items), threads=self._threads)

    def _readable(self, item: Item) -> dict[str, Value] | PenstockError:
        try:
            return self._item(item)
        except PenstockError as error:
            return error

    def trace(self, items: Sequence[Item]) -> tuple[Timeline, Timeline]:
        """When each step runs: first for the items one after the other, then for the same items in a stream.

        Raises the error of the first item that fails, with its position from 0.
        """
        alone, streamed = Timeline(), Timeline()
        with self._running():
            for number, item in enumerate(items):
                try:
                    self._alone.call(self._item(item), alone)
                except PenstockError as error:
                    raise prefixed(f"item {number}: ", error) from None
            for told in self._streaming.stream(map(self._item, items), threads=self._threads, timeline=streamed):
                if isinstance(told, PenstockError):
                    raise told
        return alone, streamed

    def to_json(self, outputs: Mapping[str, Value]) -> dict[str, Any]:
        """``outputs`` as plain data, as a server answers: files in base64, and arrays as nested lists."""
        return to_json(self._function, to_tensors(self._function, outputs))

    def __repr__(self) -> str:
        return f"<Pipeline '{self.name}': {', '.join(self.inputs)} → {', '.join(self.outputs)}>"

    def close(self) -> None:
        """Wait for the calls in progress, and release the memory. Idempotent.

        Streams that this thread has left half-consumed end. Streams of other threads are waited for. Raises InvalidArgument if this
        thread is in a call, such as in the items of a stream, because it would wait for itself.
        """
        with self._idle:
            own = [call for call in self._calls if call.thread == threading.get_ident()]
            if not all(call.is_suspended for call in own):
                raise InvalidArgument(
                    f"pipeline '{self.name}' cannot be closed while this thread takes an item of its stream"
                )
            self._is_closed = True
        for call in own:
            if call.stream is not None and (stream := call.stream()) is not None:
                stream.end(self._closed())
        with self._idle:
            self._idle.wait_for(lambda: not self._calls)
        self._models.unload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _streaming(self) -> Stages:
        """The stages of streams."""
        return Stages(self._function, self._models.streamed())

    def _closed(self) -> Unavailable:
        return Unavailable(f"pipeline '{self.name}' is closed", "open it again")

    @contextmanager
    def _running(self, given: _Call | None = None) -> Iterator[None]:
        """Keep the models loaded while a call runs."""
        call = given or _Call()
        with self._idle:
            if self._is_closed:
                raise self._closed()
            self._calls.append(call)
        try:
            yield
        finally:
            with self._idle:
                self._calls.remove(call)
                self._idle.notify_all()

    def _item(self, item: Item) -> dict[str, Value]:
        return self._read(item if isinstance(item, Mapping) else self._only(item))

    def _only(self, value: Value) -> dict[str, Value]:
        if len(self.inputs) != 1:
            raise InvalidArgument(f"an item needs the inputs {', '.join(self.inputs)}", "give a dict for each item")
        return {next(iter(self.inputs)): value}

    def _read(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        read = {
            name: _content(self.inputs[name], value) if name in self.inputs else value for name, value in inputs.items()
        }
        return check_inputs(self.inputs, read)


class _Call:
    """A call in progress, or a stream that has been begun."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        """The thread that runs the call, or that last took an outcome from the stream."""
        self.stream: weakref.ref[Stream] | None = None
        self.is_suspended = False
        """True between two outcomes of a stream."""


class Stream(Iterator[Any]):
    """The outcomes of a stream of items. Between two outcomes, steps of further items may be in progress."""

    def __init__(self, begin: Callable[[_Call], Generator[Any, None, None]]) -> None:
        self._call = _Call()
        self._call.stream = weakref.ref(self)
        self._results = begin(self._call)
        self._error: PenstockError | None = None

    def __next__(self) -> Any:
        """The next outcome. Raises Unavailable if the pipeline is closed."""
        if self._error is not None:
            raise self._error
        self._call.thread, self._call.is_suspended = threading.get_ident(), False
        try:
            return next(self._results)
        finally:
            self._call.is_suspended = True

    def close(self) -> None:
        """Cancel the items in progress, and end the threads. Idempotent."""
        self._results.close()

    def end(self, error: PenstockError) -> None:
        """Like ``close``. Further outcomes are ``error``."""
        self._error = error
        self.close()


def _content(kind: ValueType, value: Value) -> Value:
    """The content of the file, if ``value`` is a path. Text that is given as ``str`` is no path."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and kind.media is not Media.TEXT)
    if not is_path or kind.media is Media.TENSOR:
        return value
    try:
        data = _read_bytes(Path(value))
    except FileNotFoundError:
        raise NotFound(f"no file '{value}'", "check the path") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"cannot read '{shortened(str(value))}': {getattr(error, 'strerror', None) or error}"
        ) from None
    if kind.media is not Media.TEXT:
        return data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgument(f"'{value}' is not UTF-8 text") from None


def _read_bytes(path: Path) -> bytes:
    """The content of a file. Raises OSError, and InvalidArgument if it is too large, or a pipe or a device, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InvalidArgument(f"'{path}' is a pipe or a device, not a file", "pass its content, or save it to a file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidArgument(f"'{path}' has more than {MAX_FILE_BYTES} bytes", "give a smaller file")
    return path.read_bytes()
