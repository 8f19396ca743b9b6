"""Trace settings as Triton's clients set them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.telemetry.trace_settings import TraceSetting, TraceSettings

DEFAULT = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


def test_the_defaults_are_tritons_with_numbers_as_strings() -> None:
    assert TraceSettings().get() == DEFAULT
    assert TraceSettings().get("any") == DEFAULT
    assert not TraceSettings().is_on


def test_a_model_has_the_global_setting_where_it_has_none_of_its_own() -> None:
    settings = TraceSettings(TraceSetting(trace_file="t.json"))
    assert settings.update("m", {"trace_rate": "5"}) == DEFAULT | {"trace_rate": "5", "trace_file": "t.json"}
    settings.update("", {"trace_rate": 7, "trace_level": ["TIMESTAMPS"]})
    assert settings.get("m")["trace_rate"] == "5"
    assert settings.get("m")["trace_level"] == ["TIMESTAMPS"]
    assert settings.get("other")["trace_rate"] == "7"
    assert settings.of("m").is_on
    assert settings.is_on


def test_null_clears_a_value() -> None:
    settings = TraceSettings(TraceSetting(trace_rate=50))
    settings.update("", {"trace_rate": "7"})
    settings.update("m", {"trace_rate": "5", "trace_count": "3"})
    assert settings.update("m", {"trace_rate": None})["trace_rate"] == "7"
    assert settings.has_own("m")
    settings.update("m", {"trace_count": None})
    assert not settings.has_own("m")
    assert settings.update("", {"trace_rate": None})["trace_rate"] == "50"


def test_one_model_alone_may_be_traced() -> None:
    settings = TraceSettings()
    settings.update("m", {"trace_level": ["TIMESTAMPS"]})
    assert settings.is_on
    assert not settings.of("other").is_on
    settings.update("m", {"trace_level": ["OFF"]})
    assert not settings.is_on


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"trace_rate": 1}, {"trace_rate": "1"}),
        ({"trace_rate": ["12"]}, {"trace_rate": "12"}),
        ({"trace_count": "-1"}, {"trace_count": "-1"}),
        ({"log_frequency": "0"}, {"log_frequency": "0"}),
        ({"trace_level": "TIMESTAMPS"}, {"trace_level": ["TIMESTAMPS"]}),
        ({"trace_mode": "opentelemetry"}, {"trace_mode": "opentelemetry"}),
        ({"trace_mode": ["triton"]}, {"trace_mode": "triton"}),
        ({}, {}),
    ],
)
def test_all_the_forms_in_which_values_come(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert TraceSettings().update("", given) == DEFAULT | shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trace_rate": "0"}, "trace_rate must be a whole number from 1 to"),
        ({"trace_rate": "x"}, "trace_rate must be"),
        ({"trace_rate": 1.5}, "trace_rate must be"),
        ({"trace_rate": True}, "trace_rate must be"),
        ({"trace_rate": "9" * 5000}, "trace_rate must be"),
        ({"trace_rate": ["1", "2"]}, "trace_rate takes one value, not 2"),
        ({"trace_count": "-2"}, "trace_count must be"),
        ({"log_frequency": -1}, "log_frequency must be"),
        ({"trace_level": []}, "trace_level must be a list"),
        ({"trace_level": 3}, "trace_level must be a list"),
        ({"trace_level": ["LOUD"]}, "trace_level 'LOUD' is unknown"),
        ({"trace_level": [["OFF"]]}, "is unknown"),
        ({"trace_level": ["TIMESTAMPS", "TENSORS"]}, "contents of tensors are not recorded"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, "OFF cannot be combined with other levels"),
        ({"trace_mode": "x" * 1000}, "trace_mode 'x{80}…' is unknown"),
        ({"trace_mode": {}}, "trace_mode '{}' is unknown"),
        ({"trace_file": "/etc/passwd"}, "trace file location can not be updated through network protocol"),
        ({"y" * 1000: "1"}, "unknown trace setting 'y{80}…'"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(given: dict[str, Any], message: str) -> None:
    settings = TraceSettings()
    with pytest.raises(InvalidArgument, match=message):
        settings.update("", {"log_frequency": "5"} | given)
    assert settings.get() == DEFAULT


def test_the_mode_is_the_same_for_all_models() -> None:
    with pytest.raises(InvalidArgument, match="the same for all models"):
        TraceSettings().update("m", {"trace_mode": "opentelemetry"})


def test_what_was_shown_may_be_sent_back() -> None:
    settings = TraceSettings(TraceSetting(trace_file="t.json", trace_mode="opentelemetry"))
    for model in ("", "m"):
        assert settings.update(model, settings.get(model)) == settings.get()


def test_a_model_keeps_what_it_was_given_even_if_it_was_the_global_value() -> None:
    settings = TraceSettings()
    settings.update("m", {"trace_rate": "1000"})
    settings.update("", {"trace_rate": "5"})
    assert settings.get("m")["trace_rate"] == "1000"


def test_the_changes_of_one_are_taken_by_another() -> None:
    initial = TraceSetting(trace_file="t.json")
    one, other = TraceSettings(initial), TraceSettings(initial)
    one.update("", {"trace_level": ["TIMESTAMPS"], "trace_count": "9"})
    one.update("m", {"trace_rate": "5"})
    one.update("n", {"trace_rate": "5"})
    one.update("n", {"trace_rate": None})
    changes = one.changes()
    assert changes == {"": {"trace_level": ["TIMESTAMPS"], "trace_count": "9"}, "m": {"trace_rate": "5"}}
    for model, each in changes.items():
        other.update(model, each)
    assert other.changes() == changes
    assert other.get("m") == one.get("m")
