"""What is to be loaded for one version of a model: found, read and verified, with nothing loaded yet.

A version is a bundle, served as its tuner found best, or a model file, served by the engine that its format or its configuration
asks for. Reading blocks and belongs on a thread, not on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from penstock.artifact import Artifact, local_path
from penstock.bundle.open import Bundle, is_bundle, open_model, peek
from penstock.config import did_you_mean
from penstock.engines.registry import is_available
from penstock.errors import AlreadyExists, InvalidArgument, InvalidConfig, InvalidModel, NotFound
from penstock.online.instances.process_halt import Halt
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.model_source import BY_HAND, ModelSource
from penstock.online.repository.triton.auto_complete import declared_tensors
from penstock.online.repository.triton.backend import (
    PYTHON,
    Backend,
    backend_of,
    engine_options,
    engine_traits,
    usual_engine,
)
from penstock.online.repository.triton.check import parse
from penstock.resources import core_ids, cpu_quota, machine_facts, plan_cores

_log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH = 64

Isolation = Literal["thread", "process"]
"""Where the instances of a model run."""


class LoadOptions(msgspec.Struct, frozen=True):
    """How the server loads models; None leaves the choice to the configuration, the bundle or the machine."""

    max_batch: int | None = None
    instances: int | None = None
    isolation: Isolation = "thread"
    model_timeout_s: float = 0.0
    """Longest time for one call in a child process; 0: no limit."""
    processes: int = 1
    """How many processes of this server share the cores."""
    warmup_folder: str = ""
    """Recorded requests, in a folder for each model; empty: none."""
    halt: Halt = msgspec.field(default_factory=Halt)
    """Ends processes that are still loading."""


_NONE = LoadOptions()
_BY_HAND = Backend("", "", "", "")


class ResolvedVersion(msgspec.Struct, frozen=True):
    """A model version whose files are found and verified, and how it will be served. Nothing is loaded yet."""

    source: ModelSource
    version: str
    artifact: Artifact
    engine: str
    options: dict[str, Any]
    """Of the engine."""
    max_batch: int
    instances: int
    cores: tuple[tuple[int, ...], ...] = ()
    """For each instance the ids of the cores that it is pinned to; empty: not pinned."""
    backend: Backend = _BY_HAND
    """Triton's names for the engine; empty for a target on the command line."""
    load_options: LoadOptions = msgspec.field(default_factory=LoadOptions)
    """With the model's own ``isolation``."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def given(self) -> ModelConfig:
        return self.source.given

    @property
    def is_apart(self) -> bool:
        """Whether its instances run in child processes."""
        return self.load_options.isolation == "process" or self.engine == PYTHON

    @property
    def platform(self) -> str:
        """The protocol's name for what runs it."""
        return self.backend.platform or engine_traits(self.engine).platform or self.engine

    @property
    def has_own_threads(self) -> bool:
        """Whether the loaded model keeps threads."""
        keeps_threads = self.is_apart or engine_traits(self.engine).keeps_threads or "gpu" in self.options
        return keeps_threads or self.options.get("threads") != 1


def define(
    targets: Iterable[str | Path], settings: Mapping[str, Mapping[str, Any]] = {}, folder: Path = Path()
) -> list[ModelSource]:
    """The models of ``targets``, the bundles and model files on the command line; ``settings`` hold fields of their configurations by
    name, and name files relative to ``folder``.

    Raises NotFound, InvalidArgument for a repository, AlreadyExists if two targets have one name, and InvalidConfig also for settings
    of a model that is none of them.
    """
    given = {name: parse(name, fields) for name, fields in settings.items()}
    found: dict[str, ModelSource] = {}
    for target in map(local_path, targets):
        if not target.exists():
            raise NotFound(f"no model or bundle '{target}'", "check the path")
        if repository := _repository_of(target):
            raise InvalidArgument(
                f"'{target}' is no model or bundle, but has folders of versions",
                f"serve the repository with --model-repository {repository}",
            )
        name, version = target.stem, BY_HAND
        if is_bundle(target):
            manifest = peek(target)
            name, version = manifest.name, manifest.version
        if name in found:
            raise AlreadyExists(f"two targets are called '{name}'", "rename one of the files")
        found[name] = ModelSource(name, folder, {version: target}, given.get(name, ModelConfig()))
    for name in given:
        if name not in found:
            raise InvalidConfig(
                f"settings were given for model '{name}', but no such model was passed on the command line",
                did_you_mean(name, found) if found else "configure the models of a repository in their config.pbtxt",
            )
    return list(found.values())


def _repository_of(target: Path) -> Path | None:
    """The repository that ``target`` is, or is a model of; None for anything else."""
    if is_bundle(target):
        return None
    return target if any(target.glob("*/[1-9]*/")) else target.parent if any(target.glob("[1-9]*/")) else None


def find(source: ModelSource, version: str, load_options: LoadOptions = _NONE) -> ResolvedVersion:
    """What is to be loaded for ``version``.

    Raises NotFound, InvalidModel, InvalidConfig, Unsupported, IntegrityError.
    """
    path, given, where = source.versions[version], source.given, source.written_in
    if given.sequence_batching is not None and load_options.processes > 1:
        raise InvalidConfig(
            f"model '{source.name}' has 'sequence_batching', and the requests of a sequence may come to any process",
            "serve it with one of 'processes'",
        )
    is_by_hand = path.name != version or is_bundle(path) or path.is_file()
    backend = _BY_HAND if is_by_hand else backend_of(given, source.name, _names(path), where)
    path /= backend.filename
    instances = given.instances or load_options.instances
    most = 1 if given.max_batch_size == 0 else given.max_batch_size
    own = msgspec.structs.replace(
        load_options,
        max_batch=most or load_options.max_batch,
        instances=instances,
        isolation=_isolation(source, load_options),
    )
    artifact = Artifact.from_file(path) if backend.engine else open_model(path)
    if isinstance(artifact, Bundle):
        return _of_bundle(source, version, own, artifact)
    engine = backend.engine or usual_engine(artifact.format)
    options: dict[str, Any] = {"threads": 0, **engine_traits(engine).shared_options}
    if engine_traits(engine).takes_signature:
        options["inputs"], options["outputs"] = declared_tensors(given)
    options |= engine_options(given, source.name, engine, where)
    return _planned(source, version, own, artifact, engine, options, DEFAULT_MAX_BATCH, 1, backend)


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise InvalidModel(f"cannot read the folder of version '{folder.name}': {error.strerror}") from None


def _isolation(source: ModelSource, load_options: LoadOptions) -> Isolation:
    if "isolation" not in source.given.parameters:
        return load_options.isolation
    word = source.given.parameters["isolation"]
    if word not in get_args(Isolation):
        raise InvalidConfig(
            f"model '{source.name}': 'parameters[isolation]' cannot be '{word[:40]}'", "'thread' or 'process'"
        )
    return "process" if word == "process" else "thread"


def _of_bundle(source: ModelSource, version: str, load_options: LoadOptions, bundle: Bundle) -> ResolvedVersion:
    machine = machine_facts()
    variant, serving = bundle.choose(machine, is_available), bundle.manifest.serving
    if variant.name != serving.variant:
        _log.warning(
            "bundle '%s' is served as '%s': '%s' does not run here", bundle.name, variant.name, serving.variant
        )
    if differences := bundle.differences(machine):
        _log.warning(
            "bundle '%s' was tuned on another machine, so its profile may not hold: %s",
            bundle.name,
            "; ".join(differences),
        )
    artifact = bundle.artifact(variant)
    # Of what the configuration asks for, only the refusal of devices is for bundles.
    options = {**variant.options, **engine_options(source.given, source.name, "", source.written_in)}
    instances = min(serving.instances, machine.cores)
    return _planned(source, version, load_options, artifact, variant.engine, options, serving.max_batch, instances)


def _planned(  # noqa: PLR0913, PLR0917 - what was found, and the defaults
    source: ModelSource,
    version: str,
    load_options: LoadOptions,
    artifact: Artifact,
    engine: str,
    options: dict[str, Any],
    max_batch: int,
    instances: int,
    backend: Backend = _BY_HAND,
) -> ResolvedVersion:
    """``max_batch`` and ``instances`` are defaults; threads are limited to the available cores."""
    count = load_options.instances or instances
    plan = plan_cores(count * load_options.processes, options.get("threads", 0), core_ids(), cpu_quota())
    if "threads" in options:
        options["threads"] = plan.threads
    return ResolvedVersion(
        source=source,
        version=version,
        artifact=artifact,
        engine=engine,
        options=options,
        max_batch=load_options.max_batch or max_batch,
        instances=count,
        # All processes of a server load alike, so none knows which of the shares are its own.
        cores=plan.cores if load_options.processes == 1 else (),
        backend=backend,
        load_options=load_options,
    )
