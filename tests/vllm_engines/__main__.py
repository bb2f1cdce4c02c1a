"""Serves the shipped model with vLLM and the plugin on two ranks, and asks it problems through the OpenAI client."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from tests.vllm_engines.server import serve
from tokenyard_lab.evaluation.questions import held_out_questions, is_right
from tokenyard_lab.shipped import shipped_model

_PROBLEMS = 6
# The longest answer of the shipped model has 100 tokens.
_MOST_TOKENS = 110


def main() -> int:
    """Print problems and answers; 1 if one is wrong."""
    print("Starting vLLM with two workers; TOKENYARD_VLLM=experts (half a minute) …", flush=True)
    questions = held_out_questions(_PROBLEMS)
    options = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
    with serve(shipped_model(), *options, settings={"TOKENYARD_VLLM": "experts"}) as server:
        plan_lines = [
            line.partition("] ")[2] for line in server.log_text().splitlines() if "worker_plan.py" in line
        ]
        print(*plan_lines, sep="\n", end="\n\n")
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120.0)

        def answer(prompt: str) -> str:
            asked = client.completions.create(
                model="shipped", prompt=prompt, temperature=0, max_tokens=_MOST_TOKENS
            )
            return str(asked.choices[0].text).strip()

        with ThreadPoolExecutor(_PROBLEMS) as threads:
            answers = list(threads.map(answer, [question.prompt for question in questions]))
    wrong = 0
    for question, text in zip(questions, answers, strict=True):
        right = is_right(text, question.answer)
        wrong += not right
        print(f"{question.prompt}\n  {text}  {'✓' if right else f'✗ {question.answer}'}\n")
    print(f"{len(questions) - wrong} of {len(questions)} right, served by vLLM through tokenyard.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
