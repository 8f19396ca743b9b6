"""Memory for unread answers: who may keep how much, and who has to go."""

from penstock.clock import ManualClock
from penstock.online.server.network.unread import FLOOR_BYTES, STALE_S, Unread, UnreadTotal

MIB = 1 << 20


class Client:
    """A connection that notes its end."""

    def __init__(self, total: UnreadTotal) -> None:
        self.unread = Unread(total, self.evict)
        self.is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True
        self.unread.remove(self.unread.count)

    def answer(self, size: int) -> bool:
        added = self.unread.add(size)
        self.unread.settle()
        return added

    def read(self, size: int) -> None:
        self.unread.remove(size)
        self.unread.settle()


def test_all_together_are_bounded() -> None:
    total = UnreadTotal(20 * MIB, ManualClock())
    clients = [Client(total) for _ in range(10)]
    kept = sum(client.answer(2 * MIB) for _ in range(50) for client in clients)
    assert kept == 10
    assert total.count == 20 * MIB
    for client in clients:
        client.read(2 * MIB)
    assert total.count == 0
    assert not total.waiting


def test_a_little_and_the_only_answer_are_always_kept() -> None:
    total = UnreadTotal(10 * MIB, ManualClock())
    greedy, modest, large = Client(total), Client(total), Client(total)
    assert greedy.answer(10 * MIB)
    assert not greedy.answer(1)
    assert all(modest.answer(FLOOR_BYTES // 4) for _ in range(4))
    assert not modest.answer(1)
    assert large.answer(5 * MIB)
    assert not greedy.is_evicted


def test_a_client_that_reads_nothing_gives_way_to_others() -> None:
    clock = ManualClock()
    total = UnreadTotal(10 * MIB, clock)
    idle, reading, late = Client(total), Client(total), Client(total)
    assert idle.answer(5 * MIB)
    assert reading.answer(2 * MIB)
    assert reading.answer(2 * MIB)
    clock.advance(STALE_S)
    reading.read(2 * MIB)
    assert late.answer(6 * MIB)
    assert idle.is_evicted
    assert not reading.is_evicted
    assert total.count == 8 * MIB
    assert not late.answer(6 * MIB)  # the others have read a moment ago
    clock.advance(STALE_S)
    late.read(6 * MIB)
    assert late.answer(9 * MIB)
    assert reading.is_evicted


def test_nobody_makes_room_for_himself() -> None:
    clock = ManualClock()
    total = UnreadTotal(10 * MIB, clock)
    client = Client(total)
    assert client.answer(10 * MIB)
    clock.advance(60)
    assert not client.answer(MIB)
    assert not client.is_evicted
