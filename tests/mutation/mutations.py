"""Mutations: small changes to the source of a module, each of which some test should notice.

======================  ==============================================================================================
comparisons             the next operator (``<`` to ``<=``) and the opposite one (``<`` to ``>=``)
arithmetic              ``+`` and ``-``, ``*`` and ``/``, ``&`` and ``|``, ``//`` to ``/``, ``%`` and ``**`` to ``*``; no minus sign
numbers                 twice and half a fraction; one more for a whole number, twice for one above 16
conditions              without an operand of ``and`` or ``or``, without ``not``, the opposite of a name or a call
functions               ``min`` and ``max``, ``any`` and ``all``, ``floor`` and ``ceil``; no ``abs``; no keyword argument
statements              no call, ``continue``, ``break`` or ``return``; ``+=`` to ``-=``
results                 the opposite of a bool, twice a float, one more than an int
slices                  one element further
======================  ==============================================================================================

Text, annotations, decorators, errors that are raised, and assertions stay as they are.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import msgspec

Change = tuple[str, str]
"""What changes, in words, and the new source of the node."""

_LARGE = 16
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_RESULTS = {"bool": ("not", "not ({})"), "float": ("twice", "2 * ({})"), "int": ("one more than", "({}) + 1")}
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}
_SAFETY_KEYWORDS = {"strict", "copy"}
"""Keyword arguments that no correct program notices."""


class Mutation(msgspec.Struct, frozen=True):
    """A change at one place. ``function``, ``line`` and ``change`` identify it even if lines move."""

    function: str
    """The qualified name of the outermost function around the place, or of the method; empty outside of functions."""
    line: str
    """The source line at which the changed code begins."""
    change: str
    number: int
    start: int
    end: int
    new: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.function, self.line, self.change

    def apply(self, source: bytes) -> bytes:
        """The mutated ``source``."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutations(source: bytes) -> list[Mutation]:
    """All mutations of a module, in the order of its text."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str, str]] = Counter()
    found = []
    for function, node, (change, new) in _walk(ast.parse(source), ""):
        line = lines[node.lineno - 1].decode().strip()
        seen[function, line, change] += 1
        again = seen[function, line, change]
        found.append(
            Mutation(
                function,
                line,
                change if again == 1 else f"{change} ({again})",
                node.lineno,
                starts[node.lineno - 1] + node.col_offset,
                starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
                new,
            )
        )
    return sorted(found, key=lambda one: (one.start, one.end))


def _walk(node: ast.AST, function: str, result: str = "", scope: str = "") -> Iterator[tuple[str, ast.expr, Change]]:
    """Each change of ``node`` and the nodes in it, with the function around it. ``result`` is the type that this returns."""
    if isinstance(node, _SKIPPED) or _is_text(node):
        return
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            yield from _walk(inner, function, result, f"{scope}{node.name}.")
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = function or scope + node.name
        result = node.returns.id if isinstance(node.returns, ast.Name) else ""
    if isinstance(node, ast.Return) and node.value is not None:
        yield from ((function, node.value, change) for change in _of_result(node.value, result))
    yield from ((function, node, change) for change in _changes(node))  # type: ignore[misc]
    for place, value in _conditions(node):
        yield from ((function, value, change) for change in place)
    if isinstance(node, ast.keyword) and node.arg in _SAFETY_KEYWORDS:
        return
    for field, value in ast.iter_fields(node):
        if field not in _SKIPPED_FIELDS:
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from _walk(inner, function, result, scope)


def _changes(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            yield from _of_comparison(node)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC and not (_has_text(left) or _has_text(right)):
            other = _ARITHMETIC[type(op)]()
            yield f"{_sign(op)} to {_sign(other)}", _text(ast.BinOp(left, other, right))
        case ast.AugAssign(target, op, value) if type(op) in _ARITHMETIC:
            other = _ARITHMETIC[type(op)]()
            yield f"{_sign(op)}= to {_sign(other)}=", ast.unparse(ast.AugAssign(target, other, value))
        case ast.BoolOp(op, values):
            for dropped in values:
                kept = [value for value in values if value is not dropped]
                yield f"without {ast.unparse(dropped)}", _text(kept[0] if len(kept) == 1 else ast.BoolOp(op, kept))
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert() as op, operand):
            yield f"without {_sign(op)}", _text(operand)
        case ast.Constant(value):
            yield from _of_constant(value)
        case ast.Call():
            yield from _of_call(node)
        case ast.Expr(ast.Call() | ast.Yield() | ast.Await()) | ast.Delete():
            yield "without the statement", "pass"
        case ast.Continue() | ast.Break() | ast.Return(None):
            yield "without the statement", "pass"


def _conditions(node: ast.AST) -> Iterator[tuple[list[Change], ast.expr]]:
    """Conditions that are no comparisons, and bounds of slices that are no numbers."""
    match node:
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            tests = [test]
        case ast.comprehension(ifs=tests):
            pass
        case ast.Slice(lower, upper):
            for bound in (lower, upper):
                if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                    yield [(f"{ast.unparse(bound)} to one more", f"({ast.unparse(bound)}) + 1")], bound
            return
        case _:
            return
    for test in tests:
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield [(f"not {ast.unparse(test)}", f"(not ({ast.unparse(test)}))")], test


def _of_result(value: ast.expr, result: str) -> Iterator[Change]:
    covered = (ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp) if result == "bool" else (ast.Constant,)
    if result in _RESULTS and not isinstance(value, covered):
        what, form = _RESULTS[result]
        yield f"return {what} it", form.format(ast.unparse(value))


def _of_comparison(node: ast.Compare) -> Iterator[Change]:
    for place, op in enumerate(node.ops):
        for other in _COMPARISONS[type(op)]:
            ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
            yield f"{_sign(op)} to {_sign(other())}", _text(ast.Compare(node.left, ops, node.comparators))


def _of_constant(value: object) -> Iterator[Change]:
    if isinstance(value, bool):
        yield f"{value} to {not value}", str(not value)
    elif isinstance(value, int):
        other = 2 * value if value > _LARGE else value + 1
        yield f"{value} to {other}", str(other)
    elif isinstance(value, float):
        for changed in (2 * value, value / 2) if value else (1.0,):
            yield f"{value} to {changed}", str(changed)


def _of_call(node: ast.Call) -> Iterator[Change]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name == "abs" and node.args:
        yield "without abs", _text(node.args[0])
    if name in _FUNCTIONS:
        func = ast.Name(_FUNCTIONS[name]) if isinstance(node.func, ast.Name) else None
        if isinstance(node.func, ast.Attribute):
            func = ast.Attribute(node.func.value, _FUNCTIONS[name])  # type: ignore[assignment]
        yield f"{name} to {_FUNCTIONS[name]}", ast.unparse(ast.Call(func, node.args, node.keywords))  # type: ignore[arg-type]
    # The arguments of a class are its fields, most of which are required.
    for keyword in node.keywords if not name[:1].isupper() else ():
        if keyword.arg and keyword.arg not in _SAFETY_KEYWORDS:
            others = [one for one in node.keywords if one is not keyword]
            yield f"without {ast.unparse(keyword)}", ast.unparse(ast.Call(node.func, node.args, others))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _has_text(node: ast.expr) -> bool:
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str | bytes))
        for one in ast.walk(node)
        if not isinstance(one, ast.Subscript)
    )


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _sign(op: ast.operator | ast.cmpop | ast.unaryop) -> str:
    one = ast.Name("x")
    match op:
        case ast.operator():
            return ast.unparse(ast.BinOp(one, op, one)).split()[1]
        case ast.unaryop():
            return ast.unparse(ast.UnaryOp(op, one)).removesuffix("x").strip()
    return ast.unparse(ast.Compare(one, [op], [one])).removeprefix("x").removesuffix("x").strip()
