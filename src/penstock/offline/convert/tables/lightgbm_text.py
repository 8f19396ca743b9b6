"""The text of a LightGBM model: a header, and the arrays of each tree. LightGBM ends the process if an array is damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_INTEGER, _NUMBER = r"-?\d{1,18}", r"-?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)"
_INNER = {
    **dict.fromkeys(("split_feature", "decision_type", "left_child", "right_child", "internal_count"), _INTEGER),
    **dict.fromkeys(("split_gain", "threshold", "internal_value", "internal_weight"), _NUMBER),
}
_LEAVES = {"leaf_value": _NUMBER, "leaf_weight": _NUMBER, "leaf_count": _INTEGER}
_NEEDED = frozenset({"split_feature", "threshold", "decision_type", "left_child", "right_child", "leaf_value"})
_SINGLE = {"num_leaves": _INTEGER, "num_cat": _INTEGER, "shrinkage": _NUMBER, "is_linear": "[01]"}
_HEADER = ("num_class", "num_tree_per_iteration", "label_index", "max_feature_idx")
_MOST_LEAVES = 1 << 24
_PARAMETER = re.compile(r"\[\w+: .*\]", re.ASCII)
Part = dict[str, str]


def parts(text: str) -> list[Part]:
    """The header, and each tree, by key."""
    found = text.partition("\nend of trees")[0].split("\nTree=")
    return [dict(line.partition("=")[::2] for line in part.splitlines()) for part in found]


def check(text: str) -> None:
    """Raise ValueError if the header or a tree is damaged."""
    header, *trees = parts(text)
    if not text.startswith("tree\n") or "\nend of trees" not in text:
        raise ValueError("it has no header, or is truncated")
    _, some, rest = text.partition("\nparameters:\n")
    lines, end, _ = rest.partition("\nend of parameters")
    for line in lines.split("\n") if some else ():
        if line and not (end and _PARAMETER.fullmatch(line)):
            raise ValueError(f"the parameters have the line {line!r}")
    for key in _HEADER:
        if not re.fullmatch(r"\d{1,9}", header.get(key, "")):
            raise ValueError(f"the header has {key}={header.get(key, '')!r}")
    features, targets = int(header["max_feature_idx"]) + 1, int(header["num_tree_per_iteration"])
    if targets < 1 or len(trees) % targets or int(header["num_class"]) < 1:
        raise ValueError(f"it has {len(trees)} trees for {targets} outputs")
    for key in ("feature_names", "feature_infos"):
        if len(header.get(key, "").split()) != features:
            raise ValueError(f"the header has no {features} {key}")
    sizes = [len(one) + len("Tree=") + 1 for one in text.partition("\nend of trees")[0].split("\nTree=")[1:]]
    if "tree_sizes" in header and header["tree_sizes"].split() != [str(size) for size in sizes]:
        raise ValueError("the sizes of the trees differ from those in the header")
    for number, tree in enumerate(trees):
        for problem in _problems(tree):
            raise ValueError(f"tree {number} is damaged: {problem}")


def _problems(tree: Mapping[str, str]) -> Iterator[str]:
    for key, kind in _SINGLE.items():
        if not re.fullmatch(kind, tree.get(key, "0" if key == "is_linear" else "")):
            yield f"{key}={tree.get(key, '')!r}"
            return
    leaves = int(tree.get("num_leaves", "0"))
    if not 1 <= leaves <= _MOST_LEAVES:
        yield f"it has {leaves} leaves"
    categories = int(tree.get("num_cat", "0"))
    counts = {**dict.fromkeys(_INNER, leaves - 1), **dict.fromkeys(_LEAVES, leaves)}
    kinds = _INNER | _LEAVES
    if categories:
        counts["cat_boundaries"], kinds["cat_boundaries"] = categories + 1, r"\d{1,9}"
        bounds = tree.get("cat_boundaries", "").split()
        counts["cat_threshold"], kinds["cat_threshold"] = int(bounds[-1]) if bounds else 0, r"\d{1,10}"
    needed = {*_NEEDED, "cat_boundaries", "cat_threshold"} if categories else _NEEDED if leaves > 1 else {"leaf_value"}
    for key, count in counts.items():
        values = tree.get(key, "").split()
        is_left_out = not values and (key not in needed or not count)
        is_single = leaves == 1 and key in _LEAVES and key != "leaf_value"
        if len(values) != count and not is_left_out and not is_single:
            yield f"it has {len(values)} values of {key} instead of {count}"
        for value in values:
            if not re.fullmatch(kinds[key], value):
                yield f"{key} has the value {value!r}"
