from __future__ import annotations

import re

import penstock
from penstock.version import __version__


def test_the_root_re_exports_the_version() -> None:
    assert penstock.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
