from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from penstock.engines.base import typed_options
from penstock.errors import InvalidConfig


class Options(msgspec.Struct, frozen=True):
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    hint: Literal["latency", "throughput"] = "latency"


def test_defaults_and_given_values() -> None:
    assert typed_options("e", {}, Options) == Options()
    assert typed_options("e", {"threads": 2, "hint": "throughput"}, Options) == Options(2, "throughput")


def test_all_unknown_names_are_told_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        typed_options("e", {"thread": 1, "threads": 1, "arena": True}, Options)
    assert caught.value.message == "unknown option(s) for engine 'e': arena, thread"
    assert caught.value.hint == "known: threads, hint"


@pytest.mark.parametrize("options", [{"threads": "2"}, {"threads": -1}, {"threads": True}, {"hint": "speed"}], ids=str)
def test_wrong_value_names_the_engine_and_the_option(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(InvalidConfig, match=rf"bad option for engine 'e': .*{name}"):
        typed_options("e", options, Options)
