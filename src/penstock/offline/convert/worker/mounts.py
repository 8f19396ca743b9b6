"""A mount namespace: shared memory of its own and, on kernels without Landlock, a file system that is read-only elsewhere.

A process may do this without privileges if it is in a user namespace.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is replaced, not used
_CLONE_NEWNS = 0x0002_0000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_READ_ONLY = 442, -100, 0x8000, 1
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION = 0x2008_0522
_CAPABILITIES = 64


def private_memory(libc: ctypes.CDLL, reads: Sequence[Path]) -> tuple[Path, ...]:
    """Move to a mount namespace, if this is permitted. Returns ``/dev/shm`` if it is now new and empty: not if ``reads`` are there."""
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None):
        return ()
    if any(path.resolve().is_relative_to(_SHARED_MEMORY) for path in reads):
        return ()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    made = libc.mount(b"tmpfs", bytes(_SHARED_MEMORY), b"tmpfs", flags, b"mode=1777") == 0
    return (_SHARED_MEMORY,) if made else ()


def restrict_writing(libc: ctypes.CDLL, writable: Sequence[Path]) -> bool:
    """Make all mounts read-only except for the folders ``writable``, and give up the right to change that. False: not permitted.

    Call it after ``private_memory``. The working directory must be one of ``writable``, which it then is again.
    """
    here = Path.cwd()
    for folder in writable:
        bound = ctypes.c_ulong(_MS_BIND | _MS_REC)
        if libc.mount(os.fsencode(folder), os.fsencode(folder), None, bound, None) != 0:
            return False
    if not _set_read_only(libc, Path("/"), _AT_RECURSIVE, is_set=True):
        return False
    if not all(_set_read_only(libc, folder, 0, is_set=False) for folder in writable):
        return False
    os.chdir(here)  # the working directory was below the mount
    return _without_capabilities(libc)


def _set_read_only(libc: ctypes.CDLL, folder: Path, flags: int, *, is_set: bool) -> bool:
    attributes = struct.pack("=QQQQ", *((_ATTR_READ_ONLY, 0) if is_set else (0, _ATTR_READ_ONLY)), 0, 0)
    size = ctypes.c_size_t(len(attributes))
    return bool(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(folder), flags, attributes, size) == 0)


def _without_capabilities(libc: ctypes.CDLL) -> bool:
    """With capabilities, the process and its children could mount the file system again."""
    for number in range(_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for numbers that the kernel does not have
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    return bool(libc.capset(header, bytes(24)) == 0)
