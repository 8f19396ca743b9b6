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
    """The parts of ``body``. ``content_type`` contains the boundary. Copies nothing but the parts. Raises InvalidArgument."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise InvalidArgument("multipart/form-data without a boundary", "add it to the header Content-Type")
    line, parts = b"\r\n--" + boundary[1].strip(), list[Part]()
    # The first line of the body may be the boundary, without a line end before it.
    end = -2 if body.startswith(line[2:]) else body.find(line)
    while end != -1:
        start = end + len(line)
        if parts and body.startswith(b"--", start):
            return parts
        if len(parts) == _MAX_PARTS:
            raise InvalidArgument(f"the body has more than {_MAX_PARTS} parts")
        if (end := body.find(line, start)) != -1:
            parts.append(_read_part(body, start, end))
    raise InvalidArgument("the multipart body has no parts, or is truncated")


def _read_part(body: bytes, start: int, end: int) -> Part:
    """The part of ``body`` between two boundaries."""
    gap = body.find(b"\r\n\r\n", start, end)
    head = body[start : min(gap if gap != -1 else end, start + _MAX_HEAD_BYTES + 1)]
    if len(head) > _MAX_HEAD_BYTES:
        raise InvalidArgument(f"the headers of a part of the multipart body are longer than {_MAX_HEAD_BYTES} bytes")
    name = content_type = b""
    for line in head.split(b"\r\n"):
        field, _, value = line.partition(b":")
        if field.strip().lower() == b"content-disposition" and (match := _NAME.match(value.strip())):
            name = match[1]
        elif field.strip().lower() == b"content-type":
            content_type = value.strip()
    if gap == -1 or not name:
        raise InvalidArgument(
            "a part of the multipart body has no name", "give it 'Content-Disposition: form-data; name=\"…\"'"
        )
    return Part(name.decode(errors="replace"), content_type, body[gap + 4 : end])
