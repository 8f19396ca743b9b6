from __future__ import annotations

import logging
from http import HTTPStatus

import grpc
import pytest

from penstock.errors import Code, InvalidArgument
from penstock.online.server.status import GRPC, HTTP, as_error


def test_every_code_has_grpcs_number_of_its_name() -> None:
    numbers = {status.name: status.value[0] for status in grpc.StatusCode}
    assert {code: numbers[code.name] for code in Code} == GRPC


def test_every_code_is_an_http_error_on_the_right_side() -> None:
    assert set(HTTP) == set(Code)
    at_the_server = {code for code, status in HTTP.items() if HTTPStatus(status).value >= 500}
    assert at_the_server == {
        Code.UNAVAILABLE,
        Code.UNIMPLEMENTED,
        Code.DEADLINE_EXCEEDED,
        Code.DATA_LOSS,
        Code.INTERNAL,
    }
    assert all(400 <= HTTPStatus(HTTP[code]).value < 500 for code in set(Code) - at_the_server)


def test_errors_are_shown_without_a_traceback_and_bugs_only_as_internal_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def raised(error: Exception) -> Exception:
        try:
            raise error from KeyError("secret")
        except Exception as found:  # noqa: BLE001 - any kind
            return found

    shown = as_error(raised(InvalidArgument("wrong")))
    assert str(shown) == "wrong"
    assert (shown.__traceback__, shown.__cause__, shown.__context__) == (None, None, None)
    assert not caplog.records
    with caplog.at_level(logging.ERROR):
        hidden = as_error(raised(ValueError("secret")))
    assert (hidden.code, str(hidden)) == (Code.INTERNAL, "internal error")
    assert "secret" in caplog.text
