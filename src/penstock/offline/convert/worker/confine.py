"""What the process that runs the framework gives up before it loads a file: the network, most writing, and memory beyond a limit.

These limits are for files from strangers. They end accidents and simple attacks; they do not replace a virtual machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.offline.convert.worker import landlock, mounts

WRITES_ANYWHERE = (
    "this system can restrict writing neither with Landlock (Linux 5.13) nor with a mount namespace, so the source could write"
    " wherever you can"
)
"""The note of a process that may write outside its folder. ``serve`` then refuses formats whose operators write files."""
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_NO_NAMESPACE = (
    "this system does not permit a process without network (user namespaces), so the source could use the network"
)


def confine(memory_bytes: int, file_bytes: int, reads: Sequence[str] = ()) -> tuple[str, ...]:
    """Limit this process, which must have only one thread, and its future children. They can write only below the working directory.

    ``reads`` are files that the process will read. Returns one sentence for each limit that the system does not permit.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    has_network = not _without_network(libc)
    for kind, limit in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails with EFBIG
    folder = Path.cwd()
    writable = [folder, *mounts.private_memory(libc, (folder, *map(Path, (*reads, *sys.path))))]
    is_restricted = landlock.restrict_writing(libc, writable) or mounts.restrict_writing(libc, writable)
    return (_NO_NAMESPACE,) * has_network + (WRITES_ANYWHERE,) * (not is_restricted)


def end_with(lifeline: int) -> None:
    """Have the kernel end this process group when the parent's end of the pipe ``lifeline`` is closed.

    The default action of the signal ends a process even if foreign code holds the interpreter lock. PR_SET_PDEATHSIG is not
    suitable, because it reports the end of the parent's thread, not of the parent.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit()  # the parent ended before O_ASYNC was set


def _without_network(libc: ctypes.CDLL) -> bool:
    """Move to a network namespace without interfaces. A user namespace makes this possible without privileges."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return bool(libc.unshare(_CLONE_NEWNET) == 0)
    # Without these maps, the process could not create files.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny", "ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", "ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", "ascii")
    return True
