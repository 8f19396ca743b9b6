"""What decoders made of a message, so that it can be compared: the same message must always mean the same."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.online.server.answer_form import AnswerForm
from penstock.request import InferRequest
from tests.fuzz.planes import touch
from tests.fuzz.target import contents

_SLACK_BYTES = 4096
_ELEMENT_BYTES = 64
"""Most that one byte of a request may become: an element of a BYTES tensor takes four and becomes an object."""

Meaning = tuple[object, ...]


def meaning(decode: Callable[[], tuple[InferRequest, AnswerForm]], size: int) -> tuple[Meaning, InferRequest | None]:
    """What a message of ``size`` bytes comes to: all that was understood, or the error's code and text. Raises all other errors."""
    try:
        request, form = decode()
    except PenstockError as error:
        return (error.code, str(error)), None
    held = sum(touch(array) for array in request.inputs.values())
    assert held <= _ELEMENT_BYTES * size + _SLACK_BYTES, f"{size} bytes became {held}"
    inputs = tuple((name, contents(array)) for name, array in request.inputs.items())
    answer = tuple(name in form.binary for name in ("y", *request.outputs)), dict(form.classification)
    parameters = repr(sorted(request.parameters.items()))
    return (
        request.model_name,
        request.model_version,
        request.id,
        request.outputs,
        parameters,
        inputs,
        repr(answer),
    ), request
