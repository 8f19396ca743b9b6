from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm

from penstock.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from penstock.online.server.config import ServerConfig
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.tensor import DataType

BYTES = 64 << 10


@pytest.fixture
def region() -> Iterator[Any]:
    """A region that Triton's client library has created."""
    key = f"/penstock-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("r", key, BYTES)
    handle.key = key
    handle.descriptors = descriptors(key)
    yield handle
    shm.destroy_shared_memory_region(handle)


@pytest.fixture
def memory(region: Any) -> Iterator[SharedMemory]:
    memory = SharedMemory(enabled=True)
    memory.register("r", region.key, 0, BYTES)
    yield memory
    memory.close()
    assert open_only_by_client(region)


async def unregister(memory: SharedMemory, name: str = "") -> None:
    memory.forget(name)
    await memory.closed(name)


def open_only_by_client(region: Any) -> bool:
    return descriptors(region.key) == region.descriptors and Path("/proc/self/maps").read_text().count(region.key) == 1


def descriptors(key: str) -> int:
    return sum(key in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_names(region: Any, memory: SharedMemory) -> None:
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        memory.register("r", region.key, 0, 8)
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'x'"):
        memory.lease().array("x", 0, 4, DataType.FP32, (1,))
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'x'"):
        memory.status("x")
    for name in ("", "x" * 1025):
        with pytest.raises(InvalidArgument, match="must have 1 to 1024 characters"):
            memory.register(name, region.key, 0, 8)


def test_status(region: Any, memory: SharedMemory) -> None:
    memory.register("part", region.key.removeprefix("/"), 4100, 8)
    whole = {"name": "r", "key": region.key, "offset": 0, "byte_size": BYTES}
    part = {"name": "part", "key": region.key.removeprefix("/"), "offset": 4100, "byte_size": 8}
    assert memory.status() == [whole, part]
    assert memory.status("part") == [part]


def test_regions_are_bounded_in_number(region: Any, memory: SharedMemory) -> None:
    for number in range(511):
        memory.register(str(number), region.key, 0, 8)
    with pytest.raises(ResourceExhausted, match="at most 512"):
        memory.register("one more", region.key, 0, 8)
    assert len(memory.status()) == 512


def test_switched_off_all_is_refused() -> None:
    memory = SharedMemory(enabled=False)
    with pytest.raises(Unsupported, match="client shared memory is disabled"):
        memory.register("r", "/k", 0, 8)
    with pytest.raises(Unsupported):
        memory.lease().place("y", "r", 0, 8)
    with pytest.raises(Unsupported):
        memory.status()
    with pytest.raises(Unsupported):
        asyncio.run(unregister(memory))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "allow_client_shm": "true"}, True),
        ({"allow_client_shm": "false"}, False),
        ({"grpc_host": "0.0.0.0"}, False),
    ],
)
def test_by_default_it_is_on_where_clients_are_local(settings: dict[str, Any], expected: bool) -> None:
    assert ServerConfig(**settings).client_shm is expected


def test_unregister_waits_for_users_and_is_at_once_unknown_to_others(region: Any, memory: SharedMemory) -> None:
    async def story() -> None:
        shm.set_shared_memory_region(region, [np.zeros(BYTES, np.uint8)])
        lease = memory.lease()
        array = lease.array("r", 0, 32768, DataType.FP32, (8192,))
        leaving = asyncio.ensure_future(unregister(memory, "r"))
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            memory.lease().place("y", "r", 0, 8)
        memory.register("r", region.key, 0, 16)
        assert memory.status("r")[0]["byte_size"] == 16
        await asyncio.sleep(0)
        assert not leaving.done()
        assert array.sum() == 0
        lease.place("y", "r", 0, 16)
        lease.release()
        lease.release()
        await leaving

    asyncio.run(story())


def test_the_last_user_closes_it_though_nobody_waits_any_more(region: Any, memory: SharedMemory) -> None:
    async def story() -> None:
        lease = memory.lease()
        lease.place("y", "r", 0, 8)
        leaving = asyncio.ensure_future(unregister(memory))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        lease.release()

    asyncio.run(story())
    assert open_only_by_client(region)


def test_unregister_of_an_unknown_name_is_none(memory: SharedMemory) -> None:
    asyncio.run(unregister(memory, "x"))
    assert len(memory.status()) == 1


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_of_users_ends_with_nothing_open(region: Any, seed: int) -> None:
    """Each client writes its own mark into its slice. It registers, infers and unregisters under names that all clients share."""
    choose = random.Random(seed)
    memory = SharedMemory(enabled=True)

    async def client(number: int) -> None:
        for _ in range(30):
            name = choose.choice("abc")
            try:
                match choose.randrange(3):
                    case 0:
                        memory.register(name, region.key, 0, BYTES)
                    case 1:
                        await unregister(memory, choose.choice([name, ""]))
                    case 2:
                        await infer(name, number)
            except (AlreadyExists, NotFound):
                pass
            await asyncio.sleep(0)

    async def infer(name: str, number: int) -> None:
        lease = memory.lease()
        try:
            placement = lease.place("y", name, number * 4, 4)
            for _ in range(choose.randrange(5)):
                await asyncio.sleep(0)
            placement.write(np.array([number], np.int32))
        finally:
            lease.release()

    async def story() -> None:
        await asyncio.gather(*(client(number) for number in range(20)))
        await unregister(memory)

    asyncio.run(story())
    assert open_only_by_client(region)
    marks = shm.get_contents_as_numpy(region, np.int32, [20])
    assert all(mark in (0, number) for number, mark in enumerate(marks))


def test_whether_there_are_regions(memory: SharedMemory) -> None:
    assert memory.has_regions
    asyncio.run(unregister(memory))
    assert not memory.has_regions
