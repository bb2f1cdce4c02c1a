"""The integration with vLLM: without it, with stubs of its signatures, and with itself where it is installed."""

import pytest

from tests.integrations.vllm_kernel import INSTALLED, OURS, forget, import_afresh, install_stub

# `make test-vllm` runs these tests with the real one.
VERSIONS = ["installed"] if INSTALLED else [None, "vllm_0_32", "vllm_0_33"]


@pytest.fixture(params=VERSIONS, ids=str)
def version(request):
    """Which vLLM there is."""
    return request.param


@pytest.fixture
def vllm(version, tmp_path, monkeypatch):
    """The integration, imported where there is that vLLM."""
    if version == "installed":
        from tokenyard.integrations import vllm
        from tokenyard.integrations.vllm import prepare_finalize  # noqa: F401

        yield vllm
        return
    if version is not None:
        install_stub(tmp_path, version)
        monkeypatch.syspath_prepend(str(tmp_path))
    yield import_afresh()
    forget("vllm", OURS)
