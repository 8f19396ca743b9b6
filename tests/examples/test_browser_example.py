"""The page of the browser example gives the answers of the bundle, in a real Chromium with the onnxruntime-web of npm."""

from __future__ import annotations

import json
import subprocess
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from benchmarks.pipelines.scripts import script
from browsers import PATIENCE_S, Browser
from penstock.runtime import Pipeline
from real import require

pytestmark = pytest.mark.real

PACKAGE = "onnxruntime-web@1.30.0"
ASK = """<script type="module">
while (!document.documentElement.dataset.ready) await new Promise(done => setTimeout(done, 50));
const answers = [];
for (let digit = 0; digit < 10; digit++) answers.push(await read(await (await fetch(`${digit}.png`)).blob()));
const odd = await createImageBitmap(new ImageData(13, 8)), canvas = new OffscreenCanvas(13, 8);
canvas.getContext("bitmaprenderer").transferFromImageBitmap(odd);
const error = await read(await canvas.convertToBlob()).catch(error => error.message);
await fetch("/report", { method: "POST", body: JSON.stringify({ answers, error }) });
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, and keeps what is posted."""

    def __init__(self, reports: Queue[Any], *arguments: Any, **options: Any) -> None:
        self._reports = reports
        super().__init__(*arguments, **options)

    def do_POST(self) -> None:
        self._reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder ``dist`` of onnxruntime-web. Skips where npm cannot get it."""
    folder = tmp_path_factory.mktemp("npm")
    got = subprocess.run([require("npm"), "pack", PACKAGE], cwd=folder, capture_output=True, check=False, timeout=90)
    if got.returncode:
        pytest.skip(f"npm cannot get {PACKAGE}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "package" / "dist"


def test_the_page_gives_the_answers_of_the_bundle(runtime: Path, tmp_path: Path) -> None:
    with script("digits_pipeline/digits.py") as example:
        bundle = example["write"](tmp_path / "site")
    with script("browser/site.py") as example:
        example["write"](bundle, runtime, tmp_path / "site")
    page = tmp_path / "site" / "index.html"
    (tmp_path / "site" / "test.html").write_text(page.read_text() + ASK)
    reports: Queue[Any] = Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, reports, directory=str(tmp_path / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Browser(tmp_path, f"http://127.0.0.1:{server.server_port}/test.html"):
            report = reports.get(timeout=2 * PATIENCE_S)
    finally:
        server.shutdown()
        server.server_close()
    with Pipeline.open(bundle) as digits:
        for digit, found in enumerate(report["answers"]):
            answer = digits(tmp_path / "site" / f"{digit}.png")
            assert [each["label"] for each in found[:3]] == answer["labels"]
            assert [each["score"] for each in found[:3]] == pytest.approx(answer["scores"].tolist(), rel=1e-4)
    assert report["error"] == "the picture has 13 × 8 pixels, not a multiple of 8"
