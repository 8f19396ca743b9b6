"""Configurations as text: the choice of the file, its content, and the position of errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import InvalidConfig
from penstock.online.repository.triton.text import config_path, parse_json, parse_text, read_config, to_text

WHOLE = """\
# a comment
name: "m", max_batch_size: 8;
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }, < name: 'y' data_type: TYPE_INT64 dims: 1 reshape { } > ]
parameters { key: "a" value: { string_value: "b" "c" } }
parameters: { key: "d" value { string_value: "e" } }
version_policy: { specific { versions: 1 versions: 3 } }
dynamic_batching { priority_queue_policy { key: 1 value { timeout_action: DELAY } } }
"""


def test_the_text_format_as_triton_writes_it() -> None:
    found = parse_text(WHOLE.encode(), "m/config.pbtxt")
    assert (found.name, found.max_batch_size) == ("m", 8)
    assert [(tensor.name, list(tensor.dims), tensor.HasField("reshape")) for tensor in found.input] == [
        ("x", [3, -1], False),
        ("y", [1], True),
    ]
    assert {key: one.string_value for key, one in found.parameters.items()} == {"a": "bc", "d": "e"}
    assert list(found.version_policy.specific.versions) == [1, 3]
    assert found.dynamic_batching.priority_queue_policy[1].timeout_action == 1
    assert parse_text(to_text(found).encode(), "again") == found


def test_a_batch_size_of_zero_is_not_the_same_as_none() -> None:
    assert parse_text(b"max_batch_size: 0", "f").HasField("max_batch_size")
    assert not parse_text(b"", "f").HasField("max_batch_size")
    assert to_text(parse_text(b"max_batch_size: 0", "f")) == "max_batch_size: 0\n"


def test_no_file_is_an_empty_configuration(tmp_path: Path) -> None:
    assert read_config(tmp_path).ByteSize() == 0


def test_a_file_by_name_goes_before_the_usual_one(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "configs").mkdir(parents=True)
    (folder / "config.pbtxt").write_text("max_batch_size: 1")
    (folder / "configs" / "small.pbtxt").write_text("max_batch_size: 2")
    assert read_config(folder).max_batch_size == 1
    assert read_config(folder, "small").max_batch_size == 2
    assert read_config(folder, "large").max_batch_size == 1
    (folder / "configs" / "small.pbtxt").write_text("max_batch_sise: 2")
    with pytest.raises(InvalidConfig, match=r"^m/configs/small.pbtxt:1:1: .*did you mean 'max_batch_size'"):
        read_config(folder, "small")


@pytest.mark.parametrize("name", ["../m", "a/b", "..", ".hidden", "a\0b", "/etc/passwd"])
def test_the_name_of_a_file_does_not_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig, match="is not a valid name"):
        config_path(tmp_path, name)


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    file = folder / "config.pbtxt"
    os.mkfifo(file)
    with pytest.raises(InvalidConfig, match=r"^m/config.pbtxt: is not a regular file"):
        read_config(folder)
    file.unlink()
    file.symlink_to("nowhere")
    with pytest.raises(InvalidConfig, match="is a broken link"):
        read_config(folder)
    file.unlink()
    file.write_bytes(b"#" * (2 << 20))
    with pytest.raises(InvalidConfig, match="more than 1048576 bytes"):
        read_config(folder)
    file.write_bytes(b'# fine\nname: "\xe4"')
    with pytest.raises(InvalidConfig, match=r"^m/config.pbtxt:2: is not UTF-8"):
        read_config(folder)


def test_a_mark_of_byte_order_is_no_field() -> None:
    assert parse_text('\ufeffname: "m"'.encode(), "f").name == "m"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        "input { " * 100_000,
        "a" * 1_000_000,
        'name: "' + "\\" * 1_000_000,
        "input { dims: [" + "1," * 100_000,
        "max_batch_size: " + "-" * 1_000_000,
    ],
    ids=["brackets", "depth", "a name", "backslashes", "numbers", "signs"],
)
def test_hostile_text_is_refused_shortly(text: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        parse_text(text.encode(), "m/config.pbtxt")
    assert len(str(refused.value)) < 1000


def test_json_as_a_client_gives_it() -> None:
    found = parse_json("m", '{"max_batch_size": 4, "dynamicBatching": {}, "parameters": {"a": {"string_value": "b"}}}')
    assert (found.max_batch_size, found.HasField("dynamic_batching")) == (4, True)
    assert found.parameters["a"].string_value == "b"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"nmae": 1}', "no field 'nmae' .did you mean 'name'"),
        ('{"parameters": {"a": {"text": "b"}}}', r"no field 'parameters\[a\].text'"),
        ('{"input": [{"data_type": "TYPE_FP3"}]}', r"'input\[0\].data_type' is 'TYPE_FP3', which is not .*did you mean 'TYPE_FP32'"),
        ('{"max_batch_size": 1.5}', "'max_batch_size': .*1.5"),
        ('{"input": {"name": "x"}}', r"'input': .*\[\]"),
        ('{"name": "a", "name": "b"}', "duplicate key name"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "scheduling_choice"),
        ("[]", "must be a JSON object"),
        ("{", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        (" " * (2 << 20), "more than 1048576"),
    ],
    ids=["field", "inner", "value", "number", "list", "twice", "schedulers", "array", "cut", "deep", "long"],
)  # fmt: skip
def test_json_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^configuration given for model 'm': .*{reason}"):
        parse_json("m", text)


def test_of_a_key_that_is_there_twice_the_last_counts_as_in_triton() -> None:
    given = parse_text(b'parameters { key: "a" value { string_value: "1" } } ' * 2 + b'parameters { key: "a" }', "f")
    assert {key: one.string_value for key, one in given.parameters.items()} == {"a": ""}
