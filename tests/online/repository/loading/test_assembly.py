from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import models
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.assembly import Assembler, RequestLimits
from penstock.online.repository.loading.loader import load
from penstock.online.repository.resolved_version import LoadOptions, find
from penstock.online.repository.served import ServedModels
from penstock.online.scheduler.ensemble import Models
from penstock.online.scheduler.rate_limiter import RateLimiter, ResourceGate
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer


def identity(root: Path, config: str, limiter: RateLimiter | None = None) -> str:
    folder = root / "m" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(models.linear().data)
    (root / "m" / "config.pbtxt").write_text(config)
    loaded = load(find(Layout((root,), "", False, {}).define("m"), "1", LoadOptions()))

    async def assemble() -> str:
        nobody = Models(ServedModels().find, lambda *_: None)
        return Assembler(RequestLimits(), Tracer(TraceSettings()), None, nobody, limiter).assemble(loaded).identity

    try:
        return asyncio.run(assemble())
    finally:
        loaded.drop()


def test_a_model_that_answers_in_other_shapes_is_another(tmp_path: Path) -> None:
    text = 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ DIMS ] reshape { shape: [ 3 ] } }'
    plain = identity(tmp_path, text.replace("DIMS", "3, 1"))
    assert identity(tmp_path, text.replace("DIMS", "3, 1") + ' metric_tags { key: "a" value: "b" }') == plain
    assert identity(tmp_path, text.replace("DIMS", "1, 3")) != plain


class RecordingLimiter(RateLimiter):
    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[tuple[str, dict[str, int], int]] = []

    def gate(self, name: str, needs: Mapping[str, int], priority: int = 1) -> ResourceGate | None:
        self.asked.append((name, dict(needs), priority))
        return super().gate(name, needs, priority)


GROUPS = """
instance_group [
  { count: 2 rate_limiter { resources [ { name: "r" count: 3 }, { name: "s" count: 1 } ] priority: 2 } },
  { count: 1 }
]
"""


def test_each_instance_has_the_gate_of_its_group(tmp_path: Path) -> None:
    limiter = RecordingLimiter()
    assert identity(tmp_path, GROUPS, limiter)
    assert limiter.asked == [("m", {"r": 3, "s": 1}, 2)] * 2 + [("m", {}, 0)]
