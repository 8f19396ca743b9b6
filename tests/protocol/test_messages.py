import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.protocol import messages

ROOT = Path(__file__).parents[2]


def test_the_committed_descriptors_are_those_of_the_schema(tmp_path: Path) -> None:
    made = tmp_path / "descriptors"
    files = sorted(str(file) for file in (ROOT / "proto").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}", "--descriptor_set_out"]
    subprocess.run([*command, made, *files], check=True, timeout=60)
    committed = (ROOT / "src/penstock/protocol" / messages.DESCRIPTORS).read_bytes()
    assert FileDescriptorSet.FromString(made.read_bytes()) == FileDescriptorSet.FromString(committed), (
        "run `make proto`"
    )


def shape_of(descriptor) -> object:
    """The wire contract of a message: its fields by number."""
    return {
        field.number: (
            field.name,
            field.type,
            field.is_repeated,
            field.is_packed,
            # One of a single field is how presence is written down; it does not travel.
            oneof.name if (oneof := field.containing_oneof) and len(oneof.fields) > 1 else "",
            field.message_type.full_name if field.message_type else "",
            {value.name: value.number for value in field.enum_type.values} if field.enum_type else {},
        )
        for field in descriptor.fields
    } | {nested.name: shape_of(nested) for nested in descriptor.nested_types}


@pytest.mark.parametrize("theirs", [service_pb2, model_config_pb2])
def test_the_schema_contains_the_public_one(theirs) -> None:
    ours = messages.POOL.FindFileByName(theirs.DESCRIPTOR.name)
    for name, descriptor in theirs.DESCRIPTOR.message_types_by_name.items():
        assert shape_of(ours.message_types_by_name[name]) == shape_of(descriptor)
    for name, service in theirs.DESCRIPTOR.services_by_name.items():
        assert rpcs_of(service) <= rpcs_of(ours.services_by_name[name])


def rpcs_of(service) -> set[tuple[object, ...]]:
    return {
        (rpc.name, rpc.input_type.full_name, rpc.output_type.full_name, rpc.client_streaming, rpc.server_streaming)
        for rpc in service.methods
    }


def test_every_class_is_that_of_its_message() -> None:
    classes = {name: value for name, value in vars(messages).items() if hasattr(value, "DESCRIPTOR") and name[0] != "_"}
    del classes["FileDescriptorSet"]
    assert {"ModelInferRequest", "ModelInferResponse", "ModelConfig"} < classes.keys()
    assert all(name == value.DESCRIPTOR.name for name, value in classes.items())


@pytest.mark.parametrize(
    "imports",
    [("penstock.protocol.messages", "tritonclient.grpc"), ("tritonclient.grpc", "penstock.protocol.messages")],
)
def test_lives_beside_the_generated_code_of_a_client(imports: tuple[str, str]) -> None:
    check = (
        "from penstock.protocol import messages; from tritonclient.grpc import service_pb2;"
        "theirs = service_pb2.ModelInferRequest(id='7', raw_input_contents=[b'x']);"
        "ours = messages.ModelInferRequest.FromString(theirs.SerializeToString());"
        "assert ours.id == '7' and type(ours) is not type(theirs)"
    )
    program = "; ".join([*(f"import {name}" for name in imports), check])
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
