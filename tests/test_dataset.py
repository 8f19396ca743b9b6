"""Datasets: splits, digests, calls of samples of one or several sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset import Dataset, Separate, digest_of, make_dataset
from penstock.errors import InvalidData, Unsupported
from penstock.tensor import Array

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def ragged(lengths: list[int], joins: bool = True) -> Dataset:
    """Samples ``x`` of different lengths; the elements of each are its number."""
    kinds: dict[int, int] = {}
    arrays = [np.full(length, number, np.float32) for number, length in enumerate(lengths)]
    places = np.array([kinds.setdefault(length, len(kinds)) for length in lengths])
    digests = np.array([np.frombuffer(digest_of({"x": array}), np.uint8) for array in arrays])
    shapes = [{"x": (length,)} for length in kinds]
    return Dataset(Separate(lambda number: {"x": arrays[number]}, places, shapes, digests), joins=joins)


def test_the_digest_names_the_content() -> None:
    same = make_dataset({"x": X}, None).digest
    assert make_dataset({"x": X.copy(order="F")}, None).digest == same
    others = [
        make_dataset({"x": X + 1}, None),
        make_dataset({"z": X}, None),
        make_dataset({"x": X.reshape(3, 4)}, None),
        make_dataset({"x": X}, np.arange(4)),
    ]
    assert len({same, *(other.digest for other in others)}) == 5


@given(st.integers(2, 200), st.floats(0, 1), st.sampled_from([1, 2, 5]))
def test_a_split_loses_nothing_and_leaves_both_parts(parts: int, held_out: float, multiple: int) -> None:
    count = parts * multiple
    data = make_dataset({"x": np.arange(count)}, np.arange(count))
    first, second = data.split(held_out, multiple)
    np.testing.assert_array_equal(np.concatenate([first.inputs["x"], second.inputs["x"]]), data.inputs["x"])
    np.testing.assert_array_equal(first.labels, first.inputs["x"])
    for part in (first, second):
        assert part.count >= multiple
        assert part.count % multiple == 0
    assert first.digest != second.digest


@given(st.integers(2, 20), st.floats(0.05, 0.95), st.integers(1, 4), st.integers(0, 9))
def test_a_shuffled_split_loses_less_than_a_block_and_leaves_both_parts(
    parts: int, held_out: float, multiple: int, seed: int
) -> None:
    count = parts * multiple + seed % multiple
    data = make_dataset({"x": np.arange(count)}, np.arange(count) % 3)
    first, second = data.split_shuffled(held_out, multiple, seed)
    rows = np.concatenate([first.inputs["x"], second.inputs["x"]])
    assert len(set(rows.tolist())) == len(rows) > count - multiple
    for part in (first, second):
        assert part.count >= multiple
        assert part.count % multiple == 0
        np.testing.assert_array_equal(part.labels, part.inputs["x"] % 3)
        assert (np.diff(part.inputs["x"]) > 0).all()
    assert second.digest == data.split_shuffled(held_out, multiple, seed)[1].digest


def test_a_shuffled_split_has_every_class_in_proportion() -> None:
    """Sorted data, whose last fifth has a single class."""
    labels = np.repeat([0, 1, 2], [100, 50, 20])
    fitted, held = make_dataset({"x": np.arange(170)}, labels).split_shuffled(0.2)
    assert held.labels is not None
    np.testing.assert_allclose(np.bincount(held.labels), [20, 10, 4], atol=1)
    assert fitted.count == 136
    other = make_dataset({"x": np.arange(170)}, labels).split_shuffled(0.2, seed=1)[1]
    assert other.digest != held.digest


def test_classes_are_labels_of_one_number_per_sample() -> None:
    assert make_dataset({"x": X}, np.arange(4)).classes is not None
    for labels in (None, np.ones(4, np.float32), np.ones((4, 2), int), np.array(list("abcd"))):
        assert make_dataset({"x": X}, labels).classes is None


def test_a_split_follows_the_share() -> None:
    data = make_dataset({"x": np.arange(10)}, None)
    assert [part.count for part in data.split(0.2)] == [8, 2]


@pytest.mark.parametrize(("count", "multiple"), [(1, 1), (4, 4)])
def test_too_little_to_split(count: int, multiple: int) -> None:
    with pytest.raises(InvalidData, match="cannot be split") as raised:
        make_dataset({"x": np.arange(count)}, None).split(0.2, multiple)
    assert f"at least {2 * multiple} samples" in raised.value.hint


@given(st.integers(1, 5), st.integers(0, 60))
def test_every_fourth_block_is_held_out(multiple: int, blocks: int) -> None:
    count = multiple * blocks
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    data = make_dataset({"x": x}, np.arange(count))
    if blocks < 2:
        with pytest.raises(InvalidData, match="cannot be split"):
            data.split_evenly(4, multiple)
        return
    fitted, held = data.split_evenly(4, multiple)
    assert fitted.labels is not None
    assert held.labels is not None
    assert sorted([*fitted.labels, *held.labels]) == list(range(count))
    assert fitted.count % multiple == held.count % multiple == 0
    assert (held.inputs["x"][:, 0] == held.labels).all()
    expected = [n for n in range(count) if (n // multiple) % min(4, blocks) == min(4, blocks) - 1]
    assert held.labels.tolist() == expected


def test_sorted_data_leave_all_classes_on_both_sides() -> None:
    labels = np.repeat(np.arange(10), 20)
    fitted, held = make_dataset({"x": np.zeros((200, 1), np.float32)}, labels).split_evenly(4)
    assert fitted.labels is not None
    assert held.labels is not None
    assert set(fitted.labels) == set(held.labels) == set(range(10))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_every_sample_is_in_one_call_with_others_of_its_shape(lengths: list[int], rows: int, joins: bool) -> None:
    data, seen = ragged(lengths, joins), list[int]()
    for samples, inputs in data.calls(rows):
        assert 1 <= len(samples) <= (rows if joins else 1)
        assert len({lengths[sample] for sample in samples}) == 1
        wanted = np.repeat(samples[:, np.newaxis], lengths[samples[0]], axis=1)
        np.testing.assert_array_equal(inputs["x"], wanted if joins else wanted[0])
        seen += samples.tolist()
    assert sorted(seen) == list(range(len(lengths)))
    assert [samples.tolist() for samples in data.call_samples(rows)] == [
        call.samples.tolist() for call in data.calls(rows)
    ]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 6))
def test_a_mix_stands_for_all_samples(lengths: list[int], most: int) -> None:
    calls = ragged(lengths).mix(2, most)
    assert len(calls) == min(most, len(set(lengths))) or len(set(lengths)) > most >= len(calls)
    assert sum(call.share for call in calls) == pytest.approx(1)
    found = [call.inputs["x"].shape for call in calls]
    assert found == sorted(found)
    assert all(rows == 2 and length in lengths for rows, length in found)
    if len(set(lengths)) <= most:
        for call in calls:
            assert call.share == pytest.approx(lengths.count(call.inputs["x"].shape[1]) / len(lengths))


def test_groups_of_sizes_have_about_equally_many_samples() -> None:
    lengths = list(range(1, 501)) * 20
    calls = ragged(lengths).mix(1, 5)
    assert [call.share for call in calls] == pytest.approx([0.2] * 5, abs=0.01)
    assert [call.inputs["x"].shape[1] for call in calls] == pytest.approx([50, 150, 250, 350, 450], abs=3)


def test_parts_read_only_their_samples() -> None:
    read = list[int]()

    def load(number: int) -> dict[str, Array]:
        read.append(number)
        return {"x": np.full(2, number)}

    source = Separate(load, np.zeros(10, np.intp), [{"x": (2,)}], np.zeros((10, 16), np.uint8))
    fitted, held = Dataset(source, np.arange(10)).split_evenly(5)
    assert not read
    np.testing.assert_array_equal(held.rows(0, 2)["x"], [[4, 4], [9, 9]])
    assert read == [4, 9]
    assert held.labels is not None
    assert held.labels.tolist() == [4, 9]
    assert fitted.pick_evenly(2).numbers.tolist() == [0, 8]


def test_stacked_samples_in_order_are_views() -> None:
    data = make_dataset({"x": X}, None)
    assert np.shares_memory(data.rows(1, 3)["x"], X)
    assert np.shares_memory(next(data.calls(2)).inputs["x"], X)
    assert not np.shares_memory(data.pick(np.array([0, 2])).inputs["x"], X)


def test_a_call_repeats_the_most_frequent_samples() -> None:
    data = ragged([1, 3, 2, 3])
    np.testing.assert_array_equal(data.call(3)["x"][:, 0], [1, 3, 1])
    assert data.alike().numbers.tolist() == [1, 3]
    np.testing.assert_array_equal(ragged([1, 3, 2, 3], joins=False).call(3)["x"], [1, 1, 1])


def test_the_largest_call_is_of_all_its_samples() -> None:
    assert ragged([2] * 9 + [7]).largest(4).samples.tolist() == [0, 1, 2, 3]
    assert ragged([2] * 9 + [7]).largest(3).samples.tolist() == [9]
    assert ragged([2] * 9 + [7], joins=False).largest(4).samples.tolist() == [9]
    assert ragged([2] * 9 + [7]).sample_bytes == 4 * 25 / 10


def test_samples_of_several_sizes_do_not_stack() -> None:
    for data, cause in ((ragged([1, 2]), "samples of 2 sizes"), (ragged([1, 1], joins=False), "a whole call")):
        assert not data.stacks
        with pytest.raises(Unsupported, match=cause):
            _ = data.inputs
    assert ragged([3, 3]).inputs["x"].shape == (2, 3)


def test_a_sample_that_changes_in_use_is_found() -> None:
    arrays = [np.zeros(2), np.zeros(2)]
    data = Dataset(
        Separate(lambda number: {"x": arrays[number]}, np.zeros(2, int), [{"x": (2,)}], np.zeros((2, 16), np.uint8))
    )
    arrays[1] = np.zeros(3)
    with pytest.raises(InvalidData, match="sample 1 has changed"):
        data.rows(0, 2)


def test_labels_tell_copies_apart() -> None:
    data = make_dataset({"x": np.zeros((3, 2))}, np.array([1, 2, 1]))
    assert len(np.unique(data.digests(), axis=0)) == 1
    assert len(np.unique(data.digests(labelled=True), axis=0)) == 2


@given(st.integers(1, 100), st.integers(1, 200), st.sampled_from([1, 2, 5]))
def test_a_few_samples_are_whole_batches_from_all_of_the_data(blocks: int, most: int, multiple: int) -> None:
    data = make_dataset({"x": np.arange(blocks * multiple, dtype=np.float32)[:, None]}, None)
    few = data.few(most, multiple)
    assert few.count % multiple == 0
    assert few.count == multiple * max(1, min(most, data.count) // multiple)
    found = few.inputs["x"][:, 0]
    assert found[0] == 0
    assert len(set(found)) == few.count
    assert few.count == 1 or found[-1] == data.count - 1


@pytest.mark.parametrize(("shape", "rows"), [((8,), 64), ((3, 512, 512), 1), ((3, 128, 128), 21)])
def test_a_batch_of_large_samples_has_fewer_of_them(shape: tuple[int, ...], rows: int) -> None:
    data = make_dataset({"x": np.zeros((2, *shape), np.float32)}, None)
    assert data.fitting(64) == rows
    assert data.fitting(2 * rows, 1 << 40) == 2 * rows
    assert ragged([3, 1 << 23]).fitting(64) == 1
