from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidArgument, PenstockError, Unsupported
from penstock.online.server.shared_memory.cuda import CudaRegion, load_driver
from penstock.online.server.shared_memory.registry import Placement, SharedMemory
from penstock.tensor import Buffer

HANDLE = bytes(range(64))


class HostDriver:
    """CUDA's part played by host memory: one allocation of 256 bytes at address 1000."""

    def __init__(self) -> None:
        self.content = bytearray(256)
        self.opened = 0

    def open(self, raw_handle: bytes, device_id: int) -> tuple[int, int]:
        if raw_handle != HANDLE or device_id != 1:
            raise PenstockError("CUDA: invalid argument")
        self.opened += 1
        return 1000, len(self.content)

    def close(self, address: int, device_id: int) -> None:
        assert address == 1000
        self.opened -= 1

    def read(self, address: int, byte_size: int, device_id: int) -> bytearray:
        return self.content[address - 1000 : address - 1000 + byte_size]

    def write(self, address: int, data: Buffer, device_id: int) -> None:
        self.content[address - 1000 : address - 1000 + len(data)] = data


def test_a_region_is_read_written_and_closed() -> None:
    driver = HostDriver()
    region = CudaRegion("c", HANDLE, 1, 128, driver)
    assert region.describe() == {"name": "c", "device_id": 1, "byte_size": 128}
    Placement(region, 8, 8).write(np.array([1, 2], np.int32))
    assert bytes(region.read(8, 8)) == np.array([1, 2], np.int32).tobytes()
    with pytest.raises(InvalidArgument, match="byte size for shared memory region: 'c'"):
        region.check(120, 9)
    assert driver.opened == 1
    region.retire()
    assert driver.opened == 0


@pytest.mark.parametrize(
    ("handle", "device", "size"), [(HANDLE, 1, 257), (HANDLE, 1, 0), (HANDLE, 1, -1), (HANDLE, 0, 8), (b"short", 1, 8)]
)
def test_what_the_driver_or_the_allocation_cannot_give_is_refused(handle: bytes, device: int, size: int) -> None:
    driver = HostDriver()
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'c': invalid args"):
        CudaRegion("c", handle, device, size, driver)
    assert driver.opened == 0


def test_without_a_driver_it_is_not_supported() -> None:
    with pytest.raises(Unsupported, match="no NVIDIA driver is installed"):
        load_driver("libcuda-that-is-not-there.so")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_registering_where_there_is_no_gpu() -> None:
    memory = SharedMemory(enabled=True)
    with pytest.raises(Unsupported, match="CUDA shared memory is not supported here"):
        memory.register_cuda("c", HANDLE, 0, 8)
    assert memory.cuda_status() == []
    asyncio.run(memory.unregister_cuda())
