import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from infer_requests import AN_EMPTY_GROUP, parse, raw_request, wire_messages
from penstock.errors import InvalidArgument
from penstock.online.server.grpc.request_wire import between, split


@given(st.one_of(wire_messages(), st.binary(max_size=40)))
def test_taking_apart_loses_nothing(data: bytes) -> None:
    whole, parts = parse(data), split(data)
    if parts is None:
        return
    joined = parse(parts.rest)
    start, end = parts.identity
    try:
        identity = data[start:end].decode()
    except UnicodeDecodeError:
        assert whole is None
        return
    if joined is None:
        assert whole is None
    else:
        joined.id = identity
        joined.raw_input_contents.extend(data[start:end] for start, end in parts.raw)
        typed = [tensor for tensor in joined.inputs if tensor.HasField("contents")]
        for tensor, (start, end) in zip(typed, parts.contents, strict=True):
            assert not tensor.contents.ByteSize(), "the elements are not left in the rest"
            try:
                tensor.contents.MergeFromString(data[start:end])
            except DecodeError:
                assert whole is None
                return
        assert whole is not None
        assert joined.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)


def test_a_message_of_countless_parts_is_refused_before_it_is_built() -> None:
    for data in (b"\x2a\x00" * 10_000, b"\x40\x01" * 10_000, b"\x3a\x00" * 10_000):
        with pytest.raises(InvalidArgument, match="more than 4096 fields"):
            split(data)


def test_messages_of_every_client_are_taken_apart() -> None:
    data = raw_request([np.zeros(2, np.float32)] * 2, id="7").SerializeToString()
    parts = split(data)
    assert parts is not None
    assert data[slice(*parts.identity)] == b"7"
    assert [end - start for start, end in parts.raw] == [8, 8]


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05m",
        b"\xff",
        b"\x0b\x0c",
        b"\x08\x01",
        b"\x1a\xff\xff\xff\xff\xff\x01",
        b"\x1a\x01a" * 2,
        AN_EMPTY_GROUP,
    ],
)
def test_what_is_cut_off_or_unusual_is_left_to_the_protobuf_class(data: bytes) -> None:
    assert split(data) is None


@given(st.binary(max_size=20), st.lists(st.integers(0, 20), max_size=6))
def test_between_finds_all_but_the_holes(data: bytes, edges: list[int]) -> None:
    edges = sorted(min(edge, len(data)) for edge in edges)
    holes = list(zip(edges[::2], edges[1::2], strict=False))
    found = between(data, holes)
    assert all(data[start:end] == content for start, end, content in found)
    covered = sorted([*holes, *((start, end) for start, end, _ in found)])
    assert b"".join(data[start:end] for start, end in covered) == data
