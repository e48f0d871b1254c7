"""Sets up and starts Inglenook from a source tree, with nothing but Python: `run` and `test`.

    python3 packaging/bootstrap.py run [--exit] [--cuda] [-- ARGUMENTS OF ingle serve]
    python3 packaging/bootstrap.py test [-- ARGUMENTS OF pytest]

Everything goes into `.venv` beside this tree; a second run starts in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "packaging" / "constraints.txt"
LOG = VENV / "bootstrap.log"
STAMP = VENV / "bootstrap.json"
DEFAULT_MODEL = "smollm2:135m"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LLAMA_INDEX = "https://abetlen.github.io/llama-cpp-python/whl"
# CUDA versions for which that index has ever had wheels; the driver runs all up to its own.
CUDA_WHEELS = ((13, 0), (12, 5), (12, 4), (12, 3), (12, 2), (12, 1))
INDEX_TIMEOUT_S = 3
OLDEST_PYTHON = (3, 11)
START_TIMEOUT_S = 300
INTERRUPT_TIMEOUT_S = 10
LINE_EVERY_S = 30
COMPILERS = ("c++", "g++", "clang++", "cl")
# GCC 12 drops what is stored for `ldtilecfg`, and llama.cpp's AMX kernels crash.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class BootstrapError(Exception):
    """Ends the program with its message; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        check_python(sys.version_info[:2])
        return run(options) if options.command == "run" else test(options)
    except BootstrapError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Everything behind `--` ends up in `rest`, untouched."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Set up and start Inglenook.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="set up, start, show a demo, keep serving")
    running.add_argument("--exit", action="store_true", help="stop after the demo")
    running.add_argument("--cuda", action="store_true", help="use the CUDA build of llama.cpp")
    commands.add_parser("test", help="set up with development tools and run all checks")
    options = parser.parse_args(arguments[:split])
    options.rest = list(arguments[split + 1 :])
    return options


# Setting up


def set_up(*, dev: bool, cuda: bool) -> None:
    """Make the environment as wished, unless it is so already."""
    wanted = {"key": fingerprint(), "dev": dev, "cuda": cuda}
    if is_satisfied(read_stamp(STAMP), wanted):
        return
    STAMP.unlink(missing_ok=True)
    make_venv()
    if cuda:
        install_cuda_build()
    else:
        hint_at_cuda()
    install_project(dev)
    STAMP.write_text(json.dumps(wanted), encoding="utf-8")


def fingerprint() -> str:
    """Changes with everything that decides what is installed."""
    digest = hashlib.sha256(sys.version.encode())
    for file in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_stamp(file: Path) -> dict[str, Any]:
    try:
        stamp: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stamp
    except (OSError, ValueError):
        return {}


def is_satisfied(stamp: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """An environment with more than is wanted will do."""
    more = all(stamp.get(name) or not wanted[name] for name in ("dev", "cuda"))
    return stamp.get("key") == wanted["key"] and more


def make_venv() -> None:
    if venv_program("python").exists():
        return
    finished = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True
    )
    if finished.returncode:
        said = (finished.stdout + finished.stderr).strip().splitlines()
        raise BootstrapError(
            f"could not make {VENV}: {said[-1] if said else 'no reason given'}\n"
            "On Debian and Ubuntu: sudo apt install python3-venv"
        )


def install_project(dev: bool) -> None:
    """The long step: llama.cpp comes as source and is compiled, once."""
    options = torch_options()
    if has_amx() and not has_llama():
        options.append("--no-cache-dir")  # a wheel compiled earlier may use AMX
    if not (has_llama() or compiler()):
        # Perhaps somebody built a wheel for this platform.
        options += ["--only-binary=llama-cpp-python", f"--extra-index-url={LLAMA_INDEX}/cpu"]
    target = f"{ROOT}[dev]" if dev else str(ROOT)
    try:
        pip("Installing; the first time llama.cpp is compiled", [*options, "--editable", target])
    except BootstrapError as error:
        if has_llama() or compiler():
            raise
        raise BootstrapError(f"{error}\n{compiler_help(sys.platform)}") from error


def torch_options() -> list[str]:
    """Without an NVIDIA card the CPU build of torch saves gigabytes, where its index answers."""
    if not sys.platform.startswith("linux") or has_nvidia() or not answers(TORCH_CPU_INDEX):
        return []
    return [f"--extra-index-url={TORCH_CPU_INDEX}"]


def install_cuda_build() -> None:
    version = pinned("llama-cpp-python")
    package = f"llama-cpp-python=={version}"
    again = ["--force-reinstall", "--no-deps", "--no-cache-dir", package]
    index = next((url for url in cuda_indexes(driver_cuda()) if has_wheel(url, version)), None)
    if index is not None:
        options = ["--only-binary=llama-cpp-python", f"--extra-index-url={index}", *again]
        pip(f"Installing the CUDA build from {index}", options)
    elif shutil.which("nvcc") and compiler():
        options = ["--no-binary=llama-cpp-python", *again]
        pip("Compiling llama.cpp for CUDA", options, {"CMAKE_ARGS": "-DGGML_CUDA=on"})
    else:
        raise BootstrapError(
            f"no prebuilt CUDA wheel of {package} for this driver, and no nvcc to build one.\n"
            "Install NVIDIA's CUDA toolkit and a C++ compiler, then try again; "
            "without --cuda models run on the CPU."
        )


def hint_at_cuda() -> None:
    if has_nvidia():
        print(
            "There is an NVIDIA card. What is installed now computes on the CPU; for the card:\n"
            "  python3 packaging/bootstrap.py run --cuda\n"
            f"It takes a prebuilt wheel from {LLAMA_INDEX}/cuXXX,\n"
            "or compiles with CMAKE_ARGS=-DGGML_CUDA=on where nvcc is installed."
        )


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA that the driver runs."""
    try:
        text = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    except OSError:
        text = ""
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    if found is None:
        raise BootstrapError("nvidia-smi does not answer: install the driver of the card first")
    return int(found[1]), int(found[2])


def cuda_indexes(driver: tuple[int, int]) -> list[str]:
    """Newest first. CUDA promises that a driver runs every minor version of its major."""
    usable = [wheel for wheel in CUDA_WHEELS if wheel[0] == driver[0] or wheel <= driver]
    return [f"{LLAMA_INDEX}/cu{major}{minor}" for major, minor in usable]


def has_wheel(index: str, version: str) -> bool:
    page = fetch(f"{index}/llama-cpp-python/")
    return f"llama_cpp_python-{version}" in page


def answers(index: str) -> bool:
    return bool(fetch(f"{index}/torch/"))


def fetch(url: str) -> str:
    """The page, or nothing when it cannot be had quickly."""
    try:
        with urllib.request.urlopen(url, timeout=INDEX_TIMEOUT_S) as page:
            return str(page.read().decode("utf-8", errors="replace"))
    except (OSError, urllib.error.URLError, ValueError):
        return ""


def pinned(package: str) -> str:
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name.strip() == package:
            return version.strip()
    raise BootstrapError(f"{CONSTRAINTS} does not pin {package}")


def pip(what: str, options: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Install, with the time that passed on the terminal and pip's words in the log."""
    command = [str(venv_program("python")), "-m", "pip", "install", "-c", str(CONSTRAINTS)]
    parallel = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    with LOG.open("ab") as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            [*command, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**parallel, **os.environ, **compiler_flags(), **(environment or {})},
        )
        try:
            show_progress(what, process)
        finally:
            end(process)
    print(f"{what}: {time.monotonic() - started_s:.0f} s", flush=True)
    if process.returncode:
        tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        raise BootstrapError("\n".join([*tail, f"pip failed; all it said is in {LOG}"]))


def show_progress(what: str, process: subprocess.Popen[bytes]) -> None:
    terminal = sys.stdout.isatty()
    started_s = time.monotonic()
    next_line_s = started_s + LINE_EVERY_S
    while process.poll() is None:
        elapsed_s = time.monotonic() - started_s
        if terminal:
            turn = "|/-\\"[int(elapsed_s * 4) % 4]
            print(f"\r{turn} {what} … {elapsed_s:.0f} s ", end="", flush=True)
        elif time.monotonic() >= next_line_s:
            next_line_s += LINE_EVERY_S
            print(f"{what} … {elapsed_s:.0f} s", flush=True)
        time.sleep(0.25)
    if terminal:
        print("\r\x1b[K", end="")


# The machine


def check_python(version: tuple[int, ...]) -> None:
    if version < OLDEST_PYTHON:
        raise BootstrapError(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, "
            f"this is {'.'.join(map(str, version))}"
        )


def has_nvidia() -> bool:
    return bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia").exists()


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        return "amx_tile" in cpuinfo.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False


def compiler_flags() -> dict[str, str]:
    if not has_amx():
        return {}
    return {n: f"{os.environ.get(n, '')} {NO_AMX}".strip() for n in ("CFLAGS", "CXXFLAGS")}


def compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((path for c in (named, *COMPILERS) if c and (path := shutil.which(c))), None)


def compiler_help(platform: str) -> str:
    if platform == "darwin":
        todo = "xcode-select --install"
    elif platform == "win32":
        todo = (
            "install 'Desktop development with C++' of the Visual Studio Build Tools,\n"
            "  and run this in their command prompt"
        )
    else:
        todo = (
            "Debian, Ubuntu: sudo apt install build-essential\n"
            "  Fedora:         sudo dnf install gcc-c++\n"
            "  Arch:           sudo pacman -S base-devel"
        )
    return f"No C++ compiler was found, and llama.cpp has to be compiled:\n  {todo}"


def has_llama() -> bool:
    return any(VENV.glob("**/site-packages/llama_cpp/__init__.py"))


def venv_program(name: str) -> Path:
    if sys.platform == "win32":
        return VENV / "Scripts" / f"{name}.exe"
    return VENV / "bin" / name


# run


def run(options: argparse.Namespace) -> int:
    started_s = time.monotonic()
    set_up(dev=False, cuda=options.cuda)
    home = value_of("--home", options.rest)
    if home:
        os.environ["INGLE_HOME"] = str(Path(home).expanduser().absolute())
    model = value_of("--model", options.rest) or value_of("-m", options.rest) or DEFAULT_MODEL
    if ingle("show", model, "--json", quiet=True).returncode and ingle("pull", model).returncode:
        raise BootstrapError(f"could not fetch the model {model}")
    if ingle("status", quiet=True).returncode == 0:
        print("A daemon is running already; the demo talks to it.")
        return ingle("demo", "--model", model).returncode
    rest = options.rest if value_of("--model", options.rest) else ["--model", model, *options.rest]
    return serve(rest, model, options.exit, started_s)


def serve(arguments: Sequence[str], model: str, leave: bool, started_s: float) -> int:
    """Start the daemon, show the demo, then wait for Ctrl-C or stop at once."""
    signal.signal(signal.SIGTERM, _leave)
    daemon = subprocess.Popen([str(venv_program("ingle")), "serve", *arguments])
    try:
        url = wait_for(daemon)
        print(f"Ready after {time.monotonic() - started_s:.0f} s.\n", flush=True)
        demo = ingle("demo", "--model", model)
        if leave:
            return demo.returncode
        print(how_to_talk(url, model), flush=True)
        return daemon.wait()
    except KeyboardInterrupt:
        print("\nStopping …", flush=True)
        # A terminal sends Ctrl-C to the daemon too, and a second signal would cut it short.
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(INTERRUPT_TIMEOUT_S)
        return 130
    finally:
        end(daemon)


def wait_for(daemon: subprocess.Popen[bytes]) -> str:
    """The daemon's address, as soon as a model is ready."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if daemon.poll() is not None:
            raise BootstrapError("the daemon did not start; its message is above")
        status = ingle("status", "--json", quiet=True)
        if status.returncode == 0:
            about = json.loads(status.stdout)
            if not about["loading"]:
                return str(about["url"])
        time.sleep(0.3)
    raise BootstrapError(f"the daemon is not ready after {START_TIMEOUT_S} s: see `ingle logs`")


def ingle(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """`quiet`: keep what it says from the terminal; its output can be read from the result."""
    return subprocess.run(
        [str(venv_program("ingle")), *arguments], capture_output=quiet, text=True, cwd=ROOT
    )


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value of `--option VALUE` or `--option=VALUE` in another program's arguments."""
    for i, argument in enumerate(arguments):
        if argument == option and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None


def how_to_talk(url: str, model: str) -> str:
    ingle_path = venv_program("ingle")
    return f"""
It keeps serving on {url}/v1 until Ctrl-C. Talk to it from another terminal:

  {ingle_path} chat

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none python your_program.py
"""


def end(process: subprocess.Popen[bytes]) -> None:
    """Gently, then not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


# test


def test(options: argparse.Namespace) -> int:
    set_up(dev=True, cuda=False)
    # libgomp reads these when it loads: spinning threads would fight over the cores.
    os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="200")
    failed = [
        step for step in ("ruff check .", "ruff format --check .", "mypy") if not tool(step.split())
    ]
    if failed:
        print(f"FAILED so far: {', '.join(failed)}", flush=True)
    # Last, so that its summary is what a reader finds at the end.
    return 0 if tool(["pytest", *options.rest]) and not failed else 1


def tool(arguments: Sequence[str]) -> bool:
    started_s = time.monotonic()
    print(f"$ {' '.join(arguments)}", flush=True)
    command = [str(venv_program("python")), "-m", *arguments]
    passed = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode == 0
    if arguments[0] != "pytest":
        elapsed_s = time.monotonic() - started_s
        print(f"{'passed' if passed else 'FAILED'} in {elapsed_s:.1f} s\n", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
