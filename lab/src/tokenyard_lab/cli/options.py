"""The options that several commands of the lab share."""

from __future__ import annotations

from tokenyard.cli.options import option

OUT_FILE = option(None, "Save the figures, with date, hardware, versions and commit.", "--out")
PLOT_FILE = option(None, "Draw the figures into this file (needs matplotlib).", "--plot")
MODEL_FOLDER = option(None, "Folder of a checkpoint.", shown="the model that ships")
RANK_COUNT = option(4, "How many ranks.", min=1, max=64)
RANK_KIND = option("processes", "Ranks as `processes` or `threads`.")
STARTED_DEVICE = option(
    "cpu", "Where the started ranks live: `cpu` or `cuda`; those of torchrun take their GPU."
)
ONLY_EXCHANGES = option(None, "Only this exchange; may be given several times.", shown="all")
LONGEST_ANSWER = option(128, "The longest answer.", min=1)
