"""Resolves one version of a model: finds, reads and verifies its files, without loading the model.

A version is a bundle, served with its tuned settings, or a model file, served by the engine that its configuration or its format
selects. All functions here read files and block, so call them on a thread, not on the event loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from penstock.artifact import Artifact, format_of, local_path
from penstock.bundle.local import options_of
from penstock.bundle.open import Bundle, is_bundle, open_model, peek
from penstock.config import did_you_mean
from penstock.engines.registry import is_available
from penstock.errors import AlreadyExists, InvalidArgument, InvalidConfig, InvalidModel, NotFound
from penstock.online.instances.process_halt import Halt
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.layout import EXAMPLE
from penstock.online.repository.model_source import TARGET_VERSION, ModelSource
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
"""Where a model's instances run: on threads or in child processes."""


class LoadOptions(msgspec.Struct, frozen=True):
    """How the server loads models. If a setting is None, the configuration, the bundle or the machine determines its value."""

    max_batch: int | None = None
    instances: int | None = None
    isolation: Isolation = "thread"
    model_timeout_s: float = 0.0
    """Maximum seconds of one call in a child process; 0 means no limit."""
    processes: int = 1
    """Number of server processes that share the cores."""
    allow_python: bool = False
    """True if pipelines may run the Python code in their bundles."""
    warmup_folder: str = ""
    """Folder with recorded requests, in one subfolder per model; empty if requests are not recorded."""
    halt: Halt = msgspec.field(default_factory=Halt)
    """Ends the child processes of an abandoned load."""


_DEFAULTS = LoadOptions()
_NO_BACKEND = Backend("", "", "", "")


class ResolvedVersion(msgspec.Struct, frozen=True):
    """A model version with verified files and its serving settings. Nothing is loaded yet."""

    source: ModelSource
    version: str
    artifact: Artifact
    engine: str
    options: dict[str, Any]
    """Options of the engine."""
    max_batch: int
    instances: int
    cores: tuple[tuple[int, ...], ...] = ()
    """For each instance, the ids of the cores to which it is pinned; empty if instances are not pinned."""
    backend: Backend = _NO_BACKEND
    """The backend, with Triton's names for the engine. The names are empty for a model from the command line."""
    load_options: LoadOptions = msgspec.field(default_factory=LoadOptions)
    """The server's load options, with the ``isolation`` that this model configures."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def given(self) -> ModelConfig:
        return self.source.given

    @property
    def is_apart(self) -> bool:
        """True if the instances run in child processes."""
        return self.load_options.isolation == "process" or self.engine == PYTHON

    @property
    def platform(self) -> str:
        """The name of the engine and the format in the protocol, e.g. ``onnxruntime_onnx``."""
        return self.backend.platform or engine_traits(self.engine).platform or self.engine

    @property
    def has_own_threads(self) -> bool:
        """True if the loaded model has threads of its own."""
        keeps_threads = self.is_apart or engine_traits(self.engine).keeps_threads or "gpu" in self.options
        return keeps_threads or self.options.get("threads") != 1


def define(
    targets: Iterable[str | Path], settings: Mapping[str, Mapping[str, Any]] = {}, folder: Path = Path()
) -> list[ModelSource]:
    """The models that the command line names. ``targets`` are paths of bundles and model files.

    ``settings`` maps model names to configurations. File names in these configurations are relative to ``folder``. Raises NotFound
    if a target does not exist, InvalidArgument if a target is a repository, AlreadyExists if two targets have the same name, and
    InvalidConfig if settings are invalid or match no target.
    """
    given = {name: parse(name, fields) for name, fields in settings.items()}
    found: dict[str, ModelSource] = {}
    for target in map(local_path, targets):
        if not target.exists():
            raise NotFound(f"no model or bundle '{target}'", "check the path")
        if not is_bundle(target):
            _refuse_repository(target)
        name, version = target.stem, TARGET_VERSION
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


def _no_model(folder: Path) -> InvalidArgument:
    """The error about a folder that is neither a bundle nor a model nor a repository."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found = sorted(folder.iterdir())
    files = [file for file in found if format_of(file) is not None]
    reason = "contains neither a bundle nor a model" if found else "is empty"
    return InvalidArgument(f"the folder '{folder}' {reason}", f"name the model, '{files[0]}'" if files else EXAMPLE)


def _refuse_repository(target: Path) -> None:
    """Raise InvalidArgument if ``target`` is a repository, a model in one, or another folder without a model."""
    if any(target.glob("*/[1-9]*/")):
        repository = target
    elif any(target.glob("[1-9]*/")):
        repository = target.parent
    elif target.is_dir() and format_of(target) is None:
        raise _no_model(target)
    else:
        return
    raise InvalidArgument(
        f"'{target}' is not a model or bundle, but has version folders",
        f"serve the repository with --model-repository {repository}",
    )


def find(
    source: ModelSource, version: str, load_options: LoadOptions = _DEFAULTS, part: Bundle | None = None
) -> ResolvedVersion:
    """Resolve ``version`` of ``source``. ``part`` is the opened bundle if it is a part of a pipeline.

    Raises NotFound, InvalidModel, InvalidConfig, Unsupported, IntegrityError.
    """
    path, given, where = source.versions[version], source.given, source.written_in
    if given.sequence_batching is not None and load_options.processes > 1:
        raise InvalidConfig(
            f"model '{source.name}' has 'sequence_batching', but each request of a sequence may reach a different process",
            "serve it with 'processes' set to 1",
        )
    is_target = part is not None or path.name != version or is_bundle(path) or path.is_file()
    backend = _NO_BACKEND if is_target else backend_of(given, source.name, _names(path), where)
    path /= backend.filename
    max_batch, instances = DEFAULT_MAX_BATCH, 1
    model = part or (Artifact.from_file(path) if backend.engine else open_model(path))
    if isinstance(model, Bundle):
        artifact, engine, options, max_batch, instances = _of_bundle(source, model)
    else:
        artifact = model
        engine = backend.engine or usual_engine(artifact.format)
        options = {"threads": 0, **engine_traits(engine).shared_options}
        if engine_traits(engine).takes_signature:
            options["inputs"], options["outputs"] = declared_tensors(given)
        options |= engine_options(given, source.name, engine, where)
    instances = given.instances or load_options.instances or instances
    plan = plan_cores(instances * load_options.processes, options.get("threads", 0), core_ids(), cpu_quota())
    if "threads" in options:
        options["threads"] = plan.threads
    own_batch = 1 if given.max_batch_size == 0 else given.max_batch_size
    return ResolvedVersion(
        source=source,
        version=version,
        artifact=artifact,
        engine=engine,
        options=options,
        max_batch=own_batch or load_options.max_batch or max_batch,
        instances=instances,
        # All processes of a server load models with the same options, so a process does not know which cores to use.
        cores=plan.cores if load_options.processes == 1 else (),
        backend=backend,
        load_options=msgspec.structs.replace(load_options, isolation=_isolation(source, load_options)),
    )


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise InvalidModel(f"cannot read the folder of version '{folder.name}': {error.strerror}") from None


def _isolation(source: ModelSource, load_options: LoadOptions) -> Isolation:
    word = source.given.parameters.get("isolation", load_options.isolation)
    if word not in get_args(Isolation):
        raise InvalidConfig(
            f"model '{source.name}': 'parameters[isolation]' is '{word[:40]}'", "write 'thread' or 'process'"
        )
    return "process" if word == "process" else "thread"


def _of_bundle(source: ModelSource, bundle: Bundle) -> tuple[Artifact, str, dict[str, Any], int, int]:
    """The variant of ``bundle`` to serve: artifact, engine, options, maximum batch, and number of instances."""
    machine = machine_facts()
    variant, serving = bundle.choose(machine, is_available), bundle.manifest.serving
    if variant.name != serving.variant:
        _log.warning(
            "bundle '%s' is served as '%s': '%s' does not run here", bundle.name, variant.name, serving.variant
        )
    if differences := bundle.differences(machine):
        text = "bundle '%s' was tuned on another machine, so its measured profile may not be valid here: %s"
        _log.warning(text, bundle.name, "; ".join(differences))
    # For a bundle, ``engine_options`` returns no options. It only raises an error if the configuration names a missing device.
    options = options_of(variant) | engine_options(source.given, source.name, "", source.written_in)
    instances = min(serving.instances, machine.cores)
    return bundle.artifact(variant), variant.engine, options, serving.max_batch, instances
