from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidConfig
from penstock.online.repository.loading.scheduling import sequencing
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.online.scheduler.sequences.batcher import SequencingConfig
from penstock.online.scheduler.sequences.controls import ControlKind
from penstock.tensor import DataType, Signature, TensorSpec

FLAG = {"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}
STATE = {"input_name": "s_in", "output_name": "s_out", "data_type": "TYPE_FP32", "dims": [-1, 2]}
ZEROS = {"name": "i", "data_type": "TYPE_FP32", "dims": [1, 2], "zero_data": True}


def signature(
    first: tuple[int, ...] = (-1,), flag: tuple[int, ...] = (1,), kind: DataType = DataType.FP32
) -> Signature:
    inputs = (
        TensorSpec("x", DataType.FP32, (*first, 2)),
        TensorSpec("flag", DataType.INT32, (*first, *flag)),
        TensorSpec("s_in", kind, (*first, -1, 2)),
    )
    return Signature(inputs, (TensorSpec("y", DataType.FP32, (*first, 2)), TensorSpec("s_out", kind, (*first, -1, 2))))


def read(
    folder: Path = Path(),
    model: Signature | None = None,
    max_batch: int = 8,
    more: Mapping[str, Any] | None = None,
    **fields: Any,
) -> SequencingConfig:
    model = model or signature()
    wanted = {"control_input": [{"name": "flag", "control": [FLAG]}], "state": [STATE], **fields}
    given = parse("m", {"max_batch_size": max_batch, "sequence_batching": wanted, **(more or {})})
    config = complete(given, "m", "fake", model, max_batch or None, 2)
    return sequencing(config, model, folder, 100)


def test_what_is_left_open() -> None:
    config = read()
    assert config.fixed
    assert (config.slots, config.instances, config.idle_us) == (8, 2, 1_000_000)
    assert config.batching.max_queue == 100
    assert config.batching.preferred_batch_size == ()
    assert config.hidden == {"s_out"}
    assert not config.batching.stateful
    (control,) = config.controls
    assert (control.kind, control.datatype, control.shape) == (ControlKind.START, DataType.INT32, (1,))
    (state,) = config.states
    np.testing.assert_array_equal(state.initial, np.zeros((1, 1, 2), np.float32))


def test_oldest_is_dynamic_batching_of_candidates() -> None:
    oldest = {
        "max_candidate_sequences": 20,
        "preferred_batch_size": [4, 2],
        "max_queue_delay_microseconds": 100,
        "preserve_ordering": True,
    }
    config = read(oldest=oldest, max_sequence_idle_microseconds=5)
    assert not config.fixed
    assert (config.slots, config.idle_us) == (20, 5)
    batching = config.batching
    assert (batching.preferred_batch_size, batching.max_queue_delay_microseconds) == ((2, 4), 100)
    assert batching.preserve_ordering
    assert read(oldest={}).slots == 8


@pytest.mark.parametrize(
    ("share", "delay", "preferred"),
    [(0.3, 100, tuple(range(3, 11))), (1, 100, (10,)), (0, 100, ()), (0.5, 0, ())],
    ids=["third", "all", "none", "no-delay"],
)
def test_direct_waits_until_enough_slots_are_ready(share: float, delay: int, preferred: tuple[int, ...]) -> None:
    direct = {"minimum_slot_utilization": share, "max_queue_delay_microseconds": delay}
    batching = read(direct=direct, max_batch=10).batching
    assert batching.preferred_batch_size == preferred
    assert batching.max_queue_delay_microseconds == (delay if preferred else 0)


def test_a_model_that_keeps_its_states_is_stateful() -> None:
    assert read(state=[]).batching.stateful


def test_a_state_that_is_an_output_is_for_clients() -> None:
    output = {"name": "s_out", "data_type": "TYPE_FP32", "dims": [-1, 2]}
    assert read(more={"output": [output]}).hidden == frozenset()


def test_without_batches_nothing_has_a_batch_dimension() -> None:
    config = read(model=signature(first=()), max_batch=0)
    assert config.slots == 1
    assert not config.batching.batchable
    assert config.controls[0].shape == ()
    assert config.states[0].initial.shape == (1, 2)


def test_a_control_may_have_just_the_batch_dimension() -> None:
    assert read(model=signature(flag=())).controls[0].shape == ()


def test_an_initial_state_from_a_file(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "start").write_bytes(values.tobytes() + b"and more")
    initial = {**ZEROS, "dims": [3, 2], "data_file": "start"}
    del initial["zero_data"]
    (state,) = read(tmp_path, state=[{**STATE, "initial_state": [initial]}]).states
    np.testing.assert_array_equal(state.initial, values.reshape(1, 3, 2))


def test_text_may_be_a_state(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "start").write_bytes(b"\2\0\0\0ab\1\0\0\0c")
    state = {**STATE, "data_type": "TYPE_STRING"}
    initial = {"name": "i", "data_type": "TYPE_STRING", "dims": [1, 2], "data_file": "start"}
    model = signature(kind=DataType.BYTES)
    (found,) = read(tmp_path, model, state=[{**state, "initial_state": [initial]}]).states
    assert found.initial.tolist() == [[[b"ab", b"c"]]]
    assert read(model=model, state=[state]).states[0].initial.tolist() == [[[b"", b""]]]


def from_file(name: str) -> dict[str, Any]:
    return {
        "state": [
            {**STATE, "initial_state": [{"name": "i", "data_type": "TYPE_FP32", "dims": [1, 2], "data_file": name}]}
        ]
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"iterative_sequence": True}, "'sequence_batching.iterative_sequence' is not supported"),
        ({"oldest": {"max_candidate_sequences": 2**20}}, "allows 1048576 active sequences, more than 65536"),
        (
            {
                "control_input": [
                    {"name": "flag", "control": [{**FLAG, "int32_false_true": [], "fp32_false_true": [0, 1]}]}
                ]
            },
            r"'flag', FP32 of \[1, 1\], but the model has INT32 of \[-1, 1\]",
        ),
        ({"control_input": [{"name": "x", "control": [FLAG]}]}, r"'x', INT32 of \[1, 1\], but the model has FP32"),
        ({"state": [{**STATE, "output_name": "z"}]}, "'z', .*, but the model has no such tensor"),
        (
            {"state": [{**STATE, "dims": [-1, 3]}]},
            r"'s_in', FP32 of \[1, -1, 3\], but the model has FP32 of \[-1, -1, 2\]",
        ),
        ({"state": [{**STATE, "data_type": "TYPE_INT32"}]}, "'s_in', INT32 of .* but the model has FP32"),
        (from_file("absent"), "initial state of 's_in' is invalid: there is no file 'absent'"),
        (from_file("link"), "the file 'link' is outside the model's folder 'initial_state'"),
        (from_file("folder"), "there is no file 'folder'"),
        (from_file("short"), "initial state of 's_in' is invalid: .*takes 8 bytes, but 3 bytes were given"),
        (
            {"state": [{**STATE, "initial_state": [{**ZEROS, "dims": [2**40, 2]}]}]},
            "initial state of 's_in' is invalid: it takes .* bytes, more than",
        ),
    ],
    ids=[
        "iterative",
        "slots",
        "kind",
        "shape",
        "unknown",
        "dims",
        "type",
        "absent",
        "link",
        "folder",
        "short",
        "large",
    ],
)
def test_what_cannot_be_is_refused_with_its_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    home = tmp_path / "initial_state"
    (home / "folder").mkdir(parents=True)
    (home / "short").write_bytes(b"abc")
    (tmp_path / "outside").write_bytes(bytes(8))
    (home / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidConfig, match=rf"^model 'm': .*{message}"):
        read(tmp_path, **fields)


def test_a_model_that_is_given_single_requests_has_slots_but_no_rows() -> None:
    given = parse("m", {"max_batch_size": 8, "sequence_batching": {"direct": {}}})
    model = signature()
    config = sequencing(complete(given, "m", "fake", model, 8, 1), model, Path(), 100, merges=False)
    assert not config.fixed
    assert config.slots == 8


def test_a_decoupled_model_keeps_its_states_itself() -> None:
    given = parse("m", {"max_batch_size": 8, "sequence_batching": {"direct": {}}})
    model = signature()
    config = complete(given, "m", "fake", model, 8, 1, decoupled=True)
    with pytest.raises(InvalidConfig, match="of a decoupled model must be 'oldest', without 'state'"):
        sequencing(config, model, Path(), 100)
