from __future__ import annotations

import logging
import warnings

import pytest

from penstock.offline.convert.quiet import quiet


def test_nothing_is_shown_in_the_block(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    log = logging.getLogger("a framework")
    with pytest.raises(ValueError, match="of the framework"), quiet():
        warnings.warn("inside", stacklevel=1)
        log.critical("inside")
        raise ValueError("of the framework")
    warnings.warn("outside", stacklevel=1)
    log.critical("outside")
    assert [str(one.message) for one in recwarn] == ["outside"]
    assert caplog.messages == ["outside"]
