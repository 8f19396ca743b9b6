"""The path at which a bundle is to be written."""

from __future__ import annotations

from pathlib import Path

from penstock.bundle.manifest import check_name, check_version
from penstock.bundle.open import is_bundle
from penstock.bundle.pack import check_folder
from penstock.errors import AlreadyExists, InvalidArgument
from penstock.storage.atomic import check_writable


def check_target(target: Path, name: str, version: str, *, overwrite: bool, folder: bool) -> None:
    """Check ``target``, and the name and version of the bundle, before any long work. With ``folder``, the bundle is to be a folder.

    Raises InvalidArgument or AlreadyExists if ``pack`` would reject them, or would replace what is not a bundle without ``overwrite``.
    """
    check_version(version)
    if not target.stem or target.name == "..":
        raise InvalidArgument(f"'{target}' is not the name of a file", "name the bundle, e.g. -o model.bundle")
    check_writable(target, or_folder=True)
    check_name(name)
    if not target.exists():
        return
    if is_bundle(target):
        if target.is_dir():
            check_folder(target)
        return
    if target.is_dir() and (not folder or any(target.iterdir())):
        within = target / "model.bundle"
        raise AlreadyExists(f"'{target}' is a folder that is not a bundle", f"choose another name, such as {within}")
    if not overwrite and not target.is_dir():
        raise AlreadyExists(f"'{target}' exists and is not a bundle", "choose another name, or use --force")
