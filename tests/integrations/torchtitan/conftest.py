"""These tests need torchtitan's models (requirements-torchtitan.txt). Its trainer needs more, and is run by hand."""

from importlib.util import find_spec

collect_ignore = ["__main__.py", "cpu_trainer.py"]
if find_spec("torchtitan") is None:
    collect_ignore += ["cpus.py", "ranks.py", "test_routed_experts.py"]
