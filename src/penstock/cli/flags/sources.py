"""Models that no engine runs: commands convert them first. This module is imported by ``serve``, so it imports little."""

from __future__ import annotations

from pathlib import Path

from penstock.artifact import format_of, local_path
from penstock.bundle.open import may_be_bundle
from penstock.errors import PenstockError
from penstock.samples.user_code import is_function


def runnable(given: Path) -> Path:
    """``given`` if it is a bundle or a model that an engine runs; otherwise, the ONNX file made from it, which is cached."""
    if format_of(given) is not None or not is_source(given):
        return given
    # These imports take long, and most models need no conversion.
    from penstock.cli.views.progress import StageProgress  # noqa: PLC0415
    from penstock.offline.convert.cached import onnx_file  # noqa: PLC0415
    from penstock.offline.convert.detect import detect  # noqa: PLC0415

    if given.is_dir():
        try:
            detect(given)
        except PenstockError:
            return given  # the server says what a repository lacks
    with StageProgress() as progress:
        return onnx_file(given, progress)


def is_source(given: Path) -> bool:
    """True if ``given`` is a function, or a file or folder that is neither a bundle nor a part of one."""
    return is_function(str(given)) or (local_path(given).exists() and not may_be_bundle(given))
