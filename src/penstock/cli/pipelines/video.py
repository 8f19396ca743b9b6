"""``penstock video``: run a pipeline over the frames of a video."""

from __future__ import annotations

import csv
import io
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import orjson
import typer
from rich.console import Console

from penstock.cli import options
from penstock.cli.pipelines.statistics import FIRST, OutputStatistics, is_single
from penstock.cli.views.progress import StageProgress
from penstock.cli.views.tables import make_console, print_table
from penstock.errors import InvalidArgument, PenstockError, prefixed
from penstock.pipeline.value import Media, ValueType
from penstock.pipeline.video import Frame, Sampling, probe, read_frames
from penstock.runtime import Pipeline
from penstock.storage.atomic import check_writable, real_path, whole_file

_SUFFIXES = (".csv", ".jsonl")
_SHOWN_TEXTS = 20
_NO_PIXELS = np.empty((0, 0, 3), np.uint8)


class Row(msgspec.Struct, frozen=True):
    """The outputs for one frame."""

    frame: int
    seconds: float
    outputs: Mapping[str, Any]


def video(
    bundle: Annotated[
        Path, typer.Argument(help="The bundle of a pipeline whose input is a picture.", show_default=False)
    ],
    clip: Annotated[Path, typer.Argument(help="A video: MP4, WebM, Matroska, AVI, MPEG-TS.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write one row per frame to this file: .csv, or .jsonl for JSON lines."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Take one of this many frames.")] = 1,
    fps: Annotated[float, typer.Option(min=0, help="Take this many frames per second. Default: all frames.")] = 0,
    start: Annotated[float, typer.Option(min=0, help="Skip the clip before this time, in seconds.")] = 0,
    end: Annotated[float | None, typer.Option(min=0, help="Stop at this time, in seconds. Default: the end.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads that decode. 0: one per CPU.")] = 0,
    partial: Annotated[
        bool, typer.Option("--partial", help="If the clip is damaged or truncated, keep the rows before the damage.")
    ] = False,
    allow_python: options.AllowPython = False,
    parents: options.Parents = False,
    json: options.Json = False,
) -> None:
    """Run a pipeline over the frames of a video, and summarise its outputs.

    Decoding, the pipeline's steps and the model overlap, and frames are batched. Memory does not grow with the length of the clip.
    The summary has mean, minimum, maximum and percentiles of numbers, such as a score, and of lengths, such as the number of boxes.
    For each text, such as a label, it has the number of frames with it, and of those in which it is the first of a list.

    [bold]Examples[/bold]

      penstock video score.bundle clip.mp4 --every 2 -o scores.csv

      penstock video score.bundle clip.mp4 --fps 1 --start 60 --end 120 --json
    """
    options.check_folders([output], parents)
    if output is not None:
        _check_target(output, bundle, clip)
    if end is not None and end <= start:
        raise InvalidArgument(f"--end must be greater than --start {start:g}, got {end:g}")
    frames = _Frames(clip, Sampling(every=every, fps=fps, start=start, end=end, threads=threads))
    began = time.perf_counter()
    with ExitStack() as stack:
        pipeline = stack.enter_context(Pipeline.open(bundle, allow_python=allow_python))
        _check_input(pipeline)
        summary = OutputStatistics(pipeline.outputs)
        writer = _Writer(output, stack.enter_context(whole_file(output)), pipeline.outputs) if output else None
        progress = stack.enter_context(StageProgress())
        for row in frames.rows(pipeline):
            summary.add(row.outputs)
            if writer is not None:
                writer.write(row)
            progress("frames", summary.items, max(frames.expected, summary.items))
        if frames.damage is not None and not (partial and summary.items):
            raise frames.damage
        if not summary.items:
            raise InvalidArgument("the clip has no frames in this range", "give other values of --start and --end")
    _report(bundle, clip, summary, time.perf_counter() - began, output, frames.damage, json)


class _Frames:
    """The frames of a clip. ``damage`` is the error that ended the clip early, if any."""

    def __init__(self, clip: Path, sampling: Sampling) -> None:
        self._clip, self._sampling = clip, sampling
        self._read: deque[Frame] = deque()
        """Frames that have been read, without their pixels."""
        self.expected = probe(clip).expected_frames(sampling)
        self.damage: PenstockError | None = None

    def rows(self, pipeline: Pipeline) -> Iterator[Row]:
        """The outputs of ``pipeline`` for each frame. Raises the error of the first frame that fails."""
        for outputs in pipeline.stream(self._pixels(), keep_errors=True):
            frame = self._read.popleft()
            if isinstance(outputs, PenstockError):
                raise prefixed(f"frame {frame.index} at {frame.seconds:.3f} s: ", outputs)
            yield Row(frame.index, frame.seconds, outputs)

    def _pixels(self) -> Iterator[Any]:
        try:
            for frame in read_frames(self._clip, self._sampling):
                self._read.append(msgspec.structs.replace(frame, pixels=_NO_PIXELS))
                yield frame.pixels
        except PenstockError as error:
            self.damage = error


class _Writer:
    """Writes rows as CSV, with a column per output, or as JSON lines."""

    def __init__(self, path: Path, file: BinaryIO, outputs: Mapping[str, ValueType]) -> None:
        self._file, self._outputs, self._is_csv = file, outputs, path.suffix == ".csv"
        if self._is_csv:
            self._write_cells(["frame", "seconds", *outputs])

    def write(self, row: Row) -> None:
        """Write one row. An output that is absent is empty."""
        if self._is_csv:
            cells = [
                _cell(kind, row.outputs[name]) if name in row.outputs else "" for name, kind in self._outputs.items()
            ]
            self._write_cells([str(row.frame), str(round(row.seconds, 6)), *cells])
        else:
            self._file.write(
                _json({"frame": row.frame, "seconds": round(row.seconds, 6), **_plain(row.outputs)}) + b"\n"
            )

    def _write_cells(self, cells: list[str]) -> None:
        text = io.StringIO()
        csv.writer(text).writerow(cells)
        self._file.write(text.getvalue().encode())


def _report(
    bundle: Path,
    clip: Path,
    summary: OutputStatistics,
    seconds: float,
    output: Path | None,
    damage: PenstockError | None,
    json: bool,
) -> None:
    numbers, texts = summary.numbers(), summary.texts()
    facts = {
        "bundle": str(bundle),
        "clip": str(clip),
        "frames": summary.items,
        "seconds": seconds,
        "frames_per_second": summary.items / seconds,
        "outputs": {**numbers, **texts},
        "damage": damage.message if damage else None,
        "written": str(output) if output else None,
    }
    if json:
        print(_json(facts).decode())
        return
    console = make_console()
    console.print(f"{summary.items} frames in {seconds:.1f} s ({facts['frames_per_second']:.1f}/s)", highlight=False)
    if numbers:
        titles = ["output", *next(iter(numbers.values()))]
        print_table(
            console, titles, [[name, *(f"{each:.6g}" for each in row.values())] for name, row in numbers.items()]
        )
    for name, counts in texts.items():
        if name.removesuffix(FIRST) not in texts or not name.endswith(FIRST):
            _print_texts(console, name, counts, texts.get(name + FIRST), summary.items)
    if summary.left_out:
        kinds = ", ".join(f"{name} ({kind})" for name, kind in summary.left_out.items())
        console.print(f"not summarised: {kinds}; -o writes them for each frame", markup=False, soft_wrap=True)
    if damage is not None:
        console.print(f"note: {damage.message}; only the frames before are counted", markup=False, soft_wrap=True)
    if output is not None:
        console.print(f"written to {output}", markup=False, soft_wrap=True)


def _print_texts(
    console: Console, name: str, counts: Mapping[str, int], first: Mapping[str, int] | None, frames: int
) -> None:
    """The number of frames with each text and, for a list, of those in which it is the first."""
    rows = [
        [text, str(count), f"{count / frames:.1%}", *([str(first.get(text, 0))] if first is not None else [])]
        for text, count in list(counts.items())[:_SHOWN_TEXTS]
    ]
    print_table(console, [name, "frames", "share", *(["first"] if first is not None else [])], rows)
    if len(counts) > _SHOWN_TEXTS:
        console.print(f"and {len(counts) - _SHOWN_TEXTS} other texts; --json has all", highlight=False)


def _check_input(pipeline: Pipeline) -> None:
    inputs = pipeline.inputs
    if [kind.media for kind in inputs.values()] != [Media.IMAGE]:
        shown = ", ".join(f"'{name}' ({kind.media.value})" for name, kind in inputs.items())
        raise InvalidArgument(
            f"pipeline '{pipeline.name}' has the inputs {shown}",
            "video needs a pipeline with one input of media: image",
        )


def _check_target(output: Path, *sources: Path) -> None:
    if output.suffix not in _SUFFIXES:
        raise InvalidArgument(f"'{output}' is neither CSV nor JSON lines", "use the suffix .csv or .jsonl")
    if real_path(output) in map(real_path, sources):
        raise InvalidArgument(f"'{output}' would overwrite a source", "choose another name")
    check_writable(output)


def _cell(kind: ValueType, value: Any) -> str:
    """A value as one cell: one text or one number as it is, others as JSON."""
    if is_single(kind):
        only = value[0] if kind.many else value
        return only if isinstance(only, str) else _json(_plain(np.asarray(only).reshape(-1))).decode()[1:-1]
    return _json(_plain(value)).decode()


def _plain(value: Any) -> Any:
    """``value`` in the form that orjson writes: it takes only contiguous arrays of native types."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value) if value.dtype.kind in "biuf" else _plain(value.tolist())
    return value


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
