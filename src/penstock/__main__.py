"""``python -m penstock`` is the command ``penstock``."""

from penstock.cli.main import run

if __name__ == "__main__":
    run()
