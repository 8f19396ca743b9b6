"""The build report and the server's page in a real browser: style, sorting, small screens, the policy, and the form."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

import models
from browsers import PATIENCE_S, Browser, Site
from bundles import FILES, manifest_for
from evidences import evidence, points, record
from penstock.bundle.manifest import ServingConfig
from penstock.perf.report import render
from processes import ServerProcess

pytestmark = pytest.mark.real

SCREEN = 390
"""Width of a telephone's screen."""

REPORT_PAGE = """<!doctype html><body><script>
const report = REPORT;
const show = width => new Promise(done => {
  const frame = document.createElement("iframe");
  Object.assign(frame, {srcdoc: report, width, height: 3000, onload: () => done(frame.contentDocument)});
  document.body.append(frame);
});
const names = page => [...page.querySelectorAll("table.candidates tbody")]
  .map(body => [...body.rows].slice(1).map(row => row.querySelector("code").textContent));
const shown = (page, query) => [...page.querySelectorAll(query)].map(one => page.defaultView.getComputedStyle(one).display);
(async () => {
  const page = await show(1000), seen = {};
  const heads = [...page.querySelectorAll("table.candidates th[data-way]")];
  seen.first = names(page);
  for (const name of ["Size", "Speed", "Candidate"]) {
    const head = heads.find(one => one.textContent === name);
    for (const turn of [1, 2]) {
      head.querySelector("button").click();
      seen[name + turn] = [head.getAttribute("aria-sort"), names(page)];
    }
  }
  seen.sorted = heads.filter(one => one.hasAttribute("aria-sort")).length;
  seen.large = shown(page, "figure");
  seen.weight = page.defaultView.getComputedStyle(page.querySelector(".headline")).fontWeight;
  seen.chart = page.defaultView.getComputedStyle(page.querySelector("line.floor")).strokeDasharray;
  const small = await show(SCREEN);
  seen.small = shown(small, "figure");
  seen.overflow = small.documentElement.scrollWidth;
  seen.cell = shown(small, ".candidates td")[0];
  const blocked = new Promise(done => page.addEventListener("securitypolicyviolation", event => done(event.effectiveDirective)));
  page.body.insertAdjacentHTML("beforeend", '<p style="color: red">');
  seen.blocked = [await blocked];
  page.body.insertAdjacentHTML("beforeend", '<img src="data:," onerror="parent.hacked = true">');
  await new Promise(done => page.addEventListener("securitypolicyviolation", done, {once: true}));
  const script = page.createElement("script");
  script.textContent = "parent.hacked = true";
  page.body.append(script);
  seen.hacked = window.hacked === true;
  await fetch("/report", {method: "POST", body: JSON.stringify(seen)});
})().catch(error => fetch("/report", {method: "POST", body: JSON.stringify({error: String(error)})}));
</script>"""

HOME_PAGE = """<!doctype html><body><script>
const until = condition => new Promise((done, fail) => {
  const end = Date.now() + 20000;
  const look = () => condition() ? done() : Date.now() > end ? fail(String(condition)) : setTimeout(look, 20);
  look();
});
(async () => {
  const page = window.open("/"), seen = {};
  await until(() => page.document.readyState === "complete" && page.location.pathname === "/");
  seen.text = page.document.body.innerText;
  seen.weight = page.getComputedStyle(page.document.querySelector(".headline")).fontWeight;
  const form = page.document.forms[0];
  form.querySelector("textarea").value = "[[1, 2, 3]]";
  form.requestSubmit();
  await until(() => page.location.pathname === "/predictions/first" && page.document.readyState === "complete");
  seen.answer = page.document.body.innerText;
  await fetch("/report", {method: "POST", body: JSON.stringify(seen)});
})().catch(error => fetch("/report", {method: "POST", body: JSON.stringify({error: String(error)})}));
</script>"""


def visit(site: Site, folder: Path) -> dict[str, Any]:
    """What the page of ``site`` reports."""
    for attempt in range(3):  # a browser may hang on a loaded machine
        (start := folder / str(attempt)).mkdir()
        with Browser(start, f"http://127.0.0.1:{site.port}/page"), suppress(Empty):
            report: dict[str, Any] = site.reports.get(timeout=PATIENCE_S)
            assert "error" not in report, report
            return report
    raise AssertionError("the page has reported nothing")


def test_the_report(tmp_path: Path) -> None:
    found = evidence(
        record("chosen", 0.4, precision="int8", status="chosen", reason="2.5x"),
        record("a", 0.5, size_bytes=3000),
        record("b", 0.6, size_bytes=1000, engine="openvino"),
        record("c", None, size_bytes=2000, precision="bf16"),
        record("broken", None, status="failed", reason="cannot load " + "x" * 200),
    )
    manifest = manifest_for(FILES, evidence=found, serving=ServingConfig("chosen", 1, 1, 4, latency=points(0.4)))
    text = json.dumps(render(manifest)).replace("<", "\\u003c")
    with Site(None, REPORT_PAGE.replace("REPORT", text, 1).replace("SCREEN", str(SCREEN))) as site:
        seen = visit(site, tmp_path)

    def order(*middle: str) -> list[list[str]]:
        return [["chosen"], ["original"], list(middle), ["broken"]]

    assert seen["first"] == order("a", "b", "c")
    assert seen["Size1"] == ["ascending", order("b", "c", "a")]
    assert seen["Size2"] == ["descending", order("a", "c", "b")]
    assert seen["Speed1"] == ["descending", order("a", "b", "c")]
    assert seen["Speed2"] == ["ascending", order("b", "a", "c")], "what was not timed stays last"
    assert seen["Candidate1"] == ["ascending", order("c", "a", "b")], "BF16 before FP32 before OpenVINO"
    assert seen["sorted"] == 1
    assert seen["weight"] == "700"
    assert seen["chart"] != "none", "the style of charts applies"
    assert seen["large"] == ["block", "none"] * 2
    assert seen["small"] == ["none", "block"] * 2
    assert seen["overflow"] <= SCREEN
    assert seen["cell"] == "block"
    assert seen["blocked"] == ["style-src-attr"]
    assert seen["hacked"] is False


def test_the_home_page(tmp_path: Path) -> None:
    root = tmp_path / "models"
    (root / "first/1").mkdir(parents=True)
    (root / "first/1/model.onnx").write_bytes(models.linear().data)
    with ServerProcess(arguments=("--model-repository", str(root))) as server, Site(server.address, HOME_PAGE) as site:
        seen = visit(site, tmp_path)
        assert f"curl -s http://127.0.0.1:{site.port}/v2/models/first/infer" in seen["text"]
    assert "1 of 1 model ready" in seen["text"]
    assert seen["weight"] == "700"
    answer = json.loads(seen["answer"])
    assert [len(row) for row in answer] == [2]
    assert answer[0] != [0, 0]
