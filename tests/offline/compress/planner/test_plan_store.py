from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy, Attempt
from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.measurement import Interval
from penstock.offline.compress.checkpoint import write_checkpoint
from penstock.offline.compress.planner import plan_store as module
from penstock.offline.compress.planner.plan_store import PlanStore, check_plan, read_model, remove_plan, write_model

ORIGIN = "0" * 64
PLAN = {"model": "a" * 64, "epochs": "1.0", "machine": "a CPU avx2"}


@pytest.fixture(scope="module")
def model() -> Artifact:
    plain = networks.mlp()
    return plain.derive(plain.data, "share", {"bits": 3}, {"sparsity": 0.5, "layers": {"w": [1, 2]}})


def kept(model: Artifact, name: str = "share") -> Attempt:
    accuracy = Accuracy("top-1", 0.9, Interval(0.01, 0.0, 0.02), 0.1, 75)
    return Attempt(name, "original", "kept", "", accuracy, Interval(1.1, 1.0, 1.2), 10, 5, model.digest, 1.5)


def test_what_was_kept_is_found_again(tmp_path: Path, model: Artifact) -> None:
    folder = tmp_path / "a" / "plan"
    first = PlanStore(folder, PLAN)
    failed = Attempt("prune", "original", "failed", "because")
    first.add(kept(model), ORIGIN, model)
    first.add(failed, ORIGIN, None)
    again = PlanStore(folder, PLAN)
    assert again.find("prune", ORIGIN) == failed
    assert again.find("share", ORIGIN) == kept(model)
    assert again.find("share", "1" * 64) is None
    assert again.model(model.digest) == model
    assert again.model(model.digest).provenance == model.provenance


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "b" * 64}, "another model"),
        ({"epochs": "2.0"}, "epochs 1.0 in the folder, 2.0 now"),
        ({"machine": "a \x1b[31mCPU"}, "another machine"),
        ({"model": "b" * 64, "epochs": "2.0"}, "another model; epochs 1.0 in the folder, 2.0 now"),
        ({"seed": "0"}, "another seed"),
    ],
)
def test_another_plan_is_refused_and_what_differs_is_told(
    tmp_path: Path, model: Artifact, changes: dict[str, str], told: str
) -> None:
    PlanStore(tmp_path, PLAN).add(kept(model), ORIGIN, model)
    for refuse in (PlanStore, check_plan):
        with pytest.raises(InvalidArgument, match=f"holds another plan: {told} \\(use the same") as caught:
            refuse(tmp_path, {**PLAN, **changes})
        assert "another folder" in caught.value.hint


def test_what_is_not_known_before_the_work_is_checked_after_it(tmp_path: Path, model: Artifact) -> None:
    check_plan(tmp_path / "none", PLAN)
    PlanStore(tmp_path, PLAN).add(kept(model), ORIGIN, model)
    known = {"epochs": "1.0"}
    check_plan(tmp_path, known)
    with pytest.raises(InvalidArgument, match="of another version"):
        PlanStore(tmp_path, known)
    with pytest.raises(InvalidArgument, match=r"another model \(use the same"):
        PlanStore(tmp_path, {**PLAN, "model": "b" * 64})


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("mine")
    with pytest.raises(InvalidArgument, match="is not a folder"):
        PlanStore(tmp_path / "plan", PLAN)


@given(data=st.data())
def test_a_damaged_ledger_is_told(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = networks.mlp()
    folder = tmp_path_factory.mktemp("plan")
    PlanStore(folder, PLAN).add(kept(model), ORIGIN, None)
    file = folder / "plan.ledger"
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    file.write_bytes(content)
    with pytest.raises(InvalidArgument, match="is damaged"):
        PlanStore(folder, PLAN)


@pytest.mark.parametrize(
    "contents",
    [[], {"plan": 1}, {"plan": "p"}, {"plan": {"a": 1}}, {"plan": PLAN, "entries": [{"origin": "x"}]}, "x" * 1000],
)
def test_a_made_up_ledger_is_told(tmp_path: Path, contents: object) -> None:
    write_checkpoint(tmp_path / "plan.ledger", contents)
    with pytest.raises(InvalidArgument, match="is damaged"):
        PlanStore(tmp_path, PLAN)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "..", "A" * 64, "f" * 64])
def test_a_ledger_names_no_file_but_its_models(tmp_path: Path, model: Artifact, digest: str) -> None:
    outside = tmp_path / "etc"
    write_model(outside / "passwd.model", model)
    book = PlanStore(tmp_path / "x" / "plan", PLAN)
    book.add(msgspec.structs.replace(kept(model), digest=digest), ORIGIN, None)
    with pytest.raises(InvalidArgument, match="is missing or modified"):
        book.model(digest)


def test_a_model_that_was_changed_is_not_taken(tmp_path: Path, model: Artifact) -> None:
    book = PlanStore(tmp_path, PLAN)
    book.add(kept(model), ORIGIN, model)
    write_model(tmp_path / f"{model.digest}.model", networks.mlp(32))
    with pytest.raises(InvalidArgument, match="is missing or modified"):
        book.model(model.digest)
    (tmp_path / f"{model.digest}.model").write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="is damaged"):
        book.model(model.digest)


def test_killed_between_model_and_ledger(tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model exists, but its attempt does not: the step is repeated without an error."""
    book = PlanStore(tmp_path, PLAN)
    with monkeypatch.context() as patch:

        def kill(path: Path, contents: object, what: str = "") -> None:
            if path.name == "plan.ledger":
                raise KeyboardInterrupt
            write_checkpoint(path, contents, what)

        patch.setattr(module, "write_checkpoint", kill)
        with pytest.raises(KeyboardInterrupt):
            book.add(kept(model), ORIGIN, model)
    again = PlanStore(tmp_path, PLAN)
    assert again.find("share", ORIGIN) is None
    again.add(kept(model), ORIGIN, model)
    assert PlanStore(tmp_path, PLAN).model(model.digest) == model


def test_a_place_that_takes_nothing(tmp_path: Path, model: Artifact) -> None:
    (tmp_path / f"{model.digest}.model").mkdir()
    with pytest.raises(ResourceExhausted, match="cannot write a model"):
        PlanStore(tmp_path, PLAN).add(kept(model), ORIGIN, model)


def test_only_the_plans_own_files_are_removed(tmp_path: Path, model: Artifact) -> None:
    folder = tmp_path / "plan"
    book = PlanStore(folder, PLAN)
    book.add(kept(model), ORIGIN, model)
    write_model(book.scratch("stage") / "thin.model", model)
    (folder / "x.partial").write_text("")
    (folder / "notes.txt").write_text("mine")
    remove_plan(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    remove_plan(folder)
    assert not folder.exists()
    remove_plan(folder)


def test_a_missing_model_is_none(tmp_path: Path) -> None:
    assert read_model(tmp_path / "none.model") is None
