from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.utils as triton
import tritonclient.utils.shared_memory as shm

from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.shared_memory.lease import HERE_BYTES, Lease
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import InferResponse, Outcome
from penstock.tensor import DataType, to_wire

BYTES = 64 << 10
LARGE = HERE_BYTES + 4096


@pytest.fixture
def region() -> Iterator[Any]:
    """A region that Triton's client library has created."""
    key = f"/penstock-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("r", key, 4 * LARGE)
    handle.key = key
    yield handle
    shm.destroy_shared_memory_region(handle)


@pytest.fixture
def memory(region: Any) -> Iterator[SharedMemory]:
    memory = SharedMemory(enabled=True, budget=ByteBudget(1 << 30))
    memory.register("r", region.key, 0, BYTES)
    memory.register("large", region.key, 0, 4 * LARGE)
    yield memory
    assert memory.budget.used == 0
    memory.close()


@pytest.mark.parametrize("datatype", [datatype for datatype in DataType if datatype is not DataType.BYTES])
@pytest.mark.parametrize("rows", [1, 699])
def test_what_the_client_writes_is_read_and_what_is_written_the_client_reads(
    region: Any, memory: SharedMemory, datatype: DataType, rows: int
) -> None:
    values = np.arange(rows * 4).reshape(rows, 4).astype(datatype.dtype)
    shm.set_shared_memory_region(region, [values], offset=16)
    lease = memory.lease()
    array = lease.array("r", 16, values.nbytes, datatype, (rows, 4))
    assert array.dtype == datatype.dtype
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, values)
    assert lease.place("y", "r", 40_000, 24_000).write(array[::-1]) == values.nbytes
    got = shm.get_contents_as_numpy(region, datatype.dtype, [rows, 4], offset=40_000)
    np.testing.assert_array_equal(got, values[::-1])
    del array, got
    lease.release()


def test_text_is_decoded_and_encoded(region: Any, memory: SharedMemory) -> None:
    values = np.array([[b"", b"a\0b", "é".encode(), b"x" * 300]], np.object_)
    wire = triton.serialize_byte_tensor(values)
    shm.set_shared_memory_region(region, [wire])
    lease = memory.lease()
    array = lease.array("r", 0, len(wire.item()), DataType.BYTES, (1, 4))
    assert array.tolist() == values.tolist()
    lease.place("y", "r", 4096, 4096).write(array)
    lease.release()
    assert shm.get_contents_as_numpy(region, np.object_, [1, 4], offset=4096).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("offset", "byte_size", "message"),
    [
        (BYTES, 0, "Invalid offset for shared memory region: 'r'"),
        (-1, 4, "Invalid offset for shared memory region: 'r'"),
        (2**63, 4, "Invalid offset for shared memory region: 'r'"),
        (4, BYTES, r"Invalid offset \+ byte size for shared memory region: 'r'"),
        (4, 2**64 - 4, r"Invalid offset \+ byte size for shared memory region: 'r'"),
        (0, -4, r"Invalid offset \+ byte size for shared memory region: 'r'"),
        ("0", 4, "Invalid offset for"),
        (0, None, "byte size for"),
    ],
)
def test_bounds_of_tensors(memory: SharedMemory, offset: Any, byte_size: Any, message: str) -> None:
    lease = memory.lease()
    with pytest.raises(InvalidArgument, match=message):
        lease.array("r", offset, byte_size, DataType.FP32, (1,))
    with pytest.raises(InvalidArgument, match=message):
        lease.place("y", "r", offset, byte_size)
    lease.release()


def test_a_size_that_is_not_the_shape_s_is_refused(memory: SharedMemory) -> None:
    lease = memory.lease()
    with pytest.raises(InvalidArgument, match="takes 8 bytes, but 12 bytes were given"):
        lease.array("r", 0, 12, DataType.FP32, (2,))
    with pytest.raises(InvalidArgument):
        lease.array("r", 0, 12, DataType.FP32, (2**40, 2**40))
    lease.release()


def test_an_output_that_does_not_fit_is_refused_and_nothing_written(region: Any, memory: SharedMemory) -> None:
    lease = memory.lease()
    with pytest.raises(InvalidArgument, match=r"with the request \(12 bytes\) should be at least 16 bytes to hold"):
        lease.place("y", "r", 0, 12).write(np.ones(4, np.float32))
    lease.release()
    assert bytes(shm.get_contents_as_numpy(region, np.uint8, [16])) == bytes(16)


def test_what_is_copied_counts_until_the_request_ends() -> None:
    """A region can be far larger than memory, since pages that were never written take none."""
    key, size = f"penstock-test-{uuid.uuid4().hex}", 1 << 40
    path = Path("/dev/shm", key)
    budget = ByteBudget(1 << 20)
    memory = SharedMemory(enabled=True, budget=budget)
    try:
        with path.open("xb") as file:
            file.truncate(size)
        memory.register("sparse", key, 0, size)
        lease, other = memory.lease(), memory.lease()
        assert lease.array("sparse", 0, 1 << 20, DataType.UINT8, (1 << 20,)).sum() == 0
        for taker, count in ((lease, 1), (other, 1 << 20), (other, size)):
            with pytest.raises(Unavailable):
                taker.array("sparse", 0, count, DataType.UINT8, (count,))
        for _ in range(2):
            lease.release()
        assert budget.used == 0
        assert len(other.array("sparse", 0, 1 << 20, DataType.UINT8, (1 << 20,))) == 1 << 20
        other.release()
    finally:
        memory.close()
        path.unlink()


def cut(region: Any, size: int) -> None:
    os.truncate(f"/dev/shm{region.key}", size)


@pytest.mark.parametrize("size", [32768, LARGE])
def test_an_input_stays_as_it_was_read(region: Any, memory: SharedMemory, size: int) -> None:
    """A client that changes its region while the model runs must not change what was checked."""
    lease = memory.lease()
    array = lease.array("large", 0, size, DataType.UINT8, (size,))
    asyncio.run(lease.fill())
    shm.set_shared_memory_region(region, [np.ones(size, np.uint8)])
    cut(region, 0)
    assert not array.any()
    lease.release()


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        (DataType.FP32, np.arange(LARGE // 4, dtype=np.float32)),
        (DataType.BOOL, np.arange(LARGE) % 3 == 0),
        (DataType.BYTES, np.array([b"x" * 100] * 200, np.object_)),
    ],
)
def test_large_inputs_are_read_by_fill(region: Any, memory: SharedMemory, datatype: DataType, values: Any) -> None:
    wire = to_wire(values)
    shm.set_shared_memory_region(region, [np.frombuffer(wire, np.uint8)])
    lease = memory.lease()
    array = lease.array("large", 0, len(wire), datatype, values.shape)
    assert lease.is_unread
    asyncio.run(lease.fill())
    assert not lease.is_unread
    assert array.tolist() == values.tolist()
    assert not array.flags.writeable
    lease.release()


def test_many_small_inputs_count_as_a_large_one(memory: SharedMemory) -> None:
    lease = memory.lease()
    for _ in range(HERE_BYTES // BYTES):
        lease.array("large", 0, BYTES, DataType.UINT8, (BYTES,))
    assert not lease.is_unread
    lease.array("large", 0, 1, DataType.UINT8, (1,))
    assert lease.is_unread
    lease.release()


@pytest.mark.parametrize(
    ("datatype", "content", "message"),
    [
        (DataType.BOOL, b"\2" * LARGE, "must be the byte 0 or 1"),
        (DataType.BYTES, b"\xff" * LARGE, "BYTES element 0 declares"),
    ],
)
def test_wrong_elements_are_found_by_fill(
    region: Any, memory: SharedMemory, datatype: DataType, content: bytes, message: str
) -> None:
    shm.set_shared_memory_region(region, [np.frombuffer(content, np.uint8)])
    lease = memory.lease()
    lease.array("large", 0, LARGE, datatype, (LARGE if datatype is DataType.BOOL else 1,))
    with pytest.raises(InvalidArgument, match=message):
        asyncio.run(lease.fill())
    lease.release()


def test_elements_that_cannot_fit_are_refused_before_they_are_allocated(memory: SharedMemory) -> None:
    lease = memory.lease()
    with pytest.raises(InvalidArgument, match="BYTES elements do not fit in 8 bytes"):
        lease.array("r", 0, 8, DataType.BYTES, (1 << 40,))
    lease.release()


def test_a_region_cut_off_is_an_error_that_names_it(region: Any, memory: SharedMemory) -> None:
    lease, other = memory.lease(), memory.lease()
    lease.array("large", 0, LARGE, DataType.UINT8, (LARGE,))
    place = lease.place("y", "large", 0, LARGE)
    cut(region, 100)
    with pytest.raises(InvalidArgument, match="region 'large' is smaller than at its registration"):
        asyncio.run(lease.fill())
    with pytest.raises(InvalidArgument, match="region 'r' is smaller than at its registration"):
        other.array("r", 0, 4096, DataType.UINT8, (4096,))
    other.release()
    with pytest.raises(InvalidArgument, match="region 'large' is smaller than at its registration"):
        place.write(np.ones(LARGE, np.uint8))
    lease.release()


def test_regions_stay_open_while_a_thread_reads_them(region: Any, memory: SharedMemory) -> None:
    async def story() -> None:
        lease = memory.lease()
        array = lease.array("large", 0, LARGE, DataType.UINT8, (LARGE,))
        filling = asyncio.ensure_future(lease.fill())
        await asyncio.sleep(0)
        lease.release()
        memory.forget("large")
        await filling
        await memory.closed("large")
        assert not array.any()

    asyncio.run(story())


def ask_to_store(lease: Lease, outcome: Outcome) -> list[Outcome]:
    """The outcome that ``done`` received, after the writing thread has ended."""
    found: list[Outcome] = []

    async def story() -> None:
        answered = asyncio.Event()

        def done(outcome: Outcome) -> None:
            found.append(outcome)
            answered.set()

        lease.storing(done)(outcome)
        if isinstance(outcome, InferResponse) and outcome.outputs["y"].nbytes > HERE_BYTES:
            assert not found, "the event loop does not wait for the copy"
        await answered.wait()

    asyncio.run(story())
    return found


@pytest.mark.parametrize("size", [16, LARGE])
def test_outputs_are_in_their_places_once_the_answer_is_encoded(region: Any, memory: SharedMemory, size: int) -> None:
    lease = memory.lease()
    place = lease.place("y", "large", 0, size)
    answer = InferResponse("m", "1", {"y": np.ones(size, np.uint8), "z": np.zeros(1)})
    assert ask_to_store(lease, answer) == [answer]
    assert place.write(answer.outputs["y"]) == (size if size == 16 else 0), "a large one is written before"
    assert shm.get_contents_as_numpy(region, np.uint8, [size]).all()
    lease.release()


def test_an_output_that_cannot_be_stored_fails_when_it_is_encoded(region: Any, memory: SharedMemory) -> None:
    lease = memory.lease()
    place = lease.place("y", "large", 0, LARGE)
    cut(region, 0)
    answer = InferResponse("m", "1", {"y": np.ones(LARGE, np.uint8)})
    assert ask_to_store(lease, answer) == [answer]
    with pytest.raises(InvalidArgument, match="region 'large' is smaller"):
        place.write(answer.outputs["y"])
    lease.release()


def test_errors_pass_by(memory: SharedMemory) -> None:
    lease = memory.lease()
    lease.place("y", "large", 0, LARGE)
    error = PenstockError("no")
    assert ask_to_store(lease, error) == [error]
    lease.release()
