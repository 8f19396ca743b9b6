"""Fuzzes changes of the trace settings: a line for each, ``model`` and the changes as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.telemetry.trace_settings import TraceSetting, TraceSettings
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import words
from tests.fuzz.target import Target

_CHANGES: Sequence[dict[str, object]] = (
    {"trace_rate": "7", "trace_level": ["TIMESTAMPS"]},
    {"trace_rate": None, "trace_count": 3, "log_frequency": ["2"]},
    {"trace_mode": "opentelemetry", "trace_level": ["OFF"]},
    {"trace_file": "", "trace_level": None},
)


class TraceSettingsTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\n",
        b"m {",
        b"null",
        b'""',
        b"[[]]",
        b"1e3",
        b"-1",
        b"2147483648",
        b'"\xd9\xa3"',
        b'["OFF","OFF"]',
    )

    def __init__(self) -> None:
        lines = [(b"%b " % name, *words(json.dumps(one).encode()), b"\n") for one in _CHANGES for name in (b"", b"m")]
        self.seeds: Sequence[Seed] = [*lines, tuple(part for line in lines for part in line)]

    def run(self, data: bytes) -> None:
        settings = TraceSettings()
        for line in data.split(b"\n")[:50]:
            name, _, text = line.partition(b" ")
            try:
                changes = msgspec.json.decode(text, type=dict)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            before = settings.changes()
            try:
                shown = settings.update(name.decode("latin-1"), changes)
            except PenstockError:
                assert settings.changes() == before, "a refused change has changed something"
            else:
                assert shown == settings.get(name.decode("latin-1"))
            for model in ("", "m", "other"):
                msgspec.convert(msgspec.to_builtins(settings.of(model)), TraceSetting)
        copy = TraceSettings()
        for model, own in settings.changes().items():
            copy.update(model, own)
        assert copy.changes() == settings.changes(), "another process does not get the same settings"
        for name in settings.changes():
            settings.update(name, dict.fromkeys(TraceSetting.__struct_fields__))
