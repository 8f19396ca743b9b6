"""The changes of each construct, and that all of them are programs."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.mutations import mutations
from tests.mutation.targets import DECIDING, ROOT, SOURCE, paths_of_tests


def changed(source: str) -> set[str]:
    """The mutated forms of ``source``, written as ``ast.unparse`` writes them."""
    return {ast.unparse(ast.parse(one.apply(source.encode()))) for one in mutations(source.encode())}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b", "a >= b"}),
        ("a < b <= c", {"a <= b <= c", "a >= b <= c", "a < b < c", "a < b > c"}),
        ("a == b", {"a != b"}),
        ("a not in b", {"a in b"}),
        ("a + b", {"a - b"}),
        ("a // b", {"a / b"}),
        ("text = a + 'b'", set()),
        ("a and b and c", {"b and c", "a and c", "a and b"}),
        ("not a", {"a"}),
        ("-a", {"a"}),
        ("x = 3", {"x = 4"}),
        ("x = 100", {"x = 200"}),
        ("x = 0.5", {"x = 1.0", "x = 0.25"}),
        ("x = 0.0", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x = 'text'", set()),
        ("y = min(a, b)", {"y = max(a, b)"}),
        ("y = a.max(initial=b)", {"y = a.min(initial=b)", "y = a.max()"}),
        ("y = abs(a)", {"y = a"}),
        ("y = zip(a, b, strict=True)", set()),
        ("y = Range(low=a, high=b)", set()),
        ("f(a)", {"pass"}),
        ("a += b", {"a -= b"}),
        ("y = a[b:c]", {"y = a[b + 1:c]", "y = a[b:c + 1]"}),
        ("y = a[:2]", {"y = a[:3]"}),
        ("if f(a):\n    b", {"if not f(a):\n    b"}),
        ("y = [a for a in b if a]", {"y = [a for a in b if not a]"}),
        ("y = a if b else c", {"y = a if not b else c"}),
        ("for a in b:\n    continue", {"for a in b:\n    pass"}),
        ("raise E(a + b)", set()),
        ("assert a < b", set()),
        ("y = f'{a + b}'", set()),
        ("x: int = a", set()),
    ],
)
def test_each_construct_has_its_changes(source: str, expected: set[str]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(("type_", "result"), [("bool", "not f(x)"), ("float", "2 * f(x)"), ("int", "f(x) + 1")])
def test_results_change_by_their_type(type_: str, result: str) -> None:
    assert changed(f"def g(x) -> {type_}:\n    return f(x)") == {f"def g(x) -> {type_}:\n    return {result}"}


def test_a_mutation_names_its_function_and_line() -> None:
    source = b"class A:\n    def f(self):\n        g = lambda: a < b\n        return a < b, a < b\n"
    keys = [one.key for one in mutations(source)]
    assert keys[0] == ("A.f", "g = lambda: a < b", "< to <=")
    assert len(set(keys)) == len(keys) == 6
    assert keys == [one.key for one in mutations(b"\n\n# moved\n" + source)]


def test_positions_are_those_of_bytes() -> None:
    source = "x = 'é…', a < b\n"
    assert [one.apply(source.encode()).decode() for one in mutations(source.encode())] == [
        "x = 'é…', (a <= b)\n",
        "x = 'é…', (a >= b)\n",
    ]


def test_every_change_is_a_program() -> None:
    source = (SOURCE / "offline/judge/contract.py").read_bytes()
    found = mutations(source)
    assert len(found) > 80
    for one in found:
        changed = one.apply(source)
        compile(changed, "mutated", "exec")
        assert changed != source


@pytest.mark.parametrize("file", DECIDING)
def test_deciding_code_and_its_tests_exist(file: str) -> None:
    assert (SOURCE / file).is_file()
    assert all((ROOT / test).is_file() for test in paths_of_tests(file))
