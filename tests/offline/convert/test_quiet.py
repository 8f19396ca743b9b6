from __future__ import annotations

import logging
import warnings

import pytest

from penstock.offline.convert.quiet import quiet


def test_an_error_ends_the_silence() -> None:
    with pytest.raises(MemoryError), quiet():
        raise MemoryError
    assert logging.root.manager.disable == logging.NOTSET


def test_nothing_is_shown_in_the_block(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    log = logging.getLogger("a framework")
    with quiet():
        warnings.warn("inside", stacklevel=1)
        log.critical("inside")
    warnings.warn("outside", stacklevel=1)
    log.critical("outside")
    assert [str(one.message) for one in recwarn] == ["outside"]
    assert caplog.messages == ["outside"]
