"""Schemes: the table by instruction set."""

from __future__ import annotations

import pytest

from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.resources import MachineFacts
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
    assert not scheme.symmetric
    assert scheme.reason
