"""What an archive of torch says: TorchScript's code as text, or the graph of an exported program as JSON. Nothing is executed, and
torch itself is not needed.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.artifact import Artifact, Format
from penstock.engines.torch_archive import check_kind, check_script, record_names
from penstock.errors import InvalidModel
from penstock.offline.look.facts import FileFacts, TensorFacts, sorted_counts

_TYPES = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
"""Names of the numbers in an exported program."""
_CALL = re.compile(r"\b(?:torch|ops\.\w+)\.(\w+)\(")
_NO_OPERATORS = frozenset({"annotate", "list_with_default", "unchecked_cast", "device", "uninitialized"})
_GLOBALS = ("GLOBAL", "STACK_GLOBAL")


def read(artifact: Artifact) -> FileFacts:
    """Read the file. Raises InvalidModel."""
    names = record_names(artifact.data)
    is_script = artifact.format is Format.TORCHSCRIPT
    (check_script if is_script else check_kind)(names)
    try:
        with zipfile.ZipFile(io.BytesIO(artifact.data)) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}

            def load(name: str) -> bytes:
                return archive.read(records[name])

            stored = sum(
                info.file_size
                for name, info in records.items()
                if name.startswith(("data/", "constants/", "weights/")) and not name.endswith((".pkl", ".json", ".pt"))
            )
            return _script(records, load, stored) if is_script else _program(load, stored)
    except InvalidModel:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, zipfile.BadZipFile) as error:
        raise InvalidModel(f"the torch archive is corrupt: {error}", "save the model again") from None


def _script(records: Mapping[str, object], load: Any, stored: int) -> FileFacts:
    code = {name: load(name).decode() for name in records if name.startswith("code/") and name.endswith(".py")}
    operators = Counter(
        call
        for text in code.values()
        for call in _CALL.findall(text)
        if call not in _NO_OPERATORS and call[0].islower()
    )
    return FileFacts(
        _script_inputs(_main_class(load("data.pkl")), code),
        operators=sorted_counts(operators),
        weight_bytes=stored,
        notes=("a TorchScript file contains no types and shapes of inputs and outputs",),
    )


def _main_class(pickled: bytes) -> str:
    """The name of the model's class: the first name in the pickle, which is not loaded."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _GLOBALS and argument is not None:
            return str(argument).replace(" ", ".")
        if isinstance(argument, str) and argument.startswith("__torch__"):
            return argument
    return ""


def _script_inputs(name: str, code: Mapping[str, str]) -> tuple[TensorFacts, ...]:
    """The arguments of the method ``forward`` of the class ``name``."""
    path, _, title = name.rpartition(".")
    text = code.get(f"code/{path.replace('.', '/')}.py", "")
    found = re.search(
        rf"^class {re.escape(title)}\(Module\):.*?^  def forward\(self: [^,)]+,?\s*(.*?)\) ->",
        text,
        re.DOTALL | re.MULTILINE,
    )
    arguments = re.findall(r"(\w+): (\w+)", found[1]) if found else []
    return tuple(TensorFacts(each, kind, None) for each, kind in arguments)


def _program(load: Any, stored: int) -> FileFacts:
    program = json.loads(load("models/model.json"))
    graph, signature = program["graph_module"]["graph"], program["graph_module"]["signature"]
    values = graph["tensor_values"]
    inputs = [one["user_input"]["arg"] for one in signature["input_specs"] if "user_input" in one]
    outputs = [one["user_output"]["arg"] for one in signature["output_specs"] if "user_output" in one]
    weights = [
        one[kind]["arg"]["name"]
        for one in signature["input_specs"]
        for kind in ("parameter", "buffer", "tensor_constant")
        if kind in one
    ]
    operators = Counter(node["target"].removeprefix("torch.ops.") for node in graph["nodes"])
    return FileFacts(
        tuple(_tensor(arg["as_tensor"]["name"], values) for arg in inputs if "as_tensor" in arg),
        tuple(_tensor(arg["as_tensor"]["name"], values) for arg in outputs if "as_tensor" in arg),
        operators=sorted_counts(operators),
        parameters=sum(math.prod(_shape(values[name])) for name in weights if name in values),
        weight_bytes=stored,
    )


def _tensor(name: str, values: Mapping[str, Any]) -> TensorFacts:
    number = values[name]["dtype"]
    return TensorFacts(name, _TYPES.get(number, f"type {number}"), _shape(values[name]))


def _shape(value: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(size.get("as_int", -1) for size in value["sizes"])
