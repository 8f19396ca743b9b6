"""Reads bodies of ``multipart/form-data``. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.errors import InvalidArgument

_MAX_PARTS = 256
_MAX_HEAD_BYTES = 8 << 10
_NAME = re.compile(rb'form-data\s*;(?:.*;)?\s*name="?([^";\r\n]*)"?', re.IGNORECASE)
_BOUNDARY = re.compile(rb'boundary="?([^";]{1,70})"?', re.IGNORECASE)


class Part(NamedTuple):
    """One field of a form."""

    name: str
    content_type: bytes
    content: bytes


def read_parts(content_type: bytes, body: bytes) -> list[Part]:
    """The parts of ``body``. ``content_type`` contains the boundary. Raises InvalidArgument."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise InvalidArgument("multipart/form-data without a boundary", "add it to the header Content-Type")
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary[1].strip(), _MAX_PARTS + 2)
    if len(pieces) > _MAX_PARTS + 2:
        raise InvalidArgument(f"the body has more than {_MAX_PARTS} parts")
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise InvalidArgument("the multipart body has no parts, or is truncated")
    return [_read_part(piece) for piece in pieces[1:-1]]


def _read_part(piece: bytes) -> Part:
    head, end, content = piece.partition(b"\r\n\r\n")
    if len(head) > _MAX_HEAD_BYTES:
        raise InvalidArgument(f"the headers of a part of the multipart body are longer than {_MAX_HEAD_BYTES} bytes")
    name = content_type = b""
    for line in head.split(b"\r\n"):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition" and (match := _NAME.match(value.strip())):
            name = match[1]
        elif field.strip().lower() == b"content-type":
            content_type = value.strip()
    if not end or not name:
        raise InvalidArgument(
            "a part of the multipart body has no name", "give it 'Content-Disposition: form-data; name=\"…\"'"
        )
    return Part(name.decode(errors="replace"), content_type, content)
