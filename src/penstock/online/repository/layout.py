"""Finds models in repositories with Triton's layout (``<model>/config.pbtxt`` and ``<model>/<version>/…``), and among the bundles
and files named on the command line (targets).

A model's fingerprint changes whenever one of its files changes. It is computed without reading the files. All functions here
block, so call them on a thread, not on the event loop.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.artifact import local_path
from penstock.bundle import manifest
from penstock.bundle.open import is_bundle, peek
from penstock.errors import AlreadyExists, InvalidArgument, InvalidModel, NotFound, PenstockError, quoted
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override
from penstock.online.repository.triton.check import check
from penstock.online.repository.triton.schema import typed, with_parts
from penstock.online.repository.triton.text import FILE, config_path, parse_json, read_config, shown_path
from penstock.storage.atomic import PARTIAL

_log = logging.getLogger(__name__)

_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_MAX_VERSION = (1 << 63) - 1
EXAMPLE = "a repository has one folder per model, e.g. models/digits/1/model.onnx; see `penstock help repository`"
_MAX_SHOWN = 24
_MAX_FILES = 10_000
_MAX_DEPTH = 16
_CONFIGS = "configs"


class Layout(msgspec.Struct, frozen=True):
    """The repositories and command-line targets of a server."""

    roots: tuple[Path, ...] = ()
    """The repositories."""
    config_name: str = ""
    """If set, ``configs/<config_name>.pbtxt`` takes precedence over ``config.pbtxt``."""
    namespacing: bool = False
    """If true, models are served as ``<repository>/<name>``. If false, a model is rejected if two repositories contain its name."""
    targets: Mapping[str, ModelSource] = {}
    """The models named on the command line, by name."""

    def models(self) -> dict[str, Path | PenstockError]:
        """The folder of every model by name, or the error if its name is ambiguous. Raises NotFound for a missing repository."""
        found: dict[str, list[Path]] = {name: [next(iter(one.versions.values()))] for name, one in self.targets.items()}
        for root in self.roots:
            for entry in _entries(root):
                if not entry.name.startswith(".") and _is_folder(entry):
                    found.setdefault(entry.name, []).append(Path(entry.path))
        models: dict[str, Path | PenstockError] = {}
        for name, folders in found.items():
            if len(folders) == 1:
                models[_shown(name)] = _refusal(name) or folders[0]
            elif self.namespacing and name not in self.targets:
                models |= {f"{self.namespace(folder.parent)}/{name}": folder for folder in folders}
            else:
                models[_shown(name)] = AlreadyExists(
                    f"model '{_shown(name)}' is not unique across all model repositories",
                    "rename one of them" if name in self.targets else "rename one of them, or use 'model_namespacing'",
                )
        return models

    def _find(self, name: str) -> Path | PenstockError | None:
        """The same as ``models().get(name)``, but avoids listing the other models where possible."""
        folders = [root / name for root in self.roots if not self.namespacing and _refusal(name) is None]
        present = [folder for folder in folders if folder.is_dir()]
        return present[0] if len(present) == 1 and name not in self.targets else self.models().get(name)

    def namespace(self, root: Path) -> str:
        """The namespace of repository ``root``: its folder name, plus a number if several repositories have the same folder name."""
        alike = [other for other in self.roots if other.name == root.name]
        return root.name if len(alike) == 1 else f"{root.name}-{alike.index(root) + 1}"

    def scan(self) -> dict[str, str]:
        """The fingerprint of every model by name; for a broken model, the error text. Raises NotFound for a missing repository."""
        return {name: _fingerprint(found) for name, found in self.models().items()}

    def fingerprint(self, name: str) -> str:
        """The current fingerprint of model ``name``; empty if there is no such model. Raises NotFound for a missing repository."""
        found = self._find(name)
        return _fingerprint(found) if found is not None else ""

    def define(self, name: str, override: Override | None = None) -> ModelSource:
        """Read the configuration and fingerprints of model ``name``. ``override`` replaces the configuration and possibly the files.

        Raises NotFound if the model does not exist. Also raises InvalidConfig, InvalidModel and AlreadyExists.
        """
        found = self._find(name)
        if isinstance(found, PenstockError):
            raise found
        if found is None and not (override and override.folder):
            raise absent(name, self.models())
        if name in self.targets:
            return self._target(name, override)
        folder = Path(override.folder) if override and override.folder else found
        assert folder is not None
        own = name.rpartition("/")[2]
        if override:
            message, where = parse_json(own, override.config), ""
        else:
            where = shown_path(folder, config_path(folder, self.config_name))
            message = read_config(folder, self.config_name)
        for finding in check(message, own, where):
            _log.warning("model '%s': %s", name, finding.message)
        given = typed(message)
        lines = list(_files(folder))
        fingerprints = _by_version(folder, lines)
        return ModelSource(
            name=name,
            folder=folder,
            versions={version: folder / version for version in fingerprints if version},
            given=self._resolved(given, found) if self.namespacing else given,
            written_in=where if given.wire else "",
            fingerprints=fingerprints,
            fingerprint=_digest(lines) if folder == found else self.fingerprint(name),
            no_versions=_no_versions(folder),
        )

    def _target(self, name: str, override: Override | None) -> ModelSource:
        if override and override.folder:
            raise InvalidArgument(
                f"the files of model {quoted(name)} cannot be replaced, because it was passed on the command line"
            )
        known = self.targets[name]
        ((version, target),) = known.versions.items()
        if is_bundle(target):
            version = peek(target).version  # the file may have been replaced
        given = known.given
        if override:
            message = parse_json(name, override.config)
            check(message, name)
            given = typed(message)
        fingerprints = {"": "", version: _digest(_files(target))}
        return msgspec.structs.replace(
            known,
            versions={version: target},
            given=given,
            fingerprints=fingerprints,
            fingerprint=_fingerprint(target),
        )

    def _resolved(self, given: ModelConfig, folder: Path | None) -> ModelConfig:
        """``given``, with the models of an ensemble renamed to the names under which they are served. A model is looked up in the
        ensemble's own repository first.
        """
        models, names = self.models(), []
        for step in given.steps:
            own = self.namespace(folder.parent) if folder else ""
            wanted = {Path(step.model_namespace), Path(step.model_namespace).absolute()}
            others = [self.namespace(root) for root in self.roots if {root, root.absolute()} & wanted]
            found = (f"{namespace}/{step.model_name}" for namespace in (own, step.model_namespace, *others))
            names.append(next((name for name in found if name in models), step.model_name))
        return with_parts(given, names) if names else given


def _fingerprint(found: Path | PenstockError) -> str:
    if isinstance(found, PenstockError):
        return found.message
    try:
        return _digest(_files(found))
    except PenstockError as error:
        return error.message


def absent(name: str, known: Collection[str]) -> NotFound:
    """The error for a model ``name`` that does not exist. ``known`` has the names of the existing models."""
    near = difflib.get_close_matches(name, known, n=1)
    return NotFound(f"the repositories contain no model {quoted(name)}", f"did you mean '{near[0]}'?" if near else "")


def check_filled(roots: Iterable[Path]) -> None:
    """Raise NotFound if none of the repositories ``roots`` has a folder of a model, or one of them does not exist."""
    reasons = [_emptiness(root) for root in roots]
    if reasons and all(reasons):
        raise NotFound("; ".join(reasons), EXAMPLE)


def _emptiness(root: Path) -> str:
    """Why ``root`` is not a repository with models; empty if it is one."""
    entries = [entry for entry in _entries(root) if not entry.name.startswith(".")]
    folders = [Path(entry.path) for entry in entries if _is_folder(entry)]
    if not entries:
        return f"model repository '{root}' is empty"
    if not folders:
        return f"model repository '{root}' has no folder of a model, only files such as '{_shown(entries[0].name)}'"
    if all(_is_version(folder.name) and not versions_in(folder) for folder in folders):
        return f"'{root}' is not a model repository, but the folder of one model, with its versions"
    return ""


def check_name(name: str) -> None:
    """Raise InvalidArgument if ``name`` is not a valid model name, perhaps with its repository's name before it."""
    for part in name.split("/", 1):
        manifest.check_name(part)


def _refusal(name: str) -> PenstockError | None:
    try:
        manifest.check_name(name)
    except InvalidArgument as error:
        return error
    return None


def _shown(name: str) -> str:
    """``name`` without unprintable characters."""
    return manifest.BAD_NAME.sub("?", name)[: manifest.MAX_NAME]


def versions_in(folder: Path) -> list[str]:
    """The versions of the model in ``folder``, in ascending order. Raises NotFound if the folder cannot be read."""
    return sorted((one.name for one in _entries(folder) if _is_version(one.name) and _is_folder(one)), key=int)


def _no_versions(folder: Path) -> str:
    numbers = [one.name[:_MAX_SHOWN] for one in _entries(folder) if one.name.isdecimal() and not _is_version(one.name)]
    return ", ".join(f"'{number}'" for number in numbers[:3])


def _is_version(name: str) -> bool:
    return _VERSION.fullmatch(name) is not None and int(name) <= _MAX_VERSION


def _entries(folder: Path) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(local_path(folder)) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        raise NotFound(f"no model repository '{folder}'", "check the path") from None
    except OSError as error:
        raise NotFound(f"cannot read model repository '{folder}': {error.strerror}") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True if ``entry`` is a folder or a link to a folder; False for a circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _by_version(folder: Path, lines: Iterable[str]) -> dict[str, str]:
    """Compute ``ModelSource.fingerprints`` from ``lines``, which describe all files of the model in ``folder``."""
    files: dict[str, list[str]] = {version: [] for version in ("", *versions_in(folder))}
    for line in lines:
        top = line.partition("/")[0]
        if top in files and top:
            files[top].append(line)
        elif not line.startswith((f"{FILE}\0", f"{_CONFIGS}/")):
            files[""].append(line)
    return {version: _digest(group) for version, group in files.items()}


def _files(target: Path) -> Iterator[str]:
    """A line with path, size, time and inode for each file below ``target``, or for ``target`` itself if it is a file.

    Skips hidden files, and files that are still being written. Raises InvalidModel if there are too many files, or the files
    cannot be listed.
    """
    waiting, count = [(os.fspath(target), "", 0)], 0
    try:
        if not target.is_dir():
            yield _line("", os.stat(target))
            return
        while waiting:
            folder, path, depth = waiting.pop()
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name.endswith(PARTIAL):
                        continue
                    count += 1
                    if count > _MAX_FILES or depth > _MAX_DEPTH:
                        raise InvalidModel(
                            f"the folder of model '{_shown(target.name)}' has more than {_MAX_FILES} files,"
                            f" or more than {_MAX_DEPTH} levels of folders"
                        )
                    if entry.is_dir():
                        waiting.append((entry.path, f"{path}{entry.name}/", depth + 1))
                    else:
                        yield _line(path + entry.name, entry.stat())
    except FileNotFoundError as error:
        raise InvalidModel(
            f"the files of model '{_shown(target.name)}' are being moved, or a link is broken: {_within(target, error)}"
        ) from None
    except OSError as error:
        raise InvalidModel(
            f"cannot read {_within(target, error)} in the folder of model '{_shown(target.name)}': {error.strerror}"
        ) from None


def _within(target: Path, error: OSError) -> str:
    path = os.path.relpath(error.filename or target, target)
    return "'" + "/".join(map(_shown, path.split(os.sep))) + "'"


def _line(path: str, stat: os.stat_result) -> str:
    return f"{path}\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def _digest(lines: Iterable[str]) -> str:
    data = "\n".join(sorted(lines)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
