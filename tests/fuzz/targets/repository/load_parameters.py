"""Fuzzes requests to load a model: its name in the first line, then parameters, each ``name=value`` between bytes 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import InvalidArgument, PenstockError
from penstock.online.repository.layout import check_name
from penstock.online.repository.override import discard, read_parameters, store
from penstock.online.repository.triton.text import config_path
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import tokens
from tests.fuzz.target import DecoderTarget

_ROOT = Path("/models")
_MESSAGES = (
    b"m\nconfig={}\0file:1/model.onnx=abc\0file:1/weights/a=d",
    b'space/m\nconfig={"backend":"onnxruntime"}',
    b"m\nfile:1/model.py=x\0file:1=y\0config={}",
    b"\xc3\xa9 m\n",
)


class LoadParametersTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"..",
        b"../",
        b"/",
        b"\\",
        b"file:",
        b"file:../../a=b",
        b"\0",
        b".",
        b"~",
        b"a" * 256,
        b"a/" * 9,
        b"\xff",
        b"=",
    )

    def __init__(self) -> None:
        super().__init__([self.split(message) for message in _MESSAGES])

    def split(self, data: bytes) -> Seed:
        return tokens(data)

    def decode(self, data: bytes) -> object:
        line, _, rest = data.partition(b"\n")
        name = line.decode("utf-8", "surrogateescape")
        check_name(name)
        for part in name.split("/", 1):
            folder = _ROOT / part
            assert folder.parent == _ROOT, "the name leaves the repository"
            assert str(folder.resolve()) == str(folder)
            try:
                chosen = config_path(folder, part)
            except PenstockError:
                continue
            assert chosen.parent in (folder, folder / "configs")
        pairs = [pair.partition(b"=")[::2] for pair in rest.split(b"\0") if pair]
        parameters = {key.decode("utf-8", "replace"): self._value(key, value) for key, value in pairs}
        config, files = read_parameters(name, parameters)
        self._store(files)
        return name, config, sorted(files.items())

    @staticmethod
    def _value(key: bytes, value: bytes) -> str | bytes:
        return value if key.startswith(b"file:") else value.decode("utf-8", "replace")

    @staticmethod
    def _store(files: dict[str, bytes]) -> None:
        if not 0 < len(files) <= 8:
            return
        try:
            folder = store(files)
        except InvalidArgument:
            return  # one file is the folder of another
        written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        discard(str(folder))
        assert written == set(files)
        assert not folder.exists()
