"""Schemes: the table by instruction set."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme, required_isa, symmetric
from penstock.resources import INTEGER_DOT_PRODUCT, MachineFacts
from penstock.tensor import DataType


@pytest.mark.parametrize(
    ("architecture", "isa", "activation", "reduce_range"),
    [
        ("x86_64", ("avx2", "avx512_vnni"), DataType.UINT8, False),
        ("x86_64", ("avx2", "avx_vnni"), DataType.UINT8, False),
        ("AMD64", ("amx_int8",), DataType.UINT8, False),
        ("x86_64", ("avx2", "avx512f"), DataType.UINT8, True),
        ("x86_64", (), DataType.UINT8, True),
        ("aarch64", ("asimddp",), DataType.INT8, False),
        ("arm64", ("i8mm",), DataType.INT8, False),
        ("aarch64", (), DataType.INT8, False),
        ("riscv64", (), DataType.UINT8, True),
    ],
)
def test_scheme_by_instruction_set(
    architecture: str, isa: tuple[str, ...], activation: DataType, reduce_range: bool
) -> None:
    machine = MachineFacts("cpu", architecture, isa, 1, 0, 1, "Linux", "3.11")
    scheme = integer_scheme(machine)
    assert (scheme.activation, scheme.weight) == (activation, DataType.INT8)
    assert scheme.reduce_range is reduce_range
    assert scheme.reason


def test_scale_and_zero_point_of_a_range() -> None:
    affine = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")
    scale, zero = affine.parameters(np.array([-1.0, 0.0, 0.0]), np.array([3.0, 2.55, 0.0]))
    np.testing.assert_allclose(scale, [4 / 255, 0.01, 1.0])
    assert zero.tolist() == [64, 0, 0]


def test_symmetric_activations_have_no_zero_point_unless_they_are_never_negative() -> None:
    scheme = symmetric(IntegerScheme(DataType.UINT8, DataType.INT8, True, "test"))
    scale, zero = scheme.parameters(np.array([-1.0, -4.0, 0.0, 0.0]), np.array([3.0, 1.0, 2.55, 0.0]))
    np.testing.assert_allclose(scale, [3 / 127, 4 / 127, 0.01, 1.0])
    assert zero.tolist() == [0, 0, -128, -128]
    assert scheme.activation_limits == (-128, 127)
    assert scheme.reduce_range


def test_limits_are_where_the_operator_clips() -> None:
    scheme = IntegerScheme(DataType.INT8, DataType.INT8, False, "test")
    scale, zero = scheme.parameters(np.array(-1.0), np.array(1.0))
    node = onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    x = np.float32([-9, -1, 0, 1, 9])
    (integers,) = ReferenceEvaluator(node).run(
        None, {"x": x, "scale": np.float32(scale), "zero": np.array(zero, np.int8)}
    )
    assert (integers[0], integers[2], integers[4]) == (-128, 0, 127)
    assert scheme.activation_limits == (integers.min(), integers.max())


def machine(architecture: str, *isa: str) -> MachineFacts:
    return MachineFacts("cpu", architecture, isa, 1, 0, 1, "Linux", "3.11")


def test_weights_of_8_bits_need_a_cpu_that_multiplies_them_exactly() -> None:
    vnni, older, arm = machine("x86_64", "avx2", "avx512_vnni"), machine("x86_64", "avx2"), machine("aarch64")
    assert required_isa(integer_scheme(vnni), vnni) == (INTEGER_DOT_PRODUCT,)
    assert required_isa(integer_scheme(older), vnni) == ()
    assert required_isa(integer_scheme(older), older) == ()
    assert required_isa(integer_scheme(arm), arm) == ()


def test_the_limits_of_each_type() -> None:
    schemes = [integer_scheme(one) for one in (machine("x86_64", "avx_vnni"), machine("x86_64"), machine("aarch64"))]
    assert [one.activation_limits for one in schemes] == [(0, 255), (0, 255), (-128, 127)]
    assert [one.weight_limit for one in schemes] == [127, 64, 127]


def test_pairs_of_products_do_not_saturate_in_16_bits() -> None:
    scheme = integer_scheme(machine("x86_64"))
    assert 2 * 255 * scheme.weight_limit < 2**15 <= 2 * 255 * (scheme.weight_limit + 1)


def test_a_reason_names_what_multiplies() -> None:
    assert "dot-product" in integer_scheme(machine("aarch64", "asimddp")).reason
    assert "NEON" in integer_scheme(machine("aarch64")).reason
