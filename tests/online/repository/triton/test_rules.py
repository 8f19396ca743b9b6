"""Rules without an entry among the broken configurations: the devices on which a model's instances run."""

from __future__ import annotations

import pytest

from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import InvalidConfig
from penstock.online.repository.triton.backend import engine_options
from penstock.online.repository.triton.rules import gpu_of
from penstock.online.repository.triton.schema import typed
from penstock.online.repository.triton.text import parse_text

GPU = "instance_group { kind: KIND_GPU }"


@pytest.mark.parametrize(
    ("text", "gpus", "wanted"),
    [
        ("", 2, None),
        ("instance_group { count: 2 }", 2, None),
        ("instance_group [ { kind: KIND_CPU }, { kind: KIND_MODEL } ]", 0, None),
        (GPU, 1, 0),
        ("instance_group { kind: KIND_GPU gpus: 1 }", 2, 1),
        ("instance_group { gpus: 1 }", 2, 1),
        ("instance_group [ { kind: KIND_GPU }, { kind: KIND_GPU gpus: 0 } ]", 2, 0),
    ],
)
def test_the_device_follows_from_what_is_here(text: str, gpus: int, wanted: int | None) -> None:
    assert gpu_of(parse_text(text.encode(), "f").instance_group, gpus) == wanted


@pytest.mark.parametrize(
    ("text", "gpus", "reason"),
    [
        (GPU, 0, r"^'instance_group\[0\].kind' is KIND_GPU, but instances run on the CPU only"),
        ("instance_group [ {}, { gpus: 0 } ]", 0, r"^'instance_group\[1\].gpus' names devices"),
        ("instance_group { kind: KIND_GPU gpus: 2 }", 2, "names GPU 2, but there are 2 GPUs"),
        ("instance_group { kind: KIND_GPU gpus: -1 }", 2, "names GPU -1"),
        ("instance_group { kind: KIND_GPU gpus: [0, 1] }", 2, "several devices"),
        ("instance_group [ { kind: KIND_GPU }, { kind: KIND_CPU } ]", 1, "several devices"),
    ],
)
def test_what_is_not_here_is_refused(text: str, gpus: int, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        gpu_of(parse_text(text.encode(), "f").instance_group, gpus)


def test_the_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given = typed(parse_text(b"instance_group { kind: KIND_GPU gpus: 1 }", "f"))
    monkeypatch.setattr(OnnxRuntimeEngine, "gpus", lambda engine: 2)
    options = engine_options(given, "m", "onnxruntime")
    assert options == {"providers": ("CUDAExecutionProvider", "CPUExecutionProvider"), "gpu": 1}
    for engine in ("", "python"):
        with pytest.raises(
            InvalidConfig, match=r"^m/config.pbtxt: model 'm': 'instance_group\[0\].gpus' names devices"
        ):
            engine_options(given, "m", engine, "m/config.pbtxt")


def test_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("penstock.engines.torch").TorchEngine
    monkeypatch.setattr(engine, "gpus", lambda engine: 2)
    given = typed(parse_text(b"instance_group { kind: KIND_GPU gpus: 1 }", "f"))
    assert engine_options(given, "m", "torch") == {"device": "cuda:1"}
