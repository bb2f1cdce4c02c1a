"""One rank of an engine that answers prompts; under torchrun, or alone. Arguments: a file with a job, one for results.

A job is a JSON object: `options` of vLLM's `LLM`, `prompts`, and `exchanges` to answer them through, one after the
other. With `dies_in`, rank 1 is killed in that call of `finalize`.
"""

import json
import os
import signal
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

MOST_TOKENS, LOGPROBS = 24, 3


def main(job, results):
    from vllm import LLM, SamplingParams

    rank = int(os.environ.get("RANK", "0"))
    name_shared_memory()
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
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, logprobs=LOGPROBS, ignore_eos=True)
    prompts = job["prompts"]
    data_parallel = llm.llm_engine.vllm_config.parallel_config.data_parallel_size
    if data_parallel > 1:
        prompts = prompts[rank::data_parallel]
    if "dies_in" in job and rank == 1:
        die_in(job["dies_in"])
    answers = {}
    for exchange in job.get("exchanges", ["auto"]):
        if exchange != "auto":
            plan_again(llm, exchange)
        answers[exchange] = [told(output) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    Path(results).with_suffix(f".{rank}").write_text(json.dumps(answers))


def told(output):
    """A prompt, its tokens, and the log-probabilities of each token and its rivals."""
    completion = output.outputs[0]
    logprobs = [{token: at.logprob for token, at in chosen.items()} for chosen in completion.logprobs]
    return {"prompt": output.prompt, "ids": list(completion.token_ids), "logprobs": logprobs}


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


def die_in(calls):
    from tokenyard.integrations.vllm import TokenyardPrepareAndFinalize

    finalize, left = TokenyardPrepareAndFinalize.finalize, iter(range(calls))

    def dying(self, *arguments):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return finalize(self, *arguments)

    TokenyardPrepareAndFinalize.finalize = dying


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
