"""Memory for unread responses: limits per client, and the disconnection of clients."""

from penstock.clock import ManualClock
from penstock.online.server.network.unread import FLOOR_BYTES, STALE_S, Unread, UnreadTotal

MIB = 1 << 20


class Client:
    """A connection that records its end."""

    def __init__(self, total: UnreadTotal) -> None:
        self.has_arrived = 0
        self.unread = Unread(total, self.evict, lambda: self.has_arrived)
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
    assert not late.answer(6 * MIB)  # the other clients have read recently
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


def test_a_client_that_reads_nothing_gives_way_to_the_only_answer_of_another() -> None:
    clock = ManualClock()
    total = UnreadTotal(10 * MIB, clock)
    idle = [Client(total) for _ in range(5)]
    assert all(client.answer(8 * MIB) for client in idle)
    clock.advance(STALE_S)
    assert Client(total).answer(8 * MIB)
    assert all(client.is_evicted for client in idle)
    assert total.count == 8 * MIB


def test_memory_is_returned_once_most_answers_are_read() -> None:
    falls: list[None] = []
    total = UnreadTotal(100 * MIB, ManualClock(), lambda: falls.append(None))
    clients = [Client(total) for _ in range(4)]
    for client in clients:
        assert client.answer(5 * MIB)
        client.read(5 * MIB)
    assert not falls
    for client in clients:
        assert client.answer(5 * MIB)
    for client, count in zip(clients, (0, 0, 1, 1), strict=True):
        client.read(5 * MIB)
        assert len(falls) == count
    clients[0].answer(MIB)
    clients[0].read(MIB)
    assert len(falls) == 1


def test_a_client_that_reads_a_part_of_a_response_does_not_give_way() -> None:
    clock = ManualClock()
    total = UnreadTotal(10 * MIB, clock)
    reading, idle = Client(total), Client(total)
    assert reading.answer(5 * MIB)
    assert idle.answer(5 * MIB)
    for _ in range(5):
        clock.advance(STALE_S)
        reading.has_arrived += 1
        assert Client(total).answer(5 * MIB)
        assert not reading.is_evicted
    assert idle.is_evicted
    clock.advance(STALE_S)
    assert Client(total).answer(5 * MIB)
    assert reading.is_evicted


def test_the_more_memory_is_used_the_sooner_clients_give_way() -> None:
    clock = ManualClock()
    total = UnreadTotal(10 * MIB, clock)
    clients = [Client(total) for _ in range(8)]
    for client in clients[:2]:
        client.answer(10 * MIB)
    clock.advance(STALE_S / 4 - 0.01)
    for client in clients[2:]:
        client.answer(10 * MIB)
    assert not any(client.is_evicted for client in clients)
    clock.advance(0.01)
    clients[-1].unread.settle()
    assert [client.is_evicted for client in clients[:3]] == [True, True, False]
    assert total.count == 60 * MIB
