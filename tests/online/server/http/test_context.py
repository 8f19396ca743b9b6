import pytest

from penstock.clock import ManualClock
from penstock.errors import Unavailable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.context import FREE_BYTES, HttpContext
from penstock.online.server.network.connections import Connections


def make_context(budget: ByteBudget, *restricted: str) -> HttpContext:
    table = AccessTable(Access(None, ManualClock()), restricted)
    return HttpContext([], table, ServerConfig(), Connections(1), budget)


def test_bodies_take_of_the_budget_what_they_have_not_taken() -> None:
    budget = ByteBudget(4 * FREE_BYTES)
    context = make_context(budget)
    assert context.reserve(FREE_BYTES, 0) == budget.used == 0, "small ones are not counted"
    assert context.reserve(2 * FREE_BYTES, 0) == budget.used == 2 * FREE_BYTES
    assert context.reserve(3 * FREE_BYTES, 2 * FREE_BYTES) == FREE_BYTES
    assert context.reserve(2 * FREE_BYTES, 3 * FREE_BYTES) == 0
    with pytest.raises(Unavailable):
        context.reserve(2 * FREE_BYTES, 0)
    context.give_back(3 * FREE_BYTES)
    assert budget.used == 0


def test_headers_of_restrictions_are_kept_from_requests() -> None:
    assert make_context(ByteBudget(0), "health,trace:X-Key=a", "logging:Other=b").keys == {b"x-key", b"other"}
