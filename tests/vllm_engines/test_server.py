"""vLLM's OpenAI server with the plugin, and many who ask at a time."""

import re
from concurrent.futures import ThreadPoolExecutor

import openai

from tests.vllm_engines.engine import MOST_TOKENS
from tests.vllm_engines.server import serve
from tokenyard.lab.shipped import shipped_model

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
