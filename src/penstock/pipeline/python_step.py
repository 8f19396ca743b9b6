"""Steps in Python: one function of a file, whose type hints declare the values. The file runs only with permission."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, InvalidInput, PenstockError, PermissionDenied, prefixed
from penstock.pipeline.value import FILE, TEXT, Media, Value, ValueType, check_result, contiguous
from penstock.tensor import DataType

_HINT = 'write e.g. def f(scores: Tensor["FP32", 10], text: str) -> list[str]'
_MAX_DEPTH = 20


class PythonStep(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A function in Python as a step. It may be called from several threads."""

    file: str
    """Path of the source file in the pipeline."""
    function: str
    inputs: Mapping[str, ValueType]
    """The parameters of the function."""
    outputs: Mapping[str, ValueType]
    """The results: ``value``, or ``0``, ``1`` … for a tuple."""
    code: bytes
    is_allowed: bool = False
    """True if the user permits code from the pipeline."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The outputs for one item. Raises PermissionDenied unless ``is_allowed``, and InvalidInput if the function fails."""
        function = self._loaded
        try:
            returned = function(**{name: _shielded(value) for name, value in inputs.items()})
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:
            raise InvalidInput(f"'{self.function}' of {self.file} failed: {type(error).__name__}: {error}") from error
        results = returned if len(self.outputs) > 1 else (returned,)
        if not isinstance(results, tuple | list) or len(results) != len(self.outputs):
            raise InvalidInput(f"'{self.function}' of {self.file} must return {len(self.outputs)} values")
        try:
            found = zip(self.outputs.items(), results, strict=True)
            return {name: check_result(kind, value) for (name, kind), value in found}
        except InvalidInput as error:
            raise prefixed(f"the result of '{self.function}' of {self.file} ", error) from None

    @functools.cached_property
    def _loaded(self) -> Callable[..., Any]:
        if not self.is_allowed:
            raise PermissionDenied(
                f"the pipeline runs Python code, {self.file}",
                "read it with `penstock inspect`; if you trust it, allow it with --allow-python or allow_python=True",
            )
        module: dict[str, Any] = {"__name__": f"penstock_step_{self.function}", "__file__": self.file}
        try:
            exec(compile(self.code, self.file, "exec"), module)  # noqa: S102 - with the user's permission
        except (Exception, SystemExit) as error:
            raise InvalidConfig(f"{self.file} cannot be run: {type(error).__name__}: {error}") from error
        found = module.get(self.function)
        if not inspect.isfunction(found):
            raise InvalidConfig(f"'{self.function}' of {self.file} is not a function")
        return found


def _shielded(value: Value) -> Value:
    """``value`` as a function may have it: other steps read the same arrays, so that a change would change their results."""
    if isinstance(value, list):
        return [_shielded(one) for one in value]
    if isinstance(value, np.ndarray):
        value = contiguous(value).view()
        value.flags.writeable = False
    return value


def read_python_step(target: str, files: Mapping[str, bytes], is_allowed: bool = False) -> PythonStep:
    """The step ``FILE.py:FUNCTION``. The file is parsed, but not run. Raises InvalidConfig."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise InvalidConfig(f"'{target}' is not a function in a file", "write FILE.py:FUNCTION")
    if file not in files:
        raise InvalidConfig(f"there is no file '{file}'", "check its path, below the folder of the declaration")
    code = files[file]
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidConfig(f"{file} is not valid Python: {error}") from None
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    if name not in functions:
        hint = did_you_mean(name, functions) if functions else ""
        raise InvalidConfig(f"{file} has no function '{name}'", hint)
    found = functions[name]
    arguments = found.args
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
        raise InvalidConfig(f"'{name}' of {file} must have named parameters only", _HINT)
    inputs = {
        one.arg: _hinted(one.annotation, f"parameter '{one.arg}' of '{name}'")
        for one in (*arguments.args, *arguments.kwonlyargs)
    }
    return PythonStep(file, name, inputs, dict(_results(found.returns, f"the result of '{name}'")), code, is_allowed)


def _results(hint: ast.expr | None, what: str) -> Iterator[tuple[str, ValueType]]:
    if isinstance(hint, ast.Subscript) and _word(hint.value) in ("tuple", "Tuple"):
        for number, one in enumerate(hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]):
            yield str(number), _hinted(one, what)
    else:
        yield "value", _hinted(hint, what)


def _hinted(hint: ast.expr | None, what: str, many: bool = False) -> ValueType:
    """The type that a type hint declares. Raises InvalidConfig."""
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        try:
            hint = ast.parse(hint.value, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise InvalidConfig(f"the type hint of {what} is not valid Python", _HINT) from None
    word = _word(hint)
    if word in ("str", "bytes"):
        return msgspec.structs.replace(TEXT if word == "str" else FILE, many=many)
    if isinstance(hint, ast.Subscript | ast.Call):
        outer = _word(hint.value if isinstance(hint, ast.Subscript) else hint.func)
        inner = list(hint.args) if isinstance(hint, ast.Call) else _items(hint.slice)
        if outer in ("list", "List") and len(inner) == 1 and not many:
            return _hinted(inner[0], what, many=True)
        if outer == "Annotated" and len(inner) > 1:
            return _hinted(inner[1], what, many)
        if outer == "Tensor":
            return _tensor(inner, what, many)
    shown = f", not {ast.unparse(hint)}" if hint is not None else ", but it has none"
    raise InvalidConfig(f"{what} needs a type hint: str, bytes, Tensor[…], or a list of these{shown}", _HINT)


def _tensor(items: list[ast.expr], what: str, many: bool) -> ValueType:
    try:
        datatype, *shape = (ast.literal_eval(item) for item in items)
        if all(isinstance(dim, int) and dim >= -1 for dim in shape):
            return ValueType(Media.TENSOR, DataType(datatype), tuple(shape), many)
    except ValueError:
        pass
    raise InvalidConfig(f"the type hint of {what} is wrong", 'write e.g. Tensor["FP32", -1, 4]; -1 is any size')


def _items(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _word(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
