"""A drafter trained here, served by vLLM on this machine's CPU: outputs and acceptance equal this project's decoder.

    make serve-check                                   # sets up .venv-vllm, trains a drafter if there is none, runs this
    python -m tests.serve_check --vllm .venv-vllm --drafter runs/smollm2_taps/drafter

Exports the drafter, serves it in fp32, and lets decode.parity judge the server. Then the `vllm serve` line that decode.export
prints is started as printed. Exit code 1 if the server differs or the line does not start. The first server runs with a bug of
vLLM's CPU build fixed (tests/vllm_processor.py), the printed line with it.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import torch

from specalign.common.errors import UserError, cli
from specalign.common.text import say
from specalign.lm.loading import resolve_folder
from specalign.lm.names import DEFAULT_TARGET

FIXED = Path(__file__).with_name("vllm_processor.py").resolve()
START_SECONDS = 600.0
SERVER = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "1", "--generation-config", "vllm",
    "--no-enable-prefix-caching", "--host", "127.0.0.1",
]  # fmt: skip


def find_python(options: argparse.Namespace) -> Path:
    """The Python of vLLM's environment. Raises UserError if there is none."""
    program: Path = options.vllm / "bin" / "python"
    if not program.is_file():
        raise UserError(f"--vllm={options.vllm}: has no bin/python; run: make serve-check")
    return program.absolute()


@cli
def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--vllm", type=Path, required=True, help="the virtual environment with vLLM")
    add("--target", default=DEFAULT_TARGET)
    add("--out", type=Path, default=Path("runs/serve_check"))
    add("--drafter", default="runs/smollm2_taps/drafter")
    add("--suite", default="mtbench")
    add("--limit", type=int, default=20)
    add("--max-new-tokens", type=int, default=64)
    check(parser.parse_args())


def check(options: argparse.Namespace) -> None:
    """Raises SystemExit if the server differs."""
    program, folder = find_python(options), (options.out / "dflash").resolve()
    pair = ["--drafter", options.drafter, "--target", options.target, "--device", "cpu"]
    printed = run("decode.export", *pair, "--format", "dflash", "--no-check", "--out", str(folder))
    lines = [line.strip() for line in printed.splitlines()]
    line = next(line for line in lines if line.startswith("vllm serve"))
    words = shlex.split(line)
    drafting = words[words.index("--speculative-config") :][:2]
    judge = [*pair, "--export", str(folder), "--suite", options.suite]
    judge += ["--max-new-tokens", str(options.max_new_tokens)]
    model = str(resolve_folder(options.target))
    with serve(program, model, drafting, options.out / "server.log") as url:
        say(run("decode.parity", *judge, "--engine", url, "--limit", str(options.limit)))
    say(f"as printed: {line}")
    port = find_port()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-c", f"exec {line} --port {port}"]
    with start(command, {"PATH": path}, port, options.out / "printed.log") as url:
        say(run("decode.parity", *judge, "--engine", url, "--limit", "4", fine=(0, 3)))


def run(module: str, *words: str, fine: Sequence[int] = (0,)) -> str:
    """What a command prints. Raises SystemExit if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *words], text=True, stdout=subprocess.PIPE)
    if done.returncode not in fine:
        say(done.stdout)
        raise SystemExit(1)
    return done.stdout.strip()


@contextmanager
def serve(program: Path, model: str, more: list[str], log: Path) -> Iterator[str]:
    """The URL of a vLLM server in fp32, without the bug that tests/vllm_processor.py describes."""
    port = find_port()
    command = [str(program), "-P", str(FIXED), "--model", model, "--port", str(port)]
    command += [*SERVER, *more]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    settings |= {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    with start(command, settings, port, log) as url:
        yield url


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def start(command: list[str], settings: dict[str, str], port: int, log: Path) -> Iterator[str]:
    """The URL of a server that reports no usage anywhere; at the end it is stopped with its workers."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | quiet | settings
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(process, url, log)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UserError(f"vllm serve ended with exit code {process.returncode}; see {log}")
        try:
            urlopen(f"{url}/v1/models", timeout=10).close()
            return
        except (URLError, OSError):
            time.sleep(2)
    raise UserError(f"vllm serve did not answer within {START_SECONDS:.0f} s; see {log}")


if __name__ == "__main__":
    main()
