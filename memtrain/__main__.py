"""``python -m memtrain`` and the ``memtrain`` command."""

from __future__ import annotations


def main() -> None:
    """Runs the command line."""
    from memtrain.cli.main import run

    run()


if __name__ == "__main__":
    main()
