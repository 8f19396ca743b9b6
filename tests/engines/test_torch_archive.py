"""The permitted content of an archive, checked by its records alone, without torch."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest

from penstock.engines.torch_archive import check_kind, check_program, check_script, record_names
from penstock.errors import InvalidModel


def archive(**records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in records.items():
            file.writestr(f"program/{name}", data)
    return buffer.getvalue()


def check(graph: Any, **records: Any) -> None:
    """``check_program`` on a program with the ``graph`` and further JSON ``records``, ``__`` standing for ``/``."""
    texts = {"models/model.json": json.dumps(graph).encode()}
    texts |= {name.replace("__", "/"): json.dumps(value).encode() for name, value in records.items()}

    def check_pickle(data: bytes) -> None:
        if b"code" in data:
            raise ValueError

    check_program(list(texts), texts.__getitem__, check_pickle)


def test_records_are_named_without_the_archives_own_name() -> None:
    assert record_names(archive(version=b"6", data=b"x")) == ["version", "data"]


def test_what_is_no_archive_and_what_is_a_bomb() -> None:
    with pytest.raises(InvalidModel, match="is not an archive of torch"):
        record_names(b"not a zip")
    with pytest.raises(InvalidModel, match="is not an archive of torch"):
        record_names(archive(version=b"6")[:-10])
    with pytest.raises(InvalidModel, match="unpacks to more than 32 times its size"):
        record_names(archive(data=bytes(1 << 20)))


def test_kinds_of_archives_are_told_apart() -> None:
    check_script(["constants.pkl", "data.pkl"])
    check_kind(["models/model.json", "data/weights/w"])
    with pytest.raises(InvalidModel, match=r"is an exported program, not TorchScript \(name it '\.pt2'\)"):
        check_script(["models/model.json"])
    with pytest.raises(InvalidModel, match=r"is a pickle of torch\.save"):
        check_script(["data.pkl"])
    with pytest.raises(InvalidModel, match=r"is not an exported program \(name it '\.pt'\)"):
        check_kind(["constants.pkl"])
    with pytest.raises(InvalidModel, match="is not an exported program"):
        check_kind(["anything"])
    with pytest.raises(InvalidModel, match="native code of AOTInductor"):
        check_kind(["models/model.json", "data/aotinductor/m.so"])


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.mm.default",
        "torch.ops.mylib.norm",
        "_operator.add",
        "torch.sym_int",
        "torch._sym_sqrt",
        "math.ceil",
    ],
)
def test_operators_may_be_called(target: str) -> None:
    check({"nodes": [{"target": target}]})


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.ops.load_library",
        "torch.ops.load_library.default",
        "torch.ops.aten.__class__",
        "torch.ops.aten.mm.__globals__",
        "_operator.methodcaller",
        "builtins.eval",
        "torch.hub.load",
        "torch.ops.aten.mm.default; import os",
        "torch.ops.aten.mm.default\n",
    ],
)
def test_anything_else_may_not(target: str) -> None:
    with pytest.raises(InvalidModel, match="is not a pure tensor operation"):
        check({"deep": [[{"target": target}]]})


@pytest.mark.parametrize(
    "text", ["s0 + 2*s1", "Max(1, s0)", "L['x'].size()[0] >= 2", "math.ceil(s0 / 2)", "max(s0, 3)"]
)
def test_arithmetic_of_sizes_may_be_evaluated(text: str) -> None:
    check({"expr_str": text, "range_constraints": {text: {}}, "guards_code": [text]})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "open('x')",
        "[x for x in ()]",
        "lambda: 1",
        "().__class__",
        "s0.real.denominator",
        "L['x'].numpy()",
        "x := 1",
        "f'{s0}'",
        "'a;b'",
        "s0 +",
        "(" * 500,
    ],
)
@pytest.mark.parametrize("key", ["expr_str", "guards_code", "range_constraints"])
def test_other_python_may_not(text: str, key: str) -> None:
    with pytest.raises(InvalidModel, match=key):
        check({key: {text: {}} if key == "range_constraints" else text})


def test_names_and_nesting_are_plain() -> None:
    tree = {"type": "builtins.dict", "context": '["a", "b"]', "children_spec": [{"type": None, "context": None}]}
    check({"name": "layer.0.weight", "in_spec": json.dumps([1, tree]), "metadata": {"target": "os.system"}})
    with pytest.raises(InvalidModel, match="name 'a b'"):
        check({"name": "a b"})
    for change in ({"type": "os.system"}, {"context": "__import__('os')"}):
        with pytest.raises(InvalidModel, match="out_spec"):
            check({"out_spec": json.dumps([1, {**tree, "children_spec": [{**tree, **change}]}])})


def test_pickles_are_refused() -> None:
    plain = {"config": {"w": {"use_pickle": False, "path_name": "weight_0"}}}
    check({}, data__weights__model_weights_config__json=plain, data__sample_inputs__model="plain")
    for change in ({"use_pickle": True}, {"path_name": "custom_obj_0"}, {"path_name": "opaque_obj_0"}):
        forged = {"config": {"w": {**plain["config"]["w"], **change}}}
        with pytest.raises(InvalidModel, match="'w' of the exported program is pickled"):
            check_program(
                ["models/model.json", "data/weights/c.json"],
                {"models/model.json": b"{}", "data/weights/c.json": json.dumps(forged).encode()}.__getitem__,
                bytes,
            )
    with pytest.raises(InvalidModel, match="may run any code"):
        check_program(["models/model.json", "data/constants/c.pt"], lambda _: b"{}", bytes)
    with pytest.raises(InvalidModel, match="example inputs contain values other than tensors"):
        check({}, data__sample_inputs__model="code")
