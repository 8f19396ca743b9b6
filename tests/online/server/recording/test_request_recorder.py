import stat
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.online.repository.loading.recorded_requests import folder_of, read_recorded
from penstock.online.server.recording import request_recorder
from penstock.online.server.recording.request_recorder import RequestFolder, RequestRecorder
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.storage.local import LocalStorage
from penstock.telemetry.background_writer import BackgroundWriter

ANSWER = InferResponse("m", "1", {})


class Recorded:
    """A recorder of 3 requests of each model version, and the folder that it writes to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writer: BackgroundWriter[InferRequest] = BackgroundWriter("requests", RequestFolder(str(root), 3))
        self.recorder = RequestRecorder(self._writer, 3)
        self.answers: list[Outcome] = []

    def ask(self, rows: int, outcome: Outcome = ANSWER, name: str = "m", version: str = "1") -> InferRequest:
        request = InferRequest(name, {"x": np.full((rows, 2), rows, np.float32)}, version, parameters={"priority": 1})
        self.recorder.watch(request, self.answers.append)(outcome)
        return request

    def end(self, name: str = "m") -> list[InferRequest]:
        """Write all records, and read them again in ascending order of rows."""
        self._writer.start()
        self._writer.stop()
        found = [request for _, request in read_recorded(LocalStorage(folder_of(str(self.root), name)), name)]
        assert self._writer.dropped == 0
        return sorted(found, key=lambda request: len(request.inputs["x"]))  # type: ignore[union-attr]


def rows(requests: list[InferRequest]) -> list[int]:
    return [len(request.inputs["x"]) for request in requests]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "recorded")


def test_the_first_of_each_shape_are_kept_and_every_answer_passed_on(recorded: Recorded) -> None:
    for count in (1, 1, 2, 1, 3, 4, 5):
        recorded.ask(count)
    assert recorded.answers == [ANSWER] * 7
    kept = recorded.end()
    assert rows(kept) == [1, 2, 3]
    assert kept[0].parameters == {"priority": 1}


def test_what_fails_is_not_kept(recorded: Recorded) -> None:
    recorded.ask(1, PenstockError("no"))
    recorded.ask(2)
    assert rows(recorded.end()) == [2]
    assert len(recorded.answers) == 2


def test_a_stream_is_kept_once_and_inputs_are_those_that_were_answered(recorded: Recorded) -> None:
    request = InferRequest("m", {"x": np.ones((1, 2), np.float32)}, "1")

    def done(_: Outcome) -> None:
        request.inputs["x"][:] = 5  # its memory is reused

    answered = recorded.recorder.watch(request, done)
    answered(ANSWER)
    answered(ANSWER)
    (kept,) = recorded.end()
    assert kept.inputs["x"].tolist() == [[1, 1]]


def test_models_and_versions_are_kept_apart_and_the_newest_stay(recorded: Recorded) -> None:
    for count in (1, 2, 3):
        recorded.ask(count, name="a/b")
        recorded.ask(count, version="1")
        recorded.ask(count + 2, version="2")
    # Each model has a folder, which keeps only the newest requests.
    assert rows(recorded.end()) == [3, 4, 5]
    assert (
        rows([request for _, request in read_recorded(LocalStorage(folder_of(str(recorded.root), "a/b")), "a/b")]) != []
    )  # type: ignore[misc]


def test_a_model_takes_no_more_than_its_share(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_recorder, "MAX_BYTES", 30)
    for count in (2, 3, 1):  # 16, 24 and 8 bytes
        recorded.ask(count)
    assert rows(recorded.end()) == [1, 2]


def test_files_are_for_the_server_only(recorded: Recorded) -> None:
    recorded.ask(1)
    recorded.end()
    folder = folder_of(str(recorded.root), "m")
    (file,) = folder.iterdir()
    assert file.suffix == ".request"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
