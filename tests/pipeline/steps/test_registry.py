"""The table of steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.registry import NAMES, step_class


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_documented_step(name: str) -> None:
    found = step_class(name)
    assert issubclass(found, Step)
    assert found.__doc__


def test_no_class_has_two_names() -> None:
    assert len({step_class(name) for name in NAMES}) == len(NAMES)


def test_unknown_steps_get_a_suggestion() -> None:
    with pytest.raises(InvalidConfig, match="there is no step 'softmx'") as caught:
        step_class("softmx")
    assert "softmax" in caught.value.hint
    with pytest.raises(InvalidConfig) as caught:
        step_class("zzzzzzzz")
    assert caught.value.hint.startswith("use one of: argmax, ")


def test_the_table_imports_no_library_of_a_step() -> None:
    code = "import sys, penstock.pipeline.steps.registry; print({'cv2', 'PIL', 'soundfile', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("step", "library"), [("resize", "cv2"), ("draw", "PIL"), ("decode_image", "simplejpeg")])
def test_a_step_without_its_library_names_the_extra(step: str, library: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from penstock.errors import Unsupported\n"
        "from penstock.pipeline.steps.registry import step_class\n"
        f"try: step_class({step!r})\n"
        "except Unsupported as error: print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "pip install 'penstock[images]'"
