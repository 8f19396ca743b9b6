"""GPU memory that a client shares with the server by a CUDA IPC handle, through the CUDA driver's own library.

Tensors are copied between the GPU and host memory. ``libcuda.so.1`` comes with every NVIDIA driver, so neither the CUDA
toolkit nor a Python package is needed; without it, or without a GPU, ``load_driver`` raises Unsupported.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.errors import InvalidArgument, PenstockError, Unsupported
from penstock.online.server.shared_memory.region import Region, Reserve, unbounded
from penstock.tensor import Buffer

_LIBRARY = "libcuda.so.1"
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class Driver(Protocol):
    """What of CUDA is needed. Addresses are of GPU memory; errors of CUDA are raised as PenstockError."""

    def open(self, raw_handle: bytes, device_id: int) -> tuple[int, int]:
        """``(address, size)`` of the allocation behind an IPC handle."""

    def close(self, address: int, device_id: int) -> None: ...

    def read(self, address: int, byte_size: int, device_id: int) -> bytearray: ...

    def write(self, address: int, data: Buffer, device_id: int) -> None: ...


class CudaRegion(Region):
    """``byte_size`` bytes from the start of an allocation on GPU ``device_id``. Raises Unsupported, InvalidArgument."""

    is_cuda = True

    def __init__(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, driver: Driver | None = None
    ) -> None:
        super().__init__(name, byte_size)
        self._driver = driver or load_driver()
        self._device_id = device_id
        refusal = InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        if len(raw_handle) != _HANDLE_BYTES or type(byte_size) is not int or byte_size < 1:
            raise refusal
        try:
            self._address, size = self._driver.open(raw_handle, device_id)
        except PenstockError as error:
            raise InvalidArgument(refusal.message, str(error)) from None
        if byte_size > size:
            self.close()
            raise refusal

    def describe(self) -> dict[str, str | int]:
        return {"name": self.name, "device_id": self._device_id, "byte_size": self.byte_size}

    def read(self, offset: int, byte_size: int, reserve: Reserve = unbounded) -> Buffer:
        reserve(byte_size)
        return memoryview(self._driver.read(self._address + offset, byte_size, self._device_id)).toreadonly()

    def write(self, offset: int, data: Buffer) -> None:
        self._driver.write(self._address + offset, data, self._device_id)

    def close(self) -> None:
        self._driver.close(self._address, self._device_id)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class CudaDriver:
    """The driver's library; each GPU is used through its primary context, which is retained once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def open(self, raw_handle: bytes, device_id: int) -> tuple[int, int]:
        address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        handle = _Handle.from_buffer_copy(raw_handle)
        with self._current(device_id):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
            try:
                self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            except PenstockError:
                self._call("cuIpcCloseMemHandle", address)
                raise
        return address.value, base.value + size.value - address.value

    def close(self, address: int, device_id: int) -> None:
        with self._current(device_id):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def read(self, address: int, byte_size: int, device_id: int) -> bytearray:
        data = bytearray(byte_size)
        if byte_size:
            target = (ctypes.c_char * byte_size).from_buffer(data)
            with self._current(device_id):
                self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(byte_size))
        return data

    def write(self, address: int, data: Buffer, device_id: int) -> None:
        view = memoryview(data)
        if not view:
            return
        # ctypes takes writable buffers only, but the library only reads this one.
        source = (ctypes.c_char * len(view)).from_buffer_copy(view) if view.readonly else _array_over(view)
        with self._current(device_id):
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(len(view)))

    @contextmanager
    def _current(self, device_id: int) -> Iterator[None]:
        """Make the GPU's context the thread's."""
        context = self._contexts.get(device_id)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_id))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise PenstockError(f"CUDA: {(text.value or b'unknown error').decode()}")


def _array_over(view: memoryview) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(view)).from_buffer(view)


@functools.cache
def load_driver(library: str = _LIBRARY) -> Driver:
    """The driver, loaded once. Raises Unsupported where there is none, or no GPU."""
    try:
        return CudaDriver(ctypes.CDLL(library))
    except OSError:
        raise Unsupported("CUDA shared memory is not supported here: no NVIDIA driver is installed") from None
    except PenstockError as error:
        raise Unsupported(f"CUDA shared memory is not supported here: {error.message}") from None
