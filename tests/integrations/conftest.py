"""The integration with vLLM: without it, with a stub of its signatures, and with itself where it is installed."""

from importlib.util import find_spec

import pytest

from tests.integrations.vllm_kernel import OURS, forget, import_afresh, install_stub

# `make test-vllm` runs these tests with the real one.
VERSIONS = ["installed"] if find_spec("vllm") else [None, "vllm_0_32"]


@pytest.fixture(params=VERSIONS, ids=str)
def version(request):
    """Which vLLM there is."""
    return request.param


@pytest.fixture
def vllm(version, tmp_path, monkeypatch):
    """The integration, imported where there is that vLLM."""
    if version == "installed":
        import tokenyard.integrations.vllm

        yield tokenyard.integrations.vllm
        return
    if version is not None:
        install_stub(tmp_path, version)
        monkeypatch.syspath_prepend(str(tmp_path))
    yield import_afresh()
    forget("vllm", OURS)
