"""`python -m tokenyard` is `tokenyard`."""

from __future__ import annotations

from tokenyard.cli import main

if __name__ == "__main__":
    main()
