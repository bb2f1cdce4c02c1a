"""Makes the long description of the package, which a package index shows, from the README.

Links of the README point to files beside it. An index has no such files, and there a link would lead nowhere: the long
description names the file instead, which lies in the source distribution.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


class LongDescription(MetadataHookInterface):
    """Sets the `readme` of the project. Hatchling finds this class, the only hook in the file."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _LINK_TO_A_FILE.sub(_named, readme)}


def _named(link: re.Match[str]) -> str:
    text, file = link.groups()
    return f"`{file}`" if text == file else f"{text} (`{file}`)"
