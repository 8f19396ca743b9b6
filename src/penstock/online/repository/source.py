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

from penstock.artifact import SUFFIXES, Artifact, local_path
from penstock.bundle.open import is_bundle, open_bundle, peek_name
from penstock.config import did_you_mean
from penstock.engines.registry import engines_for, is_available, traits
from penstock.errors import AlreadyExists, InvalidArgument, InvalidConfig, InvalidModel, NotFound
from penstock.online.instances.process_halt import Halt
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.definition import BY_HAND, Definition
from penstock.online.repository.loading.recorded_requests import folder_of
from penstock.online.repository.triton.auto_complete import declared_tensors
from penstock.online.repository.triton.backend import Backend, backend_of, engine_options
from penstock.online.repository.triton.check import parse
from penstock.resources import core_ids, cpu_quota, machine_facts, plan_cores

_log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH = 64

Isolation = Literal["thread", "process"]
"""Where the instances of a model run."""


class Wishes(msgspec.Struct, frozen=True):
    """How models are to be served, as far as it is not left to their configuration, the bundle or the machine."""

    max_batch: int | None = None
    instances: int | None = None
    isolation: Isolation = "thread"
    model_timeout_s: float = 0.0
    """Longest that one call may take in a process of its own; 0 is for ever."""
    processes: int = 1
    """How many processes of this server share the cores."""
    warmup_folder: str = ""
    """Where recorded requests are, in a folder for each model; empty: nowhere."""
    halt: Halt = msgspec.field(default_factory=Halt)
    """Ends processes that are still loading."""


_NONE = Wishes()
_BY_HAND = Backend("", "", "", "")


class Source(msgspec.Struct, frozen=True):
    """A model version found and verified, and how to serve it; nothing is loaded yet."""

    name: str
    artifact: Artifact
    engine: str
    options: dict[str, Any]
    max_batch: int
    instances: int
    cores: tuple[tuple[int, ...], ...] = ()
    """For each instance the ids of the cores that are its own; empty if any are."""
    isolation: Isolation = "thread"
    model_timeout_s: float = 0.0
    """As in ``Wishes``."""
    version: str = BY_HAND
    given: ModelConfig = ModelConfig()
    """As in ``Definition``."""
    folder: Path = Path()
    """As in ``Definition``."""
    backend: Backend = _BY_HAND
    """What its configuration calls the engine; empty names for a target given by hand."""
    recorded: Path | None = None
    """Where its recorded requests are."""
    halt: Halt = msgspec.field(default_factory=Halt)
    """As in ``Wishes``."""

    @property
    def platform(self) -> str:
        """The protocol's name for what runs it."""
        return self.backend.platform or traits(self.engine).platform or self.engine

    @property
    def has_own_threads(self) -> bool:
        """Whether the loaded model keeps threads of its own."""
        is_apart = self.isolation == "process" or traits(self.engine).keeps_threads or "gpu" in self.options
        return is_apart or self.options.get("threads") != 1


def define(
    targets: Iterable[str | Path], settings: Mapping[str, Mapping[str, Any]] = {}, folder: Path = Path()
) -> list[Definition]:
    """The models that ``targets``, bundles and model files given by hand, are; ``settings`` hold fields of their configurations by
    name, and name files relative to ``folder``.

    Raises NotFound, InvalidArgument for a repository, AlreadyExists if two targets have one name, and InvalidConfig also for settings
    of a model that is none of them.
    """
    given = {name: parse(name, fields) for name, fields in settings.items()}
    found: dict[str, Definition] = {}
    for target in map(local_path, targets):
        if not target.exists():
            raise NotFound(f"no model or bundle '{target}'", "check the path")
        if repository := _repository_of(target):
            raise InvalidArgument(
                f"'{target}' is no model or bundle, but has folders of versions",
                f"serve the repository with --model-repository {repository}",
            )
        name = peek_name(target) if is_bundle(target) else target.stem
        if name in found:
            raise AlreadyExists(f"two targets are called '{name}'", "rename one of the files")
        found[name] = Definition(name, folder, {BY_HAND: target}, given.get(name, ModelConfig()))
    for name in given:
        if name not in found:
            raise InvalidConfig(
                f"settings for model '{name}', which is no target given by hand",
                did_you_mean(name, found) if found else "what a repository holds is configured by its config.pbtxt",
            )
    return list(found.values())


def _repository_of(target: Path) -> Path | None:
    """The repository that ``target`` is, or is a model of; None for anything else."""
    if is_bundle(target):
        return None
    return target if any(target.glob("*/[1-9]*/")) else target.parent if any(target.glob("[1-9]*/")) else None


def find(definition: Definition, version: str, wishes: Wishes = _NONE) -> Source:
    """What is to be loaded for ``version``.

    Raises NotFound, InvalidModel, InvalidConfig, Unsupported, IntegrityError.
    """
    path, given, where = definition.versions[version], definition.given, definition.written_in
    if given.sequence_batching is not None and wishes.processes > 1:
        raise InvalidConfig(
            f"model '{definition.name}' has 'sequence_batching', and the requests of a sequence may come to any process",
            "serve it with one of 'processes'",
        )
    is_by_hand = path.name != version or is_bundle(path) or path.is_file()
    backend = _BY_HAND if is_by_hand else backend_of(given, definition.name, _names(path), where)
    path /= backend.filename
    instances = given.instances or wishes.instances
    most = 1 if given.max_batch_size == 0 else given.max_batch_size
    own = msgspec.structs.replace(
        wishes, max_batch=most or wishes.max_batch, instances=instances, isolation=_isolation(definition, wishes)
    )
    if not backend.engine and (is_bundle(path) or path.suffix.lower() not in SUFFIXES):
        return _of_bundle(definition, version, own, path)
    artifact = Artifact.from_file(path)
    engine = backend.engine or engines_for(artifact.format)[0]
    options: dict[str, Any] = {"threads": 0, **traits(engine).shared_options}
    if traits(engine).takes_signature:
        options["inputs"], options["outputs"] = declared_tensors(given)
    options |= engine_options(given, definition.name, engine, where)
    return _planned(definition, version, own, artifact, engine, options, DEFAULT_MAX_BATCH, 1, backend)


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise InvalidModel(f"cannot read the folder of version '{folder.name}': {error.strerror}") from None


def _isolation(definition: Definition, wishes: Wishes) -> Isolation:
    if "isolation" not in definition.given.parameters:
        return wishes.isolation
    word = definition.given.parameters["isolation"]
    if word not in get_args(Isolation):
        raise InvalidConfig(
            f"model '{definition.name}': 'parameters[isolation]' cannot be '{word[:40]}'", "'thread' or 'process'"
        )
    return "process" if word == "process" else "thread"


def _of_bundle(definition: Definition, version: str, wishes: Wishes, path: Path) -> Source:
    bundle, machine = open_bundle(path), machine_facts()
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
    options = {**variant.options, **engine_options(definition.given, definition.name, "", definition.written_in)}
    instances = min(serving.instances, machine.cores)
    return _planned(definition, version, wishes, artifact, variant.engine, options, serving.max_batch, instances)


def _planned(  # noqa: PLR0913, PLR0917 - what was found, and what holds where nothing else is wished
    definition: Definition,
    version: str,
    wishes: Wishes,
    artifact: Artifact,
    engine: str,
    options: dict[str, Any],
    max_batch: int,
    instances: int,
    backend: Backend = _BY_HAND,
) -> Source:
    """``max_batch`` and ``instances`` hold where nothing else is wished; threads are cut down to the cores that there are."""
    count = wishes.instances or instances
    plan = plan_cores(count * wishes.processes, options.get("threads", 0), core_ids(), cpu_quota())
    if "threads" in options:
        options["threads"] = plan.threads
    return Source(
        name=definition.name,
        artifact=artifact,
        engine=engine,
        options=options,
        max_batch=wishes.max_batch or max_batch,
        instances=count,
        # All processes of a server load alike, so none knows which of the shares are its own.
        cores=plan.cores if wishes.processes == 1 else (),
        isolation=wishes.isolation,
        model_timeout_s=wishes.model_timeout_s,
        version=version,
        given=definition.given,
        folder=definition.folder,
        backend=backend,
        recorded=folder_of(wishes.warmup_folder, definition.name) if wishes.warmup_folder else None,
        halt=wishes.halt,
    )
