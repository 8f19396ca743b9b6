from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli import main
from penstock.cli.main import COMMANDS, _with_defaults, fail
from penstock.errors import (
    AlreadyExists,
    Cancelled,
    ContractUnmet,
    DeadlineExceeded,
    EngineUnavailable,
    IntegrityError,
    InvalidArgument,
    InvalidConfig,
    InvalidData,
    InvalidInput,
    InvalidModel,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

EXIT_CODES: dict[type[PenstockError], int] = {
    PenstockError: 1,
    InvalidArgument: 2,
    InvalidModel: 2,
    InvalidData: 2,
    InvalidInput: 2,
    InvalidConfig: 2,
    Unsupported: 2,
    NotFound: 3,
    ContractUnmet: 4,
    IntegrityError: 5,
    Unavailable: 6,
    ResourceExhausted: 7,
    AlreadyExists: 8,
    Cancelled: 130,
    DeadlineExceeded: 1,
    PermissionDenied: 2,
    Unauthenticated: 1,
}


def fresh(*arguments: str, code: str = "from penstock.cli.main import run; run()") -> subprocess.CompletedProcess[str]:
    """The command in a new interpreter, where nothing is imported yet."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("kind", "code"), EXIT_CODES.items(), ids=lambda value: getattr(value, "__name__", None))
def test_exit_codes(kind: type[PenstockError], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(kind("this is wrong", "do that"), as_json=False) == code
    written = capsys.readouterr()
    assert written.err == "error: this is wrong\n  fix: do that\n"
    assert written.out == ""


def test_exit_codes_are_those_of_the_table() -> None:
    table = {int(code) for code in re.findall(r"^(\d+)  ", main.__doc__ or "", re.MULTILINE)}
    assert table == {0, *EXIT_CODES.values()}


def test_a_missing_engine_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(EngineUnavailable("openvino", "penstock[openvino]"), as_json=True) == 6
    written = capsys.readouterr()
    assert "fix: pip install 'penstock[openvino]'" in written.err
    assert json.loads(written.out) == {
        "error": {
            "code": "UNAVAILABLE",
            "message": "engine 'openvino' is not available",
            "hint": "pip install 'penstock[openvino]'",
        }
    }


def test_no_hint_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    fail(NotFound("gone"), as_json=False)
    assert capsys.readouterr().err == "error: gone\n"


def test_help_lists_every_command_and_imports_none() -> None:
    listing = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); "
    done = fresh("--help", code=listing + "from penstock.cli.main import run; run()")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f" {name} " in done.stdout
    modules = set(done.stdout.splitlines()[-1].split())
    assert not modules & {"numpy", "onnx", "onnx_ir", "onnxruntime", "openvino", "ml_dtypes"}
    assert not modules & {f"penstock.cli.{name}" for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(penstock, name: str) -> None:
    done = penstock(name, "--help")
    assert done.code == 0
    assert f"Usage: penstock {name}" in done.out
    assert "--json" in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_h_is_help(penstock, name: str) -> None:
    assert penstock(name, "-h").out == penstock(name, "--help").out


def test_h_without_a_command_is_help(penstock) -> None:
    assert penstock("-h").out == penstock("--help").out
    assert "Usage: penstock" in penstock("-h").out


def completions(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words`` after it has read the script of ``--show-completion bash``."""
    script = fresh("--show-completion", "bash")
    assert (script.returncode, script.stderr) == (0, "")
    (tmp_path / "completion.sh").write_text(script.stdout)
    asked = 'source completion.sh; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _penstock_completion penstock; '
    done = subprocess.run(
        ["bash", "--norc", "-c", asked + 'printf "%s\\n" "${COMPREPLY[@]}"', "bash", *words],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    assert set(completions(tmp_path, "penstock", "")) == set(COMMANDS)
    assert completions(tmp_path, "penstock", "bu") == ["build"]
    assert completions(tmp_path, "penstock", "build", "--max-acc") == ["--max-accuracy-loss"]
    assert completions(tmp_path, "penstock", "build", "--objective", "t") == ["throughput"]
    assert completions(tmp_path, "penstock", "quantize", "--calib") == ["--calibrate"]
    assert completions(tmp_path, "penstock", "help", "contr") == ["contract"]


def test_bash_completes_files_itself(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert completions(tmp_path, "penstock", "build", "mod") == []
    assert "complete -o default -F _penstock_completion penstock" in (tmp_path / "completion.sh").read_text()


@pytest.mark.parametrize("shell", ["zsh", "fish", "powershell"])
def test_other_shells_have_scripts(penstock, shell: str) -> None:
    done = penstock("--show-completion", shell)
    assert done.code == 0
    assert "_PENSTOCK_COMPLETE" in done.out


def test_an_unknown_shell_is_refused(penstock) -> None:
    assert penstock("--show-completion", "tcsh").code == 2


@pytest.mark.parametrize("name", ["build", "inspect", "infer", "bench", "help"])
def test_help_has_examples(penstock, name: str) -> None:
    examples = penstock(name, "--help").out.partition("Examples")[2]
    assert examples.count(f"penstock {name} ") >= 2


def test_without_a_command_help_is_shown(penstock) -> None:
    done = penstock()
    assert done.code == 2
    assert "Usage: penstock" in done.out + done.err


def test_the_version(penstock) -> None:
    done = penstock("--version")
    assert (done.code, done.out) == (0, f"penstock {__version__}\n")


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"penstock {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["buidl"],
        ["build"],
        ["build", "m.onnx", "-o", "b", "--no-such-option"],
        ["infer", "b", "--inputs", "i", "--batch", "0"],
    ],
    ids=["unknown command", "missing argument", "unknown option", "bad value"],
)
def test_a_wrong_command_line_is_told_without_a_traceback(penstock, arguments: list[str]) -> None:
    done = penstock(*arguments)
    assert done.code == 2
    assert "Usage: penstock" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    done = penstock(*arguments, "--json")
    assert done.code == 2
    assert done.json["error"]["code"] == "INVALID_ARGUMENT"


def test_an_unknown_command_is_guessed(penstock) -> None:
    assert "Did you mean 'build'?" in penstock("buidl").err


def test_a_removed_command_names_its_replacement(penstock) -> None:
    done = penstock("demo", "--quick")
    assert done.code == 2
    assert "fix: run `make demo`" in done.err


def test_an_error_of_ours_ends_as_a_message(penstock, folder) -> None:
    done = penstock("inspect", "none.bundle", "--json")
    assert done.code == 3
    assert done.err.startswith("error: no bundle 'none.bundle'\n  fix: ")
    assert done.json["error"]["code"] == "NOT_FOUND"
    assert "Traceback" not in done.err


@pytest.mark.parametrize("early", [True, False], ids=["while importing", "while running"])
def test_an_interrupt_is_no_traceback(early: bool, folder) -> None:
    # The signal comes at a known moment: when the command is looked up, or when it runs.
    target = "main._load" if early else "inspect.read_bundle"
    code = (
        "import os, signal, time; from penstock.cli import inspect, main; "
        f"{target} = lambda *_: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)); main.run()"
    )
    done = fresh("inspect", "any.bundle", "--json", code=code)
    assert done.returncode == 130
    assert done.stderr == "error: interrupted\n"
    assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == "CANCELLED"


@pytest.mark.parametrize("how", ["from error", ""], ids=["cause", "context"])
def test_an_interrupt_that_became_an_import_error_is_still_one(how: str, folder) -> None:
    code = (
        "from penstock.cli import main\n"
        "def load(name):\n"
        "    try:\n        raise KeyboardInterrupt\n"
        f"    except KeyboardInterrupt as error:\n        raise ImportError('no native code') {how}\n"
        "main._load = load; main.run()"
    )
    done = fresh("inspect", "any.bundle", code=code)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_of_which_an_import_error_tells_nothing_is_still_one(folder) -> None:
    code = (
        "import importlib, signal\n"
        "from penstock.cli import main\n"
        "def load(name):\n"
        "    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n        pass\n"
        "    raise ImportError('no native code')\n"
        "importlib.import_module = load; main.run()"
    )
    done = fresh("inspect", "any.bundle", code=code)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_a_reader_that_goes_away_is_no_traceback(folder) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert "Traceback" not in error


def test_a_defect_of_ours_keeps_its_traceback_and_gives_scripts_their_object() -> None:
    code = (
        "import penstock.cli.inspect as command\n"
        "def inspect(json: bool = False) -> None:\n    raise ZeroDivisionError('oops')\n"
        "command.inspect = inspect\n"
        "from penstock.cli.main import run; run()"
    )
    done = fresh("inspect", "--json", code=code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"]["code"] == "INTERNAL"
    assert "ZeroDivisionError: oops" in found["error"]["message"]


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        (["build", "m.onnx", "--synthetic"], ["build", "m.onnx", "--synthetic", "0"]),
        (["build", "--synthetic", "m.onnx"], ["build", "--synthetic", "0", "m.onnx"]),
        (["build", "--synthetic", "64", "m.onnx"], ["build", "--synthetic", "64", "m.onnx"]),
        (["build", "--synthetic=64", "m.onnx"], ["build", "--synthetic=64", "m.onnx"]),
        ([], []),
    ],
)
def test_the_count_of_synthetic_samples_may_be_left_out(given: list[str], completed: list[str]) -> None:
    assert _with_defaults(given) == completed


def test_control_characters_of_a_terminal_are_shown_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    fail(InvalidArgument("a \x1b[31mname\n of two lines", "\x9b"), as_json=False)
    assert capsys.readouterr().err == "error: a \\x1b[31mname\n of two lines\n  fix: \\x9b\n"
