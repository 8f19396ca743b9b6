"""Write a web page that reads digits in the browser, with the model and the labels of the bundle of ``examples/digits_pipeline``.

npm install onnxruntime-web
python examples/browser/site.py digits/digits.bundle --runtime node_modules/onnxruntime-web/dist --output site
python -m http.server --directory site
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from penstock.bundle.pipeline import open_pipeline

PAGE = Path(__file__).parent / "index.html"
RUNTIME = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""The files of onnxruntime-web that run models on the CPU."""


def write(bundle: Path, runtime: Path, folder: Path) -> None:
    """Write the page, the runtime, and the model of ``bundle`` with its labels to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = open_pipeline(bundle)
    (model,) = pipeline.models.values()
    (labels,) = pipeline.resources.labels.values()
    (image,) = model.manifest.signature.inputs
    (folder / "model.onnx").write_bytes(model.artifact(model.manifest.variants[0]).data)
    facts = {"inputs": [image.name], "labels": labels, "size": image.shape[-1]}
    (folder / "pipeline.json").write_text(json.dumps(facts))
    for source in (PAGE, *(runtime / name for name in RUNTIME)):
        shutil.copyfile(source, folder / source.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a web page that reads digits in the browser.")
    parser.add_argument("bundle", type=Path, help="bundle of the digits pipeline")
    parser.add_argument("--runtime", type=Path, required=True, help="folder dist of the npm package onnxruntime-web")
    parser.add_argument("--output", type=Path, default=Path("site"), help="folder to write to")
    arguments = parser.parse_args()
    write(arguments.bundle, arguments.runtime, arguments.output)
    print(f"wrote {arguments.output}; serve it with: python -m http.server --directory {arguments.output}")
