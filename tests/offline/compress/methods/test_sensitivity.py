from __future__ import annotations

from pathlib import Path

DIGITS = ("sensitivity", "model.onnx", "--calibrate", "train.npz", "--no-equalize", "--budget", "0s")


def test_groups_are_ranked(penstock, digits: Path) -> None:
    done = penstock(*DIGITS, "--report", "report.html", "--chart", "chart.svg", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["samples"] == 30
    assert found["metric"] == "top-1"
    assert len(found["groups"]) == 9
    assert all(one["saving_ms"] is None for one in found["groups"])
    names = [one["group"]["name"] for one in found["groups"]]
    assert len(set(names)) == 9
    page, picture = (digits / "report.html").read_text(), (digits / "chart.svg").read_text()
    assert picture.startswith("<svg")
    assert picture in page
    assert page.index(f"<td>{names[0]}</td>") < page.index(f"<td>{names[-1]}</td>")


def test_a_person_reads_a_table(penstock, digits: Path) -> None:
    done = penstock(*DIGITS, "--evaluate", "test.npz")
    assert done.code == 0, done.err
    assert "INT8 everywhere: top-1" in done.out
    assert "400 samples" in " ".join(done.out.split())
    assert "Conv Relu" in done.out
    assert "groups were not timed" not in done.out  # no time was to be spent on it
    assert sorted(path.name for path in digits.iterdir()) == ["model.onnx", "test.npz", "train.npz"]


def test_what_is_not_a_report_is_left_alone(penstock, digits: Path) -> None:
    (digits / "report.html").write_text("mine")
    done = penstock(*DIGITS, "--report", "report.html")
    assert done.code == 8
    assert (digits / "report.html").read_text() == "mine"


def test_data_is_needed(penstock, folder: Path) -> None:
    done = penstock("sensitivity", "linear.onnx")
    assert (done.code, "INT8 needs data" in done.err) == (2, True)
