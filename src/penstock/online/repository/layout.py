"""Where models are: repositories in Triton's layout, ``<model>/config.pbtxt`` and ``<model>/<version>/…``, and command-line targets.

A model's fingerprint tells whether any of its files has changed, without reading them. Everything here blocks and belongs on
a thread.
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
from penstock.bundle.open import is_bundle, peek
from penstock.errors import AlreadyExists, InvalidArgument, InvalidModel, NotFound, PenstockError
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override
from penstock.online.repository.triton.check import check
from penstock.online.repository.triton.schema import typed, with_parts
from penstock.online.repository.triton.text import FILE, config_path, parse_json, read_config, shown_path

_log = logging.getLogger(__name__)

_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_MAX_VERSION = (1 << 63) - 1
_BAD_NAME = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")
_MAX_NAME = 255
_MAX_SHOWN = 24
_MAX_FILES = 10_000
_MAX_DEPTH = 16
_CONFIGS = "configs"


class Layout(msgspec.Struct, frozen=True):
    """``roots`` are repositories. With ``namespacing``, models of one name in several of them are told apart as
    ``<repository>/<name>``; without, such a name is refused."""

    roots: tuple[Path, ...] = ()
    config_name: str = ""
    namespacing: bool = False
    by_hand: Mapping[str, ModelSource] = {}

    def models(self) -> dict[str, Path | PenstockError]:
        """By name the folder of every model, or why it cannot be told. Raises NotFound if a repository is not there."""
        found: dict[str, list[Path]] = {name: [next(iter(one.versions.values()))] for name, one in self.by_hand.items()}
        for root in self.roots:
            for entry in _entries(root):
                if not entry.name.startswith(".") and _is_folder(entry):
                    found.setdefault(entry.name, []).append(Path(entry.path))
        models: dict[str, Path | PenstockError] = {}
        for name, folders in found.items():
            if len(folders) == 1:
                models[_shown(name)] = _refusal(name) or folders[0]
            elif self.namespacing and name not in self.by_hand:
                models |= {f"{self.namespace(folder.parent)}/{name}": folder for folder in folders}
            else:
                models[_shown(name)] = AlreadyExists(
                    f"model '{_shown(name)}' is not unique across all model repositories",
                    "rename one of them" if name in self.by_hand else "rename one of them, or use 'model_namespacing'",
                )
        return models

    def _find(self, name: str) -> Path | PenstockError | None:
        """As ``models().get(name)``, without looking at all the others where there is no need to."""
        folders = [root / name for root in self.roots if not self.namespacing and _refusal(name) is None]
        present = [folder for folder in folders if folder.is_dir()]
        return present[0] if len(present) == 1 and name not in self.by_hand else self.models().get(name)

    def namespace(self, root: Path) -> str:
        """What tells the models of repository ``root`` from others of the same name: its folder's name, numbered if others have it."""
        alike = [other for other in self.roots if other.name == root.name]
        return root.name if len(alike) == 1 else f"{root.name}-{alike.index(root) + 1}"

    def scan(self) -> dict[str, str]:
        """By name the fingerprint of every model, or for one without, why. Raises NotFound if a repository is not there."""
        return {name: self._fingerprint(found) for name, found in self.models().items()}

    def fingerprint(self, name: str) -> str:
        """Of model ``name`` now; empty if there is none. Raises NotFound if a repository is not there."""
        found = self._find(name)
        return self._fingerprint(found) if found is not None else ""

    def define(self, name: str, override: Override | None = None) -> ModelSource:
        """Model ``name`` as it lies there now, with what ``override`` replaces of it.

        Raises NotFound if there is no such model, and InvalidConfig, InvalidModel, AlreadyExists.
        """
        found = self._find(name)
        if isinstance(found, PenstockError):
            raise found
        if found is None and not (override and override.folder):
            raise absent(name, self.models())
        if name in self.by_hand:
            return self._by_hand(name, override)
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

    def _by_hand(self, name: str, override: Override | None) -> ModelSource:
        if override and override.folder:
            raise InvalidArgument(f"the files of model '{name}' cannot be replaced: it was passed on the command line")
        known = self.by_hand[name]
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
            fingerprint=self._fingerprint(target),
        )

    def _resolved(self, given: ModelConfig, folder: Path | None) -> ModelConfig:
        """``given`` with the steps of an ensemble naming models as they are served: those of its own repository first."""
        models, names = self.models(), []
        for step in given.steps:
            own = self.namespace(folder.parent) if folder else ""
            wanted = {Path(step.model_namespace), Path(step.model_namespace).absolute()}
            others = [self.namespace(root) for root in self.roots if {root, root.absolute()} & wanted]
            found = (f"{namespace}/{step.model_name}" for namespace in (own, step.model_namespace, *others))
            names.append(next((name for name in found if name in models), step.model_name))
        return with_parts(given, names) if names else given

    def _fingerprint(self, found: Path | PenstockError) -> str:
        if isinstance(found, PenstockError):
            return found.message
        try:
            return _digest(_files(found))
        except PenstockError as error:
            return error.message


def absent(name: str, known: Collection[str]) -> NotFound:
    """``name`` is none of the models that are ``known``."""
    near = difflib.get_close_matches(name, known, n=1)
    return NotFound(f"the repositories hold no model '{name}'", f"did you mean '{near[0]}'?" if near else "")


def check_name(name: str) -> None:
    """Raises InvalidArgument if ``name`` cannot be a model's, whatever a repository holds."""
    parts = name.split("/", 1)
    for refusal in map(_refusal, parts):
        if refusal:
            raise refusal


def _refusal(name: str) -> PenstockError | None:
    if _BAD_NAME.search(name) or not name.strip() or name.startswith(".") or len(name.encode()) > _MAX_NAME:
        return InvalidArgument(
            f"'{_shown(name)}' cannot be the name of a model",
            f"1 to {_MAX_NAME} bytes, no separator or control character among them, no '.' in front",
        )
    return None


def _shown(name: str) -> str:
    """``name`` without what text cannot hold."""
    return _BAD_NAME.sub("?", name)[:_MAX_NAME]


def versions_in(folder: Path) -> list[str]:
    """Those of the model in ``folder``, by rising number. Raises NotFound if it cannot be read."""
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
    """False also for a link that leads in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _by_version(folder: Path, lines: Iterable[str]) -> dict[str, str]:
    """The fingerprints of ``ModelSource``; ``lines`` are those of all files of the model in ``folder``."""
    files: dict[str, list[str]] = {version: [] for version in ("", *versions_in(folder))}
    for line in lines:
        top = line.partition("/")[0]
        if top in files and top:
            files[top].append(line)
        elif not line.startswith((f"{FILE}\0", f"{_CONFIGS}/")):
            files[""].append(line)
    return {version: _digest(group) for version, group in files.items()}


def _files(target: Path) -> Iterator[str]:
    """A line for each file below ``target``, or ``target`` itself: its path and what changes when it is written. Hidden ones do not
    count. Raises InvalidModel if there are too many, or they cannot be listed."""
    waiting, count = [(os.fspath(target), "", 0)], 0
    try:
        if not target.is_dir():
            yield _line("", os.stat(target))
            return
        while waiting:
            folder, path, depth = waiting.pop()
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    count += 1
                    if count > _MAX_FILES or depth > _MAX_DEPTH:
                        raise InvalidModel(
                            f"the folder of model '{_shown(target.name)}' holds more than {_MAX_FILES} files,"
                            f" or folders {_MAX_DEPTH} deep"
                        )
                    if entry.is_dir():
                        waiting.append((entry.path, f"{path}{entry.name}/", depth + 1))
                    else:
                        yield _line(path + entry.name, entry.stat())
    except FileNotFoundError as error:
        raise InvalidModel(
            f"the files of model '{_shown(target.name)}' are being moved, or a link leads nowhere: {_within(target, error)}"
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
