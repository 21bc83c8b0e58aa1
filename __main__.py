"""`python -m drivetrain` is the `drivetrain` command."""

from __future__ import annotations

import sys

from .trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
