"""`python -m docs.generate`: write all that is generated, and say which files changed."""

from __future__ import annotations

from pathlib import Path

from docs.generate import reference, tables
from docs.generate.pictures import pictures

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Write everything."""
    changed = [name for name in tables.PAGES if tables.rewrite(ROOT / name)]
    for path, text in (reference.pages() | pictures()).items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            changed.append(str(path.relative_to(ROOT)))
    print("\n".join(f"written: {name}" for name in changed) or "everything is up to date")


if __name__ == "__main__":
    main()
