"""Checks the kind of a torch archive, and rejects an archive that could run arbitrary code while it is loaded.

torch reads parts of an exported program with Python's unrestricted unpickler. It also evaluates symbolic sizes, input guards and
function names as Python code. Files from ``torch.export.save`` do not need the features that are rejected here. The checks
restrict a program to tensor operations. They do not make models from untrusted sources safe.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.errors import InvalidModel

Read = Callable[[str], bytes]
"""Reads a record of an archive by name."""

_EXPORT = "export the program again with torch.export.save, from tensors and operators of torch only"

_MAX_RATIO = 32
_TARGET = re.compile(
    r"torch\.ops\.(?!load_library|import_module|loaded_libraries)[a-zA-Z]\w*\.(?!__)\w+(\.(?!__)\w+)?"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|lshift|rshift|getitem)"
    r"|torch\._?sym_\w+|math\.\w+"
)
_NAME = re.compile(r"[\w.]*")
_KEYS = re.compile(r'null|None|\[[\w\s",.:/-]*\]')
_TREES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None)
_TEXT = re.compile(r"[\w .-]*")
_METHODS = ("size", "stride", "storage_offset")
_FUNCTIONS = ("max", "min")
_EXPRESSION = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.Subscript,
    ast.Attribute, ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def record_names(data: bytes) -> list[str]:
    """Names of an archive's records, without the prefix. Raises InvalidModel if ``data`` is a zip bomb or not an archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
    except zipfile.BadZipFile:
        raise InvalidModel(
            "the file is not an archive of torch, or is truncated", "save it with torch.export.save or torch.jit.save"
        ) from None
    if sum(record.file_size for record in records) > _MAX_RATIO * len(data):
        raise InvalidModel(f"the archive unpacks to more than {_MAX_RATIO} times its size", _EXPORT)
    return [record.filename.partition("/")[2] for record in records]


def check_script(names: Sequence[str]) -> None:
    """Raise InvalidModel unless an archive with records ``names`` contains TorchScript."""
    if "constants.pkl" in names:
        return
    if any(name.startswith("models/") for name in names):
        raise InvalidModel("the file is an exported program, not TorchScript", "name it '.pt2'")
    raise InvalidModel(
        "the file is a pickle of torch.save, which Penstock does not load, because unpickling may run any code",
        "save it with torch.export.save or, as TorchScript, with torch.jit.save",
    )


def check_kind(names: Sequence[str]) -> None:
    """Raise InvalidModel unless an archive with records ``names`` contains one exported program."""
    if any(name.startswith("data/aotinductor/") for name in names):
        raise InvalidModel("the file contains native code of AOTInductor, which Penstock does not load", _EXPORT)
    if "models/model.json" not in names:
        hint = "name it '.pt'" if "constants.pkl" in names else "save it with torch.export.save"
        raise InvalidModel("the file is not an exported program", hint)


def check_program(names: Sequence[str], read: Read, check_pickle: Callable[[bytes], object]) -> None:
    """Raise InvalidModel if an exported program with records ``names`` contains anything that may run code other than tensor
    operations.

    ``check_pickle`` takes the pickled example inputs and raises an error if they contain anything except tensors and plain values.
    """
    check_kind(names)
    for name in names:
        if re.fullmatch(r"data/(weights|constants)/.*\.pt", name):
            raise InvalidModel(f"the exported program contains '{name}', which may run any code", _EXPORT)
        if name.startswith(("data/weights/", "data/constants/")) and name.endswith(".json"):
            _check_payloads(json.loads(read(name))["config"])
        if name.startswith("models/"):
            _check_graph(json.loads(read(name)))
        if name.startswith("data/sample_inputs/") and (data := read(name)):
            try:
                check_pickle(data)
            except Exception as error:
                raise InvalidModel(
                    "the exported program's example inputs contain values other than tensors", _EXPORT
                ) from error


def _check_payloads(payloads: dict[str, Any]) -> None:
    for name, payload in payloads.items():
        if payload["use_pickle"] or payload["path_name"].startswith(("custom_obj", "opaque_obj")):
            raise InvalidModel(f"'{name}' of the exported program is pickled, which may run any code", _EXPORT)


def _check_graph(graph: Any) -> None:
    for key, value in _texts(graph):
        if key in ("target", "as_operator"):
            is_known = bool(_TARGET.fullmatch(value))
        elif key in ("expr_str", "guards_code", "range_constraints"):
            is_known = _is_arithmetic(value)
        elif key in ("in_spec", "out_spec"):
            is_known = _is_tree(value)
        else:
            is_known = key not in ("name", "as_name", "forward_arg_names") or bool(_NAME.fullmatch(value))
        if not is_known:
            raise InvalidModel(f"the exported program's {key} '{value[:200]}' is not a pure tensor operation", _EXPORT)


def _texts(node: Any) -> Iterator[tuple[str, str]]:
    """Every string at any depth of ``node``, with its key. Includes the keys of ``range_constraints``, which are expressions.

    Not recursive, because the file determines the depth of nesting.
    """
    left: list[tuple[str, Any]] = [("", node)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            if key == "range_constraints":
                left += [(key, name) for name in value]
            left += [(name, inner) for name, inner in value.items() if name != "metadata"]
        elif isinstance(value, list):
            left += [(key, inner) for inner in value]
        elif isinstance(value, str):
            yield key, value


def _is_tree(spec: str) -> bool:
    """True if ``spec``, which describes how arguments are nested, has only tuples, lists, and dictionaries with plain keys."""
    left = [json.loads(spec)]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            if node.get("type") not in _TREES or not _KEYS.fullmatch(str(node.get("context"))):
                return False
            left.append(node.get("children_spec"))
    return True


def _is_arithmetic(text: str) -> bool:
    """True if ``text`` uses only numbers, tensor sizes and sympy functions, whose names are capitalised."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _EXPRESSION) and _is_plain(node) for node in nodes)


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS or (isinstance(node.value, ast.Name) and node.value.id == "math")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id[0].isupper() or node.func.id in _FUNCTIONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute)
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, (str, bytes)) or bool(_TEXT.fullmatch(str(node.value)))
    return True
