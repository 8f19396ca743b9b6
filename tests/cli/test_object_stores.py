"""Addresses of object stores, wherever a command takes a path."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--model-repository", "s3://bucket/models"),
        ("serve", "gs://bucket/net.bundle"),
        ("tritonserver", "--model-repository=as://account/models"),
        ("doctor", "s3://bucket/models"),
        ("inspect", "s3://bucket/net.bundle"),
        ("infer", "s3://bucket/net.bundle", "--inputs", "data.npz"),
        ("infer", "linear.onnx", "--inputs", "s3://bucket/data.npz"),
        ("infer", "linear.onnx", "--inputs", "data.npz", "--outputs", "s3://bucket/out.npz"),
        ("build", "s3://bucket/net.onnx", "-o", "net.bundle", "--evaluate", "data.npz"),
        ("build", "linear.onnx", "-o", "s3://bucket/net.bundle", "--evaluate", "data.npz"),
        ("quantize", "linear.onnx", "-o", "s3://bucket/out.onnx", "--calibrate", "data.npz"),
        ("share", "s3://bucket/net.coded", "--decode", "-o", "out.onnx"),
    ],
    ids=" ".join,
)
def test_an_object_store_is_called_what_it_is(penstock, folder: Path, arguments: tuple[str, ...]) -> None:
    before = sorted(folder.iterdir())
    done = penstock(*arguments)
    assert done.code == (1 if arguments[0] == "tritonserver" else 2)
    assert "is in an object store: object stores and URLs are not supported yet" in done.err
    assert "fix: copy it to a folder on this machine" in done.err
    assert sorted(folder.iterdir()) == before
