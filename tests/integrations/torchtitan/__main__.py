"""`cpu_trainer`, whose overrides torchtitan imports by their name."""

from tests.integrations.torchtitan.cpu_trainer import main

main()
