"""A repository on the disk with a manager of it: real files, threads and schedulers, and models that are fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from handles import make_handle
from penstock.artifact import Artifact, Format
from penstock.errors import InvalidConfig, InvalidModel, Unavailable
from penstock.online.instances.process_halt import LoadingProcess
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.handle import Handle
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.loader import FilesChanged, LoadedVersion
from penstock.online.repository.manager import Manager
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.resolved_version import LoadOptions, ResolvedVersion
from penstock.online.repository.served import ServedModels
from penstock.request import InferRequest, InferResponse
from penstock.tensor import Array
from penstock.testing import DOUBLER, FakeModel, double

PATIENCE_S = 20
_STEP = 'step {{ model_name: "{}" model_version: -1 input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }}'


class FakeLoads:
    """Loads and assembles fakes: a version whose file says ``broken`` fails, and one whose gate is shut waits for it.

    ``processes`` are the child processes that the versions load in.
    """

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self.models: list[FakeModel] = []
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.processes: dict[str, LoadingProcess] = {}
        self.at_once = self.most_at_once = 0
        self.while_loading: Callable[[], object] = lambda: None
        self.forward: Callable[[Mapping[str, Array]], dict[str, Array]] = double
        self.kind, self.signature = FakeModel, DOUBLER
        self._lock = threading.Lock()

    def load(self, layout: Layout, source: ModelSource, version: str, load_options: LoadOptions) -> LoadedVersion:
        which = f"{source.name}/{version}"
        if process := self.processes.get(which):
            load_options.halt.hold(process)
        with self._lock:
            self.begun.append(which)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if gate := self.gates.get(which):
                assert gate.wait(PATIENCE_S)
            self.while_loading()
            text = (source.versions[version] / "model.onnx").read_text()
            if "broken" in text:
                raise InvalidModel(f"the file says {text}")
            if layout.fingerprint(source.name) != source.fingerprint:
                raise FilesChanged("the files are being written")
            model = self.kind(self.signature, self.forward)
            self.models.append(model)
        finally:
            with self._lock:
                self.at_once -= 1
        artifact = Artifact(b"x", Format.ONNX, text)
        resolved = ResolvedVersion(source, version, artifact, "fake", {}, 8, 1)
        return LoadedVersion(resolved, (model,), ModelConfig())

    def assemble(self, loaded: LoadedVersion) -> Handle:
        (model,) = loaded.models
        assert isinstance(model, FakeModel)
        if "contradicts" in loaded.resolved.artifact.digest:
            raise InvalidConfig("the configuration contradicts the model")
        return make_handle(
            model, loaded.resolved.name, loaded.resolved.version, identity=loaded.resolved.artifact.digest
        )

    def assemble_ensemble(self, source: ModelSource, version: str) -> Handle:
        for part in source.parts:
            if not self._served.versions(part):
                raise Unavailable(f"it needs models that are not served: '{part}'")
        handle: Handle = make_handle(FakeModel(), source.name, version)
        return handle

    @property
    def alive(self) -> int:
        return sum(model.loaded for model in self.models)


class Repository:
    """A folder of models, and a manager of them."""

    def __init__(
        self, root: Path, *, threads: int = 2, is_explicit: bool = False, takes_files: bool = True, **settings: Any
    ) -> None:
        self.root, self.served = root, ServedModels()
        self.loads = FakeLoads(self.served)
        self.layout = Layout((root,))
        self.manager = Manager(
            self.served,
            self.loads,
            self.layout,
            LoadOptions(),
            load=self.loads.load,
            is_explicit=is_explicit,
            takes_files=takes_files,
            **settings,
        )  # type: ignore[arg-type]
        self._threads = threads

    async def __aenter__(self) -> Self:
        await self.manager.start({}, self._threads, 1)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.manager.close(PATIENCE_S)
        await self.manager.unload_all()
        assert self.loads.alive == 0, "nothing stays in memory"

    def write(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def write_ensemble(self, name: str, *parts: str) -> None:
        tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
        steps = " ".join(map(_STEP.format, parts))
        self.write(f"{name}/config.pbtxt", f'platform: "ensemble" {tensors} ensemble_scheduling {{ {steps} }}')
        (self.root / name / "1").mkdir(exist_ok=True)

    async def states(self, name: str) -> dict[str, tuple[str, str]]:
        rows = [row for row in await self.manager.index() if row["name"] == name]
        return {row.get("version", ""): (row.get("state", ""), row.get("reason", "")) for row in rows}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Return when everything that is no longer served is out of memory."""
        await self.until(lambda: self.loads.alive == sum(len(self.served.versions(one)) for one in self.served.names()))
        while "UNLOADING" in {row.get("state") for row in await self.manager.index()}:
            await asyncio.sleep(0.001)

    async def ask(self, name: str, version: str = "") -> InferResponse:
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = InferRequest(name, {"x": np.ones((1, 2), np.float32)})
        self.served.find(name, version).scheduler.submit(request, 1, None, outcome.set_result)
        answer = await outcome
        assert isinstance(answer, InferResponse), answer
        return answer


Story = Callable[[Repository], Coroutine[Any, Any, None]]


def run_story(root: Path, story: Story) -> None:
    """Have ``story`` told of a repository at ``root``; at its end nothing may be left in memory."""

    async def main() -> None:
        async with Repository(root) as repository:
            await story(repository)

    asyncio.run(main())
