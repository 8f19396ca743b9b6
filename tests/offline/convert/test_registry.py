"""The table of formats agrees with the files and the extras."""

import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.offline.convert import frameworks
from penstock.offline.convert.registry import FORMATS, get_converter

ROOT = Path(__file__).parents[3]


def test_every_framework_has_a_file_and_every_file_a_format():
    files = {path.stem for path in Path(frameworks.__file__).parent.glob("*.py")} - {"__init__"}
    assert {entry.framework for entry in FORMATS.values()} == files


def test_every_extra_exists_and_installs_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for entry in FORMATS.values():
        assert bool(entry.extra) == bool(entry.package), entry.name
        if entry.extra and entry.package != "catboost":
            wanted = {"sklearn": "scikit-learn"}.get(entry.package, entry.package)
            assert any(one.startswith(wanted) for one in extras[entry.extra]), entry.name


def test_a_format_without_a_package_is_always_available():
    converter = get_converter("caffe")
    assert converter.name == "caffe"
    assert converter.version


def test_a_missing_package_is_named_with_its_extra():
    missing = [entry for entry in FORMATS.values() if entry.package and find_spec(entry.package) is None]
    if not missing:
        pytest.skip("every framework is installed")
    for entry in missing:
        with pytest.raises(Unavailable, match=f"needs the package '{entry.package}'") as caught:
            get_converter(entry.name)
        assert f"penstock[{entry.extra}]" in caught.value.hint
        assert ("--isolated" in caught.value.hint) == bool(entry.isolated)
