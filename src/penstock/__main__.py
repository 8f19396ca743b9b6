"""The command ``penstock``, also as ``python -m penstock``. Without the packages of the command line, it says how to install them."""

import importlib
import sys

_FULL = "pip install 'penstock[full]'"


def run() -> None:
    """Entry point of the command ``penstock``."""
    _call("penstock.cli.main", "run")


def tritonserver() -> None:
    """Entry point of the command ``penstock-tritonserver``."""
    _call("penstock.cli.tritonserver", "main")


def _call(module: str, function: str) -> None:
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("penstock"):
            raise
        print(f"error: the command line needs the package '{error.name}'\n  fix: {_FULL}", file=sys.stderr)  # noqa: T201
        sys.exit(6)
    found()


if __name__ == "__main__":
    run()
