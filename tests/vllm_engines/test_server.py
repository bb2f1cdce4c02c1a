"""vLLM's OpenAI server with the plugin, and many who ask at a time."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

from tests.vllm_engines import dying
from tests.vllm_engines.engine import MOST_TOKENS
from tests.vllm_engines.launching import search_path
from tests.vllm_engines.server import serve
from tokenyard_lab.shipped import shipped_model

OPTIONS = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
ROUNDS = 3


def test_concurrent_requests_are_answered_as_by_vllm_alone(plain):
    settings = {"TOKENYARD_VLLM": "experts", "TOKENYARD_EXCHANGE": "one_sided"}
    with serve(shipped_model(), *OPTIONS, settings=settings) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120.0)

        def ids_of(prompt):
            """The tokens of an answer; the server names them by number."""
            answer = client.completions.create(
                model="shipped",
                prompt=prompt,
                temperature=0,
                max_tokens=MOST_TOKENS,
                logprobs=1,
                extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
            )
            return [
                int(re.fullmatch(r"token_id:(\d+)", token)[1]) for token in answer.choices[0].logprobs.tokens
            ]

        asked = [prompt for _ in range(ROUNDS) for prompt in plain]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(ids_of, asked))
        assert server.process.poll() is None
        assert server.log_text().count("tokenyard: TOKENYARD_VLLM=experts") == 1
    assert server.process.returncode is not None
    assert answers == [plain[prompt]["ids"] for prompt in asked]


# Seconds in which the server has ended: 3 to 13 in four trials on a busy machine. vLLM waits 5 s for the other worker,
# and 4 s more after SIGTERM.
MOST_SECONDS = 60
PLUGIN_ON = {
    "TOKENYARD_VLLM": "experts",
    "TORCH_COMPILE_DISABLE": "1",  # log-probabilities would be counted by a compiled function
}


def ends_after(server, lose_a_worker):
    """Lose a worker while a request is answered: the client gets a 500, and the server ends. Returns the log."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120.0)

    def ask(tokens):
        return client.completions.create(
            model="shipped", prompt="3 + 4 :", max_tokens=tokens, extra_body={"ignore_eos": True}
        )

    assert ask(4).choices[0].text
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, 240)
        time.sleep(0.3)
        assert not asked.done()
        lose_a_worker()
        with pytest.raises(openai.InternalServerError, match="EngineCore encountered an issue"):
            asked.result(MOST_SECONDS)
    assert server.process.wait(MOST_SECONDS) == 0
    log = server.log_text()
    assert "Worker proc VllmWorker-1 died unexpectedly (exit code: -9)" in log
    return log


def test_a_killed_worker_ends_the_server():
    """The other worker waits in a layer, or in a sum of vLLM's own: only vLLM's line is there for sure."""
    with serve(shipped_model(), *OPTIONS, settings=PLUGIN_ON) as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        (worker,) = [one for one in processes if "Worker_TP1" in " ".join(one.cmdline())]
        log = ends_after(server, lambda: os.kill(worker.pid, signal.SIGKILL))
    assert "PeerLost" not in log or "rank 1 did not arrive" in log


def test_a_worker_that_dies_in_a_layer_is_named(tmp_path):
    now = tmp_path / "now"
    settings = PLUGIN_ON | {dying.NOW: str(now), "PYTHONPATH": search_path()}
    extension = ("--worker-extension-cls", f"{dying.__name__}.WorkerExtension")
    with serve(shipped_model(), *OPTIONS, *extension, settings=settings) as server:
        log = ends_after(server, now.touch)
    assert re.search(r"tokenyard\.errors\.PeerLost: .*rank 0: rank 1 did not arrive in combine", log)
