from penstock.online.server.answer_form import ALL, BINARY, NONE, TEXT, AnswerForm


class CountingLease:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_which_outputs_are_binary() -> None:
    assert "anything" in ALL
    assert "anything" not in NONE
    assert "y" in BINARY.binary
    assert "y" not in TEXT.binary


def test_shared_memory_is_let_go_of() -> None:
    lease = CountingLease()
    AnswerForm(lease=lease).release()  # type: ignore[arg-type]
    assert lease.released == 1
    TEXT.release()
