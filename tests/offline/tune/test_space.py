from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from bundles import MACHINE
from penstock.engines.registry import available_engines, get_engine
from penstock.offline.compress.versions.versions import Version
from penstock.offline.tune.space import Candidate, candidates, instances, originals, thread_counts

FP32, INT8 = Version(models.linear(seed=1)), Version(models.linear(seed=2), "int8", "mse", requires=("avx2",))
ENTROPY = msgspec.structs.replace(INT8, calibration="entropy")


def names(found: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in found]


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16))]
)
def test_thread_counts(cores: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores) == counts


@given(st.integers(1, 512))
def test_thread_counts_are_few_rising_and_include_the_ends(cores: int) -> None:
    counts = thread_counts(cores)
    assert counts[0] == 1
    assert counts[-1] == cores
    assert list(counts) == sorted(set(counts))
    assert len(counts) <= 11


def test_the_space_is_the_product() -> None:
    found = candidates([FP32, INT8, ENTROPY], ["onnxruntime", "openvino"], [1, 2], MACHINE)
    assert len(found) == 2 * 2 * 3
    assert len(set(names(found))) == len(found)
    assert names(found)[:3] == ["onnxruntime-fp32-t1", "onnxruntime-int8-mse-t1", "onnxruntime-int8-entropy-t1"]
    assert {candidate.requires for candidate in found if candidate.precision == "int8"} == {("avx2",)}
    assert {candidate.requires for candidate in found if candidate.precision == "fp32"} == {()}
    assert all(candidate.artifact is (FP32 if candidate.exact else INT8).artifact for candidate in found)


def test_a_version_is_tried_only_on_the_engines_where_it_can_pay_off() -> None:
    narrow = msgspec.structs.replace(ENTROPY, engines=("onnxruntime",))
    found = candidates([FP32, INT8, narrow], ["onnxruntime", "openvino"], [1], MACHINE)
    assert [one.engine for one in found if one.calibration == "entropy"] == ["onnxruntime"]
    assert len(found) == 2 * 2 + 1


def test_without_int8_models_there_is_only_fp32() -> None:
    assert names(candidates([FP32], ["onnxruntime"], [1], MACHINE)) == ["onnxruntime-fp32-t1"]


@pytest.mark.parametrize(("isa", "offered"), [("avx512_bf16", True), ("amx_bf16", True), ("avx2", False)])
def test_bf16_only_where_the_cpu_computes_in_it(isa: str, offered: bool) -> None:
    machine = msgspec.structs.replace(MACHINE, isa=(isa,))
    found = candidates([FP32], ["onnxruntime", "openvino"], [1], machine)
    bf16 = [candidate for candidate in found if candidate.precision == "bf16"]
    assert [candidate.engine for candidate in bf16] == (["openvino"] if offered else [])
    assert all(candidate.requires == (isa,) and not candidate.exact for candidate in bf16)


def test_openvino_keeps_to_the_precision_that_it_is_named_after() -> None:
    machine = msgspec.structs.replace(MACHINE, isa=("amx_bf16",))
    found = candidates([FP32, INT8], ["openvino"], [1], machine)
    assert {candidate.precision: candidate.options["precision"] for candidate in found} == {
        "fp32": "f32",
        "bf16": "bf16",
        "int8": "f32",
    }


def test_engines_take_the_options() -> None:
    for candidate in candidates([FP32, INT8], available_engines(), [1, 2], MACHINE):
        assert get_engine(candidate.engine).validate(candidate.artifact, candidate.options) == []


def test_threads_do_not_change_the_numerics() -> None:
    found = candidates([FP32, INT8], ["onnxruntime"], [1, 2], MACHINE)
    assert len({candidate.numerics for candidate in found}) == 2


def test_the_baseline_is_the_model_untouched() -> None:
    _, base = originals(FP32.artifact, [1, 2])
    assert (base.name, base.engine, base.options) == ("original-t2", "onnxruntime", {"threads": 2})
    assert base.artifact is FP32.artifact
    assert base.exact


def test_a_compressed_version_is_not_exact_whatever_its_precision() -> None:
    narrow = Version(models.linear(seed=3), compression="narrow", stored_bytes=7)
    coded = msgspec.structs.replace(narrow, precision="int8", calibration="mse")
    found = candidates([FP32, narrow, coded], ["onnxruntime"], [1], MACHINE)
    assert names(found)[1:] == ["onnxruntime-narrow-fp32-t1", "onnxruntime-narrow-int8-mse-t1"]
    assert [candidate.exact for candidate in found] == [True, False, False]
    assert [candidate.disk_bytes for candidate in found] == [FP32.artifact.size_bytes, 7, 7]


@pytest.mark.parametrize(
    ("cores", "threads", "ms", "copies"), [(8, 2, 5.0, 4), (8, 3, 5.0, 2), (2, 4, 5.0, 1), (8, 1, 0.2, 1)]
)
def test_instances(cores: int, threads: int, ms: float, copies: int) -> None:
    assert instances(cores, threads, ms) == copies
