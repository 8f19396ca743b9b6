"""Make the peers' environments: ``python -m benchmarks.peers.install [NAME...]``, by default all that are not there yet.

Each is a virtual environment ``.peers/NAME``, made with plain pip; one that fails is told and left out. Exits with 1 if any did.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.catalog import PEERS, ROOT, Peer

_TIMEOUT_S = 480


def main() -> int:
    """Install what the command line asks for."""
    names = sys.argv[1:] or [name for name, peer in PEERS.items() if peer.python() is None]
    unknown = [name for name in names if name not in PEERS or not PEERS[name].requirements]
    if unknown:
        print(f"cannot install {', '.join(unknown)}; known: {', '.join(n for n, p in PEERS.items() if p.requirements)}")
        return 2
    return 1 if [name for name in names if not install(PEERS[name], ROOT / ".peers" / name)] else 0


def install(peer: Peer, folder: Path) -> bool:
    """Make ``folder`` the environment of ``peer``; False, and no folder, if that fails."""
    print(f"{peer.name}: {' '.join(peer.requirements)} …", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *peer.requirements]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S, capture_output=True, text=True)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        print(f"{peer.name}: failed: {said[-1] if said else error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
