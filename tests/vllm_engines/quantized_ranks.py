"""One rank of several engines, one after the other, under torchrun. Arguments: a file with a job, one for results.

A job is a JSON object: `prompts` (token ids), and `engines` by name: a port for each, and options of vLLM's `LLM`.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Each engine makes a process group anew: with a store of its own, and not that of torchrun.
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

MOST_TOKENS, LOGPROBS = 12, 3


def main(job, results):
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    from tokenyard.integrations.vllm import worker_plan

    # These refuse float32, in which engines are compared; for the kernels of their linear layers, of which there are
    # none here.
    for config in (Fp8Config, ModelOptNvFp4Config, Mxfp4Config):
        config.get_supported_act_dtypes = lambda *_: [torch.float32]
    rank = int(os.environ["RANK"])
    # Engines under torchrun share memory under one name, whoever started them.
    ExecutorWithExternalLauncher._distributed_args = lambda _: (
        f"env://?engine=:{os.environ['MASTER_PORT']}",
        rank,
        rank,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=MOST_TOKENS, logprobs=LOGPROBS, ignore_eos=True, detokenize=False
    )
    answers = {}
    for name, (port, options) in job["engines"].items():
        os.environ["MASTER_PORT"] = str(port)
        llm = LLM(
            **options,
            enforce_eager=True,
            max_model_len=64,
            max_num_batched_tokens=64,
            dtype="float32",
            seed=0,
            skip_tokenizer_init=True,
            enable_expert_parallel=True,
            distributed_executor_backend="external_launcher",
        )
        step = options.get("data_parallel_size", 1)
        numbers = range(rank % step, len(job["prompts"]), step)
        asked = [{"prompt_token_ids": job["prompts"][number]} for number in numbers]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        made = worker_plan._made.plan
        answers[name] = {
            "weights": sorted({spec.weights for spec in made.draft.specs}),
            "experts": len(made.local_experts(made.draft.specs[0].name)),
            "answers": {number: told(output) for number, output in zip(numbers, outputs, strict=True)},
        }
        made.close()
        worker_plan._made = None
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(results).with_suffix(f".{rank}").write_text(json.dumps(answers))


def told(output):
    """The tokens, and the log-probabilities of each and of its rivals."""
    completion = output.outputs[0]
    logprobs = [{token: at.logprob for token, at in chosen.items()} for chosen in completion.logprobs]
    return {"ids": list(completion.token_ids), "logprobs": logprobs}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
