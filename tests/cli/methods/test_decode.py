from __future__ import annotations

from pathlib import Path

import models


def test_a_damaged_coded_file(penstock, folder: Path) -> None:
    (folder / "wide.onnx").write_bytes(models.linear(64, 64).data)
    assert penstock("share", "wide.onnx", "-o", "shared.onnx", "--coded", "model.coded").code == 0
    data = bytearray((folder / "model.coded").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.coded").write_bytes(data)
    done = penstock("share", "model.coded", "--decode", "-o", "back.onnx")
    assert done.code == 5
    assert "was changed" in done.err
    assert not (folder / "back.onnx").exists()
    # Making it again, as that says, needs no --force.
    assert penstock("share", "wide.onnx", "-o", "shared.onnx", "--coded", "model.coded").code == 0
    assert penstock("share", "model.coded", "--decode", "-o", "back.onnx").code == 0
