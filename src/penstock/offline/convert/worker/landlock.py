"""Landlock: the kernel's sandbox for unprivileged processes, used here to restrict writing.

The rules also hold for all future children, and cannot be undone. Reading is not restricted.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, which are the same on all processors that Penstock supports."""
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE = 1 << 1
# Removing and making files, folders, links, sockets, pipes and devices: bits 4 to 12.
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_BY_VERSION = ((1, _WRITE_FILE | _CHANGE_FOLDER), (2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
"""Versions of Landlock with the rights that they added. A kernel rejects rights that it does not know."""
_FOR_FILES = _WRITE_FILE | _TRUNCATE | _IOCTL_DEV


def restrict_writing(libc: ctypes.CDLL, writable: Sequence[Path]) -> bool:
    """Let this process write only below the folders ``writable``, and to ``/dev/null``. False: the kernel has no Landlock.

    Before version 3 (Linux 6.2), the kernel cannot keep a program from emptying a file with ``truncate``. The process must have set
    ``PR_SET_NO_NEW_PRIVS``.
    """
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    rights = sum(added for first, added in _BY_VERSION if version >= first)
    attributes = struct.pack("=Q", rights)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    try:
        return all(_permit(libc, ruleset, path, rights) for path in (*writable, Path(os.devnull))) and (
            libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
        )
    finally:
        os.close(ruleset)


def _permit(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> bool:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _FOR_FILES
        rule = struct.pack("=Qi", rights, opened)
        return bool(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0) == 0)
    finally:
        os.close(opened)
