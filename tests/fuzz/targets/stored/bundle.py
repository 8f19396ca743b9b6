"""Fuzzes the bundle reader: an archive with a manifest and a seal, often with a right seal and the right digests."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from penstock.artifact import sha256
from penstock.bundle.manifest import MANIFEST, MANIFEST_DIGEST, decode, encode
from penstock.bundle.open import is_bundle, open_bundle, peek
from penstock.bundle.pack import SEAL_SIZE
from penstock.errors import PenstockError
from tests.bundles import FILES, packed
from tests.fuzz.parts import pieces, words
from tests.fuzz.target import DecoderTarget

_SEPARATOR = b"\n~\n"


class BundleTarget(DecoderTarget):
    """A message is an archive, or the entries of one: names and contents with a separator between them."""

    tokens: Sequence[bytes] = (
        b"../a",
        b"/a",
        b"model.ONNX",
        b"null",
        b"-1",
        b'"schema_version":99',
        b'"version":"0"',
        b"[" * 400,
        b"\xff\xff\xff\xff",
        b"PK\x01\x02",
        b"\0",
        _SEPARATOR,
    )

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "x.bundle")
        archive = packed(Path(self._folder.name, "seed.bundle")).read_bytes()
        with zipfile.ZipFile(io.BytesIO(archive)) as entries:
            contents = {name: entries.read(name) for name in entries.namelist()}
        listed: list[bytes] = []
        for name, content in contents.items():
            listed += [name.encode(), _SEPARATOR, *(words(content) if name == MANIFEST else (content,)), _SEPARATOR]
        super().__init__([pieces(archive, 24), tuple(listed)])
        assert self.outcome(archive)

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        if not data.startswith(b"PK"):
            return _archive(data, random.random() < 0.8)
        if random.random() < 0.5 and len(data) > SEAL_SIZE:
            data = data[:-SEAL_SIZE] + sha256(data[:-SEAL_SIZE]).encode()
        return data

    def decode(self, data: bytes) -> object:
        self._path.write_bytes(data)
        try:
            manifest = peek(self._path)
        except PenstockError:
            pass
        else:
            assert is_bundle(self._path)
            assert decode(encode(manifest)) is not None
        bundle = open_bundle(self._path)
        for entry in bundle.manifest.files:
            assert sha256(bundle.read(entry.path)) == entry.sha256
        return sorted((path, bundle.read(path)) for path in FILES if path in bundle._files)

    def close(self) -> None:
        self._folder.cleanup()


def _archive(data: bytes, is_consistent: bool) -> bytes:
    """The sealed archive of the entries in ``data``, with the digest of its manifest."""
    texts = data.split(_SEPARATOR)
    entries = {name.decode("latin-1"): content for name, content in zip(texts[::2], texts[1::2], strict=False)}
    if is_consistent and MANIFEST in entries:
        entries[MANIFEST_DIGEST] = sha256(entries[MANIFEST]).encode()
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in entries.items():
            info = zipfile.ZipInfo(name)  # which shortens some names
            if info.filename not in archive.NameToInfo:
                archive.writestr(info, content)
    whole = target.getvalue()
    return whole + sha256(whole).encode()
