from __future__ import annotations

import jsonschema_rs
import msgspec
import pytest

from penstock.pipeline.schema import schema
from penstock.pipeline.steps.registry import NAMES
from pipelines import SCORES, canonical, declared

VALIDATOR = jsonschema_rs.Draft202012Validator(schema())


def test_every_step_has_its_options_with_help() -> None:
    steps = {one["title"]: one for one in schema()["$defs"]["step"]["oneOf"]}
    assert {*NAMES, "model", "map", "python"} == set(steps)
    for name in NAMES:
        assert steps[name]["description"]
        assert all(
            option.get("description") or option == {}
            for key, option in steps[name]["properties"].items()
            if key not in ("step", "description")
        )


@pytest.mark.parametrize("text", [SCORES])
def test_what_the_parser_accepts_is_valid(text: str) -> None:
    assert VALIDATOR.is_valid(msgspec.json.decode(canonical(declared(text))))
