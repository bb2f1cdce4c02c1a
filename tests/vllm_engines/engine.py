"""One rank of an engine that answers prompts; under torchrun, or alone. Arguments: a file with a job, one for results.

A job is a JSON object: `options` of vLLM's `LLM`, `prompts`, and `exchanges` to answer them through, one after the
other. With `dies_in`, rank 1 is killed in that call of `finalize`. With `again_alone`, each prompt is answered once
more, in a batch of its own. With `rotates_in_torch`, vLLM's kernel of rotary embeddings is not used.
"""

import json
import os
import sys
from pathlib import Path

from tests.vllm_engines.dying import die_where

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MOST_TOKENS, LOGPROBS = 24, 3


def main(job, results):
    from vllm import LLM, SamplingParams

    rank = int(os.environ.get("RANK", "0"))
    name_shared_memory()
    if job.get("rotates_in_torch"):
        rotate_in_torch()
    llm = LLM(
        **(
            {
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_batched_tokens": 256,
                "dtype": "float32",
                "seed": 0,
                "enable_prefix_caching": False,  # every exchange computes every token
            }
            | job["options"]
        )
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=MOST_TOKENS,
        logprobs=LOGPROBS,
        ignore_eos=True,
        detokenize=not job["options"].get("skip_tokenizer_init", False),
    )
    prompts = [
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in job["prompts"]
    ]
    data_parallel = llm.llm_engine.vllm_config.parallel_config.data_parallel_size
    if data_parallel > 1:
        prompts = prompts[rank::data_parallel]
    if "dies_in" in job:
        calls = iter(range(job["dies_in"]))
        die_where(lambda: next(calls, None) is None)
    answers = {}
    for exchange in job.get("exchanges", ["auto"]):
        if exchange != "auto":
            plan_again(llm, exchange)
        answers[exchange] = [told(output) for output in llm.generate(prompts, sampling, use_tqdm=False)]
        if job.get("again_alone"):
            answers[exchange] += [
                told(*llm.generate([prompt], sampling, use_tqdm=False)) for prompt in prompts
            ]
    Path(results).with_suffix(f".{rank}").write_text(json.dumps(answers))


def told(output):
    """A prompt, its tokens, and the log-probabilities of each token and its rivals."""
    completion = output.outputs[0]
    logprobs = [{token: at.logprob for token, at in chosen.items()} for chosen in completion.logprobs]
    return {"prompt": output.prompt, "ids": list(completion.token_ids), "logprobs": logprobs}


def rotate_in_torch():
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def name_shared_memory():
    """Engines under torchrun share memory under one name, whoever started them: give this one a name of its own."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    def arguments(_):
        method = f"env://?engine=:{os.environ['MASTER_PORT']}"
        return method, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    ExecutorWithExternalLauncher._distributed_args = arguments


def plan_again(llm, exchange):
    """Let the plugin make its plan anew, with another exchange, as it does when weights are loaded."""
    from vllm.config import set_current_vllm_config

    from tokenyard.integrations.vllm import worker_plan

    os.environ["TOKENYARD_EXCHANGE"] = exchange
    worker_plan._made.plan.close()
    worker_plan._made = None
    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config):
        for runner in config.compilation_config.static_forward_context.values():
            if hasattr(runner, "routed_experts"):
                runner.routed_experts.quant_method.moe_kernel = None
                runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
    assert worker_plan._made.plan.draft.exchange.name == exchange


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
