"""Each operator's rule: the channels that can be cut, are joined, or are frozen, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from networks import Network
from penstock.offline.compress.pruning.structured.coupling import ChannelGroup
from penstock.offline.compress.pruning.structured.cut import Structure

Build = Callable[[Network, str], str]


def groups(build: Build, exact: bool = True) -> list[ChannelGroup]:
    """The groups of x (2, 3, 8, 8), a Conv to 4 channels called ``first``, ``build``, a Conv to 5 channels."""
    n = Network()
    first = n.op("Conv", "x", n.normal(4, 3, 1, 1), name="first")
    middle = build(n, first)
    n.op("Conv", middle, n.normal(5, 4, 1, 1), name="y")
    artifact = n.artifact({"x": [2, 3, 8, 8]}, {"y": [2, 5, "h", "w"]})
    return list(Structure(artifact, exact=exact).groups)


FREE: dict[str, Build] = {
    "activation": lambda n, x: n.op("Relu", x),
    "bias": lambda n, x: n.op("Add", x, n.normal(1, 4, 1, 1)),
    "scalar": lambda n, x: n.op("Mul", n.weight(np.float32(2)), x),
    "batch norm": lambda n, x: n.op("BatchNormalization", x, *(n.weight(np.ones(4, np.float32)) for _ in range(4))),
    "instance norm": lambda n, x: n.op("InstanceNormalization", x, n.normal(4), n.normal(4)),
    "max pool": lambda n, x: n.op("MaxPool", x, kernel_shape=[2, 2]),
    "global pool": lambda n, x: n.op("GlobalAveragePool", x),
    "spatial mean": lambda n, x: n.op("ReduceMean", x, axes=[2, 3]),
    "spatial softmax": lambda n, x: n.op("Softmax", x, axis=3),
    "spatial pad": lambda n, x: n.op("Pad", x, n.weight(np.array([0, 0, 1, 1, 0, 0, 1, 1]))),
    "spatial resize": lambda n, x: n.op("Resize", x, "", n.weight(np.float32([1, 1, 2, 2]))),
    "depthwise": lambda n, x: n.op("Conv", x, n.normal(4, 1, 3, 3), pads=[1] * 4, group=4),
}
FROZEN: dict[str, tuple[Build, str]] = {
    "softmax": (lambda n, x: n.op("Softmax", x, axis=1), "Softmax 'softmax1' runs over them"),
    "pad": (lambda n, x: n.op("Pad", x, n.weight(np.array([0, 1, 0, 0, 0, -1, 0, 0]))), "Pad 'pad1' pads them"),
    "mean": (lambda n, x: n.op("Add", x, n.op("ReduceMean", x, axes=[1])), "may broadcast them|runs over them"),
}


@pytest.mark.parametrize("name", FREE)
def test_channels_before_it_can_be_cut(name: str) -> None:
    first, *others = groups(FREE[name])
    assert (first.name, first.units, first.frozen) == ("first", 4, ())
    assert [group.cuttable for group in others] == [False] * len(others)  # the output's


@pytest.mark.parametrize("name", FROZEN)
def test_channels_before_it_stay(name: str) -> None:
    build, reason = FROZEN[name]
    first, *_ = groups(build)
    assert not first.cuttable
    assert any(part in first.reason for part in reason.split("|"))


def test_what_meets_in_an_addition_is_cut_together() -> None:
    first, _ = groups(lambda n, x: n.op("Add", x, n.op("Conv", x, n.normal(4, 4, 1, 1), name="second")))
    assert first.layers == ("first", "second")


def test_two_groups_of_a_convolution_are_two_units() -> None:
    first, *_ = groups(lambda n, x: n.op("Conv", x, n.normal(4, 2, 1, 1), group=2))
    assert (first.units, first.unit_size) == (2, 2)


def test_a_norm_over_channels_blurs_them() -> None:
    def norm(n: Network, x: str) -> str:
        last = n.op("Transpose", x, perm=[0, 2, 3, 1])
        return n.op("Transpose", n.op("LayerNormalization", last, n.normal(4), n.normal(4)), perm=[0, 3, 1, 2])

    exact, *_ = groups(norm)
    rough, *_ = groups(norm, exact=False)
    assert (exact.cuttable, rough.cuttable) == (False, True)
    assert "normalises over them" in exact.reason


def test_a_transposed_input_of_gemm_is_not_understood() -> None:
    n = Network()
    hidden = n.op("MatMul", "x", n.normal(3, 4), name="first")
    n.op("Gemm", hidden, n.normal(2, 5), transA=1, name="y")
    first, *_ = Structure(n.artifact({"x": [2, 3]}, {"y": [4, 5]})).groups
    assert not first.cuttable
    assert "transposes its input" in first.reason


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_makes_one_axis_of_its_weights_and_reads_the_other(transposed: int) -> None:
    n = Network()
    shapes = [(6, 3), (2, 6)] if transposed else [(3, 6), (6, 2)]
    hidden = n.op("Gemm", "x", n.normal(*shapes[0]), n.normal(6), transB=transposed, name="first")
    n.op("Gemm", hidden, n.normal(*shapes[1]), transB=transposed, name="y")
    structure = Structure(n.artifact({"x": ["N", 3]}, {"y": ["N", 2]}))
    first, output = structure.groups
    assert (first.units, first.cuttable, output.cuttable) == (6, True, False)
    roles = {(slot.value.name, slot.axis, slot.role) for slot in structure.slots if len(slot.labels) == 6}
    assert roles == {("w0", 1 - transposed, "makes"), ("w1", 0, "goes along"), ("w2", transposed, "reads")}
