"""The integration with vLLM, imported without it and with stubs of two of its versions."""

import pytest

from tests.integrations.vllm_kernel import OURS, forget, import_afresh, install_stub


@pytest.fixture(params=[None, "now", "before"], ids=["alone", "now", "before"])
def version(request):
    """Which vLLM there is."""
    return request.param


@pytest.fixture
def vllm(version, tmp_path, monkeypatch):
    """The integration, imported where there is that vLLM."""
    if version is not None:
        install_stub(tmp_path, version)
        monkeypatch.syspath_prepend(str(tmp_path))
    yield import_afresh()
    forget("vllm", OURS)
