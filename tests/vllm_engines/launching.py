"""Starts engines of vLLM as processes, with all that they write in a folder, and ends them for sure."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm_engines.server import end_session, engine_environment, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = "tests.vllm_engines.engine"
# Seconds after which an engine hangs. It takes 30 to start, answer and end on two idle cores.
MOST_SECONDS = 600


class Launched:
    """How an engine ended, what it said, and what its ranks answered."""

    def __init__(self, codes, said, answers):
        self.codes, self.said, self.answers = codes, said, answers


def search_path():
    """Where engines import from: what this process was given (`make test-vllm-next`), then this source."""
    paths = [os.environ.get("PYTHONPATH"), *(str(ROOT / part) for part in ("src", "lab/src", ""))]
    return os.pathsep.join(filter(None, paths))


def run_engine(folder, job, *, ranks=2, torchrun=True, **settings):
    """Run an engine on so many ranks. One rank runs alone; two run under torchrun, or each by itself."""
    folder.mkdir()
    job_file, results = folder / "job.json", folder / "answers"
    job_file.write_text(json.dumps(job))
    port = free_port()
    environment = engine_environment(folder, ranks) | settings
    # Log-probabilities would be counted by a compiled function, which takes longer to compile than an engine to start.
    environment |= {"PYTHONPATH": search_path(), "TORCH_COMPILE_DISABLE": "1"}
    script = ["-m", ENGINE, str(job_file), str(results)]
    if ranks == 1:
        commands = [([sys.executable, *script], {})]
    elif torchrun:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
        commands = [([sys.executable, *launcher, *script], {})]
    else:
        world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [
            (
                [sys.executable, *script],
                {name: str(v) for name, v in (world | {"RANK": r, "LOCAL_RANK": r}).items()},
            )
            for r in range(ranks)
        ]
    logs = [folder / f"log.{number}" for number in range(len(commands))]
    processes = []
    try:
        for (command, more), log in zip(commands, logs, strict=True):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment | more,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [process.wait(MOST_SECONDS) for process in processes]
    finally:
        for process in processes:
            end_session(process)
        for shared in Path("/dev/shm").glob(f"*{port}-tp:*-cpushm_*"):
            shared.unlink()
    said = [log.read_text(errors="replace") for log in logs]
    written = sorted(folder.glob("answers.*"))
    return Launched(codes, said, [json.loads(path.read_text()) for path in written])
