"""``penstock share --decode``: turn a coded model back into its ONNX file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.artifact import local_path
from penstock.bundle import coded
from penstock.cli.views.tables import make_console
from penstock.errors import IntegrityError, InvalidArgument, NotFound, PenstockError
from penstock.offline.compress.model_files import check_target, is_onnx
from penstock.storage.atomic import write_whole


def decode(source: Path, output: Path, *, force: bool, json: bool) -> None:
    """Write the model in the coded file ``source`` to ``output``. Raises PenstockError."""
    check_target(output, [source], force)
    if not local_path(source).exists():
        raise NotFound(f"the coded file '{source}' does not exist", "check the path")
    if not source.is_file():
        raise InvalidArgument(f"'{source}' is not a regular file", "give the path of a coded file")
    try:
        data = source.read_bytes()
        made = coded.decode(data)
    except OSError as error:
        raise InvalidArgument(f"cannot read '{source}': {error.strerror or error}", "check the path") from error
    except IntegrityError as error:
        if is_onnx(source):
            raise InvalidArgument(f"'{source}' is already an ONNX file", "use the file as it is") from None
        fix = error.hint or "copy the file again, or write it again with penstock share --coded"
        raise IntegrityError(f"'{source}': {error.message}", fix) from error
    except PenstockError as error:
        raise type(error)(f"'{source}': {error.message}", error.hint) from error
    write_whole(output, made)
    if json:
        sizes = {"coded_bytes": len(data), "size_bytes": len(made)}
        print(msgspec.json.encode({"command": "share", "output": str(output), **sizes}).decode())
    else:
        told = f"{len(data) / 1024:.1f} KiB decoded to {len(made) / 1024:.1f} KiB\nwritten  {output}"
        make_console().print(told, markup=False)
