"""The process that runs the framework: opens one source with its converter, and answers calls until the parent closes the pipe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import IO

from penstock.errors import PenstockError, PermissionDenied, Unsupported, shortened
from penstock.offline.convert.base import Converter, FrameworkModel, Probes, Probing, UnsupportedOperators
from penstock.offline.convert.registry import FORMATS, get_converter
from penstock.offline.convert.tree_arrays import HasTrees
from penstock.offline.convert.worker import wire
from penstock.offline.convert.worker.confine import WRITES_ANYWHERE
from penstock.tensor import Array, DataType


def serve(
    questions: IO[bytes], answers: IO[bytes], notes: tuple[str, ...], find: Callable[[str], Converter] = get_converter
) -> None:
    """Answer each question, until ``questions`` ends. The first one must be ``Open``."""
    model: FrameworkModel | None = None
    while prefix := questions.read(wire.PREFIX.size):
        header_bytes, body_bytes = wire.PREFIX.unpack(prefix)
        header, body = questions.read(header_bytes), bytearray(body_bytes)
        questions.readinto(body)  # type: ignore[attr-defined]
        answer: wire.Answer
        try:
            question: wire.Question = wire.decode(header, body, wire.Question)
            if isinstance(question, wire.Open):
                if WRITES_ANYWHERE in notes:
                    _check_trust(question)
                converter = find(question.format)
                model = converter.open(question.source, question.options)
                axes = {name: tuple(axes) for name, axes in model.axes.items()}
                answer = wire.Opened(converter.name, converter.version, model.signature, axes, notes)
            else:
                assert model is not None
                answer = _answered(model, question)
            parts = wire.encode(answer)
        except Exception as error:  # noqa: BLE001 - a framework raises anything
            parts = wire.encode(_failed(error))
        answers.writelines(parts)
        answers.flush()


def _check_trust(question: wire.Open) -> None:
    """Raise PermissionDenied for a format whose operators write files, unless the user trusts the source."""
    entry = FORMATS.get(question.format)
    if entry is not None and entry.writes_files and not question.options.trust_pickle:
        raise PermissionDenied(
            f"operators of a {entry.title} can write files, and {WRITES_ANYWHERE}",
            "if you trust its author, add --trust-pickle (in Python: trust_pickle=True)",
        )


def _answered(
    model: FrameworkModel, question: wire.Compute | wire.Values | wire.Probe | wire.Trees | wire.Export
) -> wire.Answer:
    if isinstance(question, wire.Compute):
        return wire.Arrays(dict(model.forward(question.inputs)))
    if isinstance(question, wire.Values):
        values = model.values(question.inputs, question.names)
        return wire.Arrays({name: array for name, array in values.items() if _has_datatype(array)})
    if isinstance(question, wire.Probe):
        probes = model.probes(question.seed, brief=question.brief) if isinstance(model, Probing) else Probes()
        return wire.Calls(probes.calls, probes.notes)
    if isinstance(question, wire.Trees):
        return wire.Forests(model.trees() if isinstance(model, HasTrees) else ())
    return wire.Written(model.export(question.target, question.opset))


def _has_datatype(array: Array) -> bool:
    try:
        return bool(DataType.from_numpy(array.dtype))
    except Unsupported:  # such as complex numbers
        return False


def _failed(error: Exception) -> wire.Refused:
    if isinstance(error, PenstockError):
        operators = error.operators if isinstance(error, UnsupportedOperators) else ()
        known = (UnsupportedOperators.__module__, PenstockError.__module__)  # the parent revives only these classes
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ in known)
        return wire.Refused(kind, _valid(error.message), _valid(error.hint), operators)
    if isinstance(error, MemoryError):
        return wire.Refused(
            "ResourceExhausted", "the source needs more memory than the limit", "use a machine with more memory"
        )
    told = shortened(str(error).strip().partition("\n")[0], 400)
    return wire.Refused(
        "PenstockError",
        f"{type(error).__name__}: {told}" if told else type(error).__name__,
        "check that the framework itself runs the model",
    )


def _valid(text: str) -> str:
    """``text`` without the parts of broken characters, which file names can contain, and messages cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def main(notes: tuple[str, ...], find: Callable[[str], Converter] = get_converter) -> None:
    """Serve on standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which decides
    with open(os.dup(0), "rb") as questions, open(os.dup(1), "wb") as answers:
        # The framework reads nothing from standard input, and what it prints is no answer.
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        serve(questions, answers, notes, find)
