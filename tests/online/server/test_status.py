from __future__ import annotations

from http import HTTPStatus

import grpc

from penstock.errors import Code
from penstock.online.server.status import GRPC, HTTP


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
