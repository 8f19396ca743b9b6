import io
from pathlib import Path

import pytest

from fake_worker import CodeConverter
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.worker import wire
from penstock.offline.convert.worker.confine import WRITES_ANYWHERE
from penstock.offline.convert.worker.serve import serve


def first_answer(
    tmp_path: Path, format: str, notes: tuple[str, ...], *, trust_pickle: bool = False
) -> wire.Opened | wire.Refused:
    """The answer to the question for a source of ``format``, from a process with ``notes``."""
    (tmp_path / "source").write_text("")
    question = wire.Open(format, tmp_path / "source", ConvertOptions(trust_pickle=trust_pickle))
    questions, answers = io.BytesIO(b"".join(wire.encode(question))), io.BytesIO()
    serve(questions, answers, notes, lambda _: CodeConverter())
    data = answers.getvalue()
    header_bytes, body_bytes = wire.PREFIX.unpack(data[: wire.PREFIX.size])
    header, body = data[wire.PREFIX.size :][:header_bytes], bytearray(data[len(data) - body_bytes :])
    answer: wire.Opened | wire.Refused = wire.decode(header, body, wire.Opened | wire.Refused)
    return answer


@pytest.mark.parametrize("format", ["torchscript", "exported_program", "saved_model", "graph_def", "tflite", "paddle"])
def test_formats_that_can_write_need_trust_if_writing_is_not_restricted(tmp_path: Path, format: str) -> None:
    refused = first_answer(tmp_path, format, (WRITES_ANYWHERE,))
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "PermissionDenied"
    assert "can write files, and this system can restrict writing neither" in refused.message
    assert "--trust-pickle" in refused.hint
    trusted = first_answer(tmp_path, format, (WRITES_ANYWHERE,), trust_pickle=True)
    assert isinstance(trusted, wire.Opened)
    assert trusted.notes == (WRITES_ANYWHERE,)
    assert isinstance(first_answer(tmp_path, format, ()), wire.Opened)


def test_other_formats_do_not_need_trust(tmp_path: Path) -> None:
    assert isinstance(first_answer(tmp_path, "onnx", (WRITES_ANYWHERE,)), wire.Opened)
