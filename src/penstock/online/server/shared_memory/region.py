"""A region of memory that a client shares with the server, mapped once, and read and written by offset.

**A region that shrinks must not end the server.** Access to a mapped page that its file has lost, or that a full ``/dev/shm``
cannot provide, raises SIGBUS, which ends the process. Therefore:

- A region is trusted if only the server's user and root, who could end the server anyway, can shrink it: one of them owns the
  file, and nobody else may write to it. This is how clients create regions by default.
- Large inputs in a trusted region are views, and large outputs are copied into its mapping. Before each access ``fstat`` checks
  that the file is not truncated and has no pages that were never written. (``SEEK_HOLE`` could check the tensor's pages alone,
  but walks all pages after them.)
- Everything else uses ``pread`` and ``pwrite``, which return errors instead of raising SIGBUS: small tensors, for which the
  check would cost as much, other regions, and trusted regions that fail the check.

One case remains: a client that runs as the server's user and truncates its region during a request.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import stat
from collections.abc import Callable

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted
from penstock.tensor import Buffer

_FOLDER = "/dev/shm"  # noqa: S108 - the home of POSIX shared memory, no temporary file
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_MAX_KEY_BYTES = 255
_MAX_OFFSET = 2**63 - 1
_SMALL_BYTES = 16 << 10  # up to this size `pread` costs no more than `fstat`
_BLOCK_BYTES = 512

Reserve = Callable[[int], object]
"""Takes the number of bytes that are about to be copied; raises if they exceed a limit."""


def unbounded(byte_size: int) -> None:
    """Reserve any number of bytes."""


class Region:
    """``byte_size`` bytes at ``offset`` of the POSIX shared memory object ``key``; a leading slash is optional.

    Closed once it is retired and its last user has released it. Raises InvalidArgument, ResourceExhausted, and
    PenstockError if there is no such object.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self.name = name
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.closed = asyncio.Event()
        self._users = 0
        self._retired = False
        if not (
            type(offset) is int and type(byte_size) is int and offset >= 0 and 0 < byte_size <= _MAX_OFFSET - offset
        ):
            raise self._refusal("invalid args", "'byte_size' must be positive, 'offset' not negative")
        self._file = self._open(key)
        try:
            facts = os.fstat(self._file)
            if not stat.S_ISREG(facts.st_mode) or offset + byte_size > facts.st_size:
                raise self._refusal("invalid args", f"the object has {facts.st_size} bytes")
            # A mapping must start at a page boundary.
            self._skipped = offset % mmap.ALLOCATIONGRANULARITY
            self._view: memoryview | None = None
            if facts.st_uid in (os.geteuid(), 0) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                start = offset - self._skipped
                mapped = mmap.mmap(self._file, self._skipped + byte_size, offset=start)
                self._view = memoryview(mapped)
        except (OSError, OverflowError):
            os.close(self._file)
            raise self._refusal("unable to process address space") from None
        except InvalidArgument:
            os.close(self._file)
            raise

    def acquire(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Close the region after its last user; it is not acquired again."""
        self._retired = True
        self._close_if_unused()

    def check(self, offset: int, byte_size: int) -> None:
        """Raise InvalidArgument unless ``byte_size`` bytes at ``offset`` lie within the region."""
        if not (type(offset) is int and 0 <= offset < self.byte_size):
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if not (type(byte_size) is int and 0 <= byte_size <= self.byte_size - offset):
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")

    def describe(self) -> dict[str, str | int]:
        """The region as the protocol's status shows it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, offset: int, byte_size: int, reserve: Reserve = unbounded) -> Buffer:
        """The bytes there, which ``check`` has accepted: a read-only view, or a copy where a view would not be safe.

        ``reserve`` is called before a copy; its exceptions propagate.
        """
        if byte_size > _SMALL_BYTES and self._view is not None and self._is_whole():
            start = self._skipped + offset
            return self._view[start : start + byte_size].toreadonly()
        reserve(byte_size)
        data = os.pread(self._file, byte_size, self.offset + offset)
        while len(data) < byte_size:  # one call reads 2 GiB at most
            more = os.pread(self._file, byte_size - len(data), self.offset + offset + len(data))
            if not more:
                raise self._has_shrunk()
            data += more
        return data

    def write(self, offset: int, data: Buffer) -> None:
        """Copy ``data`` there; ``check`` has accepted the place."""
        view = memoryview(data)
        if len(view) > _SMALL_BYTES and self._view is not None and self._is_whole():
            # Three times as fast as the system call, which looks up each page.
            start = self._skipped + offset
            self._view[start : start + len(view)] = view
            return
        start = self.offset + offset
        # A write past the end would extend the file instead of failing.
        if os.lseek(self._file, 0, os.SEEK_END) < start + len(view):
            raise self._has_shrunk()
        try:
            while view:
                count = os.pwrite(self._file, view, start)
                view, start = view[count:], start + count
        except OSError as error:
            raise ResourceExhausted(
                f"cannot write to shared memory region '{self.name}': {error.strerror}",
                f"make {_FOLDER} larger" if error.errno == errno.ENOSPC else "",
            ) from None

    def _close_if_unused(self) -> None:
        if self._retired and not self._users and not self.closed.is_set():
            self._close()
            self.closed.set()

    def _close(self) -> None:
        os.close(self._file)
        # Not closed explicitly: an array may still refer to the mapping, which ends with the last one.
        self._view = None

    def _open(self, key: str) -> int:
        name = key.removeprefix("/")
        if name.startswith(_RESERVED_PREFIX):
            raise self._refusal(f"the key must not start with '{_RESERVED_PREFIX}'")
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _MAX_KEY_BYTES:
            raise self._refusal("invalid args", "the key must be a single name")
        try:
            # Non-blocking, since opening a pipe would block the event loop.
            return os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            message = f"Unable to open shared memory region: '{key}'"
            if error.errno == errno.ENOENT:
                # The code that Triton's clients know.
                raise PenstockError(message, "create it before it is registered") from None
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise ResourceExhausted(message, "unregister others first") from None
            raise InvalidArgument(message) from None

    def _is_whole(self) -> bool:
        """True if the file is not truncated and has all its pages."""
        facts = os.fstat(self._file)
        return facts.st_blocks * _BLOCK_BYTES >= facts.st_size >= self.offset + self.byte_size

    def _refusal(self, reason: str, hint: str = "") -> InvalidArgument:
        return InvalidArgument(f"failed to register shared memory region '{self.name}': {reason}", hint)

    def _has_shrunk(self) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}' is smaller than at its registration", "register it again"
        )
