from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Cancelled, PenstockError
from penstock.online.scheduler.arrival_order import ArrivalOrder
from penstock.request import Done, InferResponse, Outcome


def answer(final: bool = True) -> InferResponse:
    return InferResponse("m", "1", {}, final=final)


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_answers_come_in_the_order_of_arrival_but_what_was_cancelled_at_once(
    ends: list[int], failed: set[int], cancelled: set[int]
) -> None:
    order = ArrivalOrder()
    given_: list[int] = []
    told: list[int] = []

    def receiver(number: int) -> Done:
        def done(outcome: Outcome) -> None:
            (told if isinstance(outcome, Cancelled) else given_).append(number)

        return done

    places = [order.place(receiver(number)) for number in range(6)]
    for number in ends:
        if number in cancelled:
            places[number](Cancelled("gone"))
            assert told[-1] == number
        else:
            places[number](PenstockError("broken") if number in failed else answer())
    assert given_ == [number for number in range(6) if number not in cancelled]
    assert sorted(told) == sorted(cancelled)


def test_the_answers_of_a_stream_pass_while_it_is_in_front_and_are_kept_until_then() -> None:
    order = ArrivalOrder()
    got: list[str] = []
    first = order.place(lambda outcome: got.append("first"))
    second = order.place(lambda outcome: got.append("second"))
    first(answer(final=False))
    second(answer(final=False))
    assert got == ["first"]
    first(answer())
    assert got == ["first", "first", "second"]
    second(answer(final=False))
    second(answer())
    assert got[3:] == ["second", "second"]


def test_a_receiver_that_fails_or_asks_again_does_not_disturb_the_order() -> None:
    order = ArrivalOrder()
    got: list[str] = []

    def again(outcome: Outcome) -> None:
        order.place(lambda outcome: got.append("third"))(answer())
        raise RuntimeError("receiver")

    first, second = order.place(again), order.place(lambda outcome: got.append("second"))
    second(answer())
    first(answer())
    assert got == ["second", "third"]


def test_answers_that_others_lead_to_do_not_overtake() -> None:
    order = ArrivalOrder()
    got: list[str] = []

    def first_done(outcome: Outcome) -> None:
        got.append("first")
        if len(got) == 2:
            third(Cancelled("gone"))

    front = order.place(lambda outcome: got.append("front"))
    first, second = order.place(first_done), order.place(lambda outcome: got.append("second"))
    third = order.place(lambda outcome: got.append("third"))
    first(answer(final=False))
    first(answer())
    second(answer())
    front(answer())
    assert got == ["front", "first", "third", "first", "second"]
