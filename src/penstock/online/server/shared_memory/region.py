"""A region of memory that a client shares with the server, read and written by offset.

**A region is never mapped.** A client can truncate its region at any time. An access to a mapped page raises SIGBUS, which ends
the process, if the file has become shorter or ``/dev/shm`` is full. ``pread`` and ``pwrite`` return an error instead. In addition,
the client cannot change a copy after it has been checked. (A mapping would be safe in a file that is sealed with F_SEAL_SHRINK,
but objects in ``/dev/shm`` cannot be sealed.)
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted
from penstock.tensor import Buffer

_FOLDER = "/dev/shm"  # noqa: S108 - the folder of POSIX shared memory, not a temporary file
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_MAX_KEY_BYTES = 255
_MAX_OFFSET = 2**63 - 1


class Region:
    """``byte_size`` bytes at ``offset`` in the POSIX shared memory object ``key``. The leading slash of ``key`` is optional.

    A region closes once it is retired and its last user has released it. The constructor raises InvalidArgument,
    ResourceExhausted, and PenstockError if the object does not exist.
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
            raise self._refusal("invalid args", "'byte_size' must be positive, and 'offset' must not be negative")
        self._file = self._open(key)
        try:
            facts = os.fstat(self._file)
            if not stat.S_ISREG(facts.st_mode) or offset + byte_size > facts.st_size:
                raise self._refusal("invalid args", f"the object has {facts.st_size} bytes")
        except InvalidArgument:
            os.close(self._file)
            raise

    def acquire(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Close the region once its last user has released it. A retired region must not be acquired again."""
        self._retired = True
        self._close_if_unused()

    def check(self, offset: int, byte_size: int) -> None:
        """Raise InvalidArgument unless ``byte_size`` bytes at ``offset`` lie within the region."""
        if not (type(offset) is int and 0 <= offset < self.byte_size):
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if not (type(byte_size) is int and 0 <= byte_size <= self.byte_size - offset):
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")

    def describe(self) -> dict[str, str | int]:
        """The region in the form of the protocol's status response."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, offset: int, into: memoryview) -> None:
        """Read from ``offset`` until ``into``, a view of bytes, is full. Call ``check`` first. May run on any thread."""
        start = self.offset + offset
        while into:  # one call reads at most 2 GiB
            try:
                count = os.preadv(self._file, [into], start)
            except OSError as error:
                raise self._failed("read from", error) from None
            if not count:
                raise self._has_shrunk()
            into, start = into[count:], start + count

    def write(self, offset: int, data: Buffer) -> None:
        """Copy ``data`` to ``offset``. Call ``check`` first. May run on any thread."""
        view, start = memoryview(data), self.offset + offset
        # A write past the end would extend the file. If the client truncates the file after this check, only the client's memory
        # grows.
        if os.lseek(self._file, 0, os.SEEK_END) < start + len(view):
            raise self._has_shrunk()
        try:
            while view:
                count = os.pwrite(self._file, view, start)
                view, start = view[count:], start + count
        except OSError as error:
            raise self._failed("write to", error) from None

    def _close_if_unused(self) -> None:
        if self._retired and not self._users and not self.closed.is_set():
            os.close(self._file)
            self.closed.set()

    def _open(self, key: str) -> int:
        name = key.removeprefix("/")
        if name.startswith(_RESERVED_PREFIX):
            raise self._refusal(f"the key must not start with '{_RESERVED_PREFIX}'")
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > _MAX_KEY_BYTES:
            raise self._refusal("invalid args", "the key must be a single name")
        try:
            # O_NONBLOCK, because opening a pipe would block the event loop.
            return os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            message = f"Unable to open shared memory region: '{key}'"
            if error.errno == errno.ENOENT:
                # Clients of Triton expect this error code.
                raise PenstockError(message, "create it before you register the region") from None
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise ResourceExhausted(message, "unregister other regions first") from None
            raise InvalidArgument(message) from None

    def _failed(self, what: str, error: OSError) -> PenstockError:
        return ResourceExhausted(
            f"cannot {what} shared memory region '{self.name}': {error.strerror}",
            f"make {_FOLDER} larger" if error.errno == errno.ENOSPC else "",
        )

    def _refusal(self, reason: str, hint: str = "") -> InvalidArgument:
        return InvalidArgument(f"failed to register shared memory region '{self.name}': {reason}", hint)

    def _has_shrunk(self) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}' is smaller than at its registration", "register it again"
        )
