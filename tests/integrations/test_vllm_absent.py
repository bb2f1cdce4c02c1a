"""`tokenyard.integrations.vllm` where there is no vLLM, or one that it does not know."""

import subprocess
import sys

import pytest

from tests.integrations.vllm_kernel import OURS, forget, import_afresh, install_stub
from tokenyard.errors import ContractError


def test_a_vllm_without_modular_kernels(tmp_path, monkeypatch):
    install_stub(tmp_path, "weight_and_reduce")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ContractError, match="has no FusedMoEPrepareAndFinalizeModular"):
            import_afresh()
    finally:
        forget("vllm", OURS)


def test_the_plugin_is_inert_unless_asked_for(tmp_path):
    """vLLM calls it in every process. Where it is off, it must not bring vLLM's kernels with it."""
    install_stub(tmp_path, "vllm_0_32")
    call = "from tokenyard.integrations.vllm.plugin import register; register(); import sys; "
    call += "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", call], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
