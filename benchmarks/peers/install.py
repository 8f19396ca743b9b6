"""Creates the peers' environments: ``python -m benchmarks.peers.install [NAME...]``. By default, creates all missing environments.

Each environment is a virtual environment ``.peers/NAME``, created with pip. A failure is reported, and the peer is skipped. The
exit status is 1 if any installation failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.catalog import PEERS, ROOT, Peer

_TIMEOUT_S = 480


def main() -> int:
    """Install the peers that the command line names."""
    names = sys.argv[1:] or [name for name, peer in PEERS.items() if peer.python() is None]
    unknown = [name for name in names if name not in PEERS or not PEERS[name].requirements]
    if unknown:
        print(f"cannot install {', '.join(unknown)}; known: {', '.join(n for n, p in PEERS.items() if p.requirements)}")
        return 2
    return 1 if [name for name in names if not install(PEERS[name], ROOT / ".peers" / name)] else 0


def install(peer: Peer, folder: Path) -> bool:
    """Create the environment of ``peer`` in ``folder``. If this fails, remove the folder and return False."""
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
