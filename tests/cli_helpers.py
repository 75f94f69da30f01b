"""What the tests of the command line share: calling a script, and reading what it wrote."""

import contextlib
import importlib
import io
import os
import shlex
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import user_envs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
STEPS = 32  # steps of each of 4 environments: a rollout is at most 128 transitions
SMALL = [*("--num-envs", 4), *("--num-steps", STEPS), *("--update-epochs", 2), *("--num-minibatches", 2)]
SMALL += [*("--eval-episodes", 3), *("--hidden-size", 16)]
SIZE = 4 * STEPS


@dataclass(frozen=True)
class Script:
    """A script, and the environments of `user_envs` that have actions of its kind."""

    module: ModuleType
    suffix: str = ""

    @property
    def file(self) -> str:
        return f"{self.module.__name__}.py"

    def env(self, name: str = "Walk") -> str:
        return f"user_envs:{name}{self.suffix}-v0"

    def args(self, **changes):
        """The settings of SMALL, with changes."""
        small = {"num_envs": 4, "num_steps": STEPS, "update_epochs": 2, "num_minibatches": 2}
        more = {"eval_episodes": 3, "hidden_size": 16, "env_id": self.env(), "total_timesteps": 300}
        return self.module.Args(**{**small, **more, **changes})


PPO = Script(importlib.import_module("ppo"))
CONTINUOUS = Script(importlib.import_module("ppo_continuous"), "Box")
SCRIPTS = [PPO, CONTINUOUS]
# Mostly, they share the code: the fast subset of the tests calls one of them, but where the scripts differ.
parameters = [PPO, pytest.param(CONTINUOUS, marks=pytest.mark.slow)]
each_script = pytest.mark.parametrize("script", parameters, ids=["ppo", "ppo_continuous"])
each_script_fast = pytest.mark.parametrize("script", SCRIPTS, ids=["ppo", "ppo_continuous"])


@contextlib.contextmanager
def this_process_as_it_was():
    """Restore folder, arguments and signal handlers. Until the script handles a signal, it does nothing."""
    folder, argv, handlers = Path.cwd(), sys.argv, [signal.getsignal(number) for number in SIGNALS]
    try:
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        yield
    finally:
        os.chdir(folder)
        sys.argv = argv
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


def call(script: Script, folder: Path, *args: object, encoding: str = "utf-8"):
    """Run a script's `main` in a folder, in this process. Returns its status, and what it printed."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    at_exit = []
    register = mock.patch("atexit.register", lambda *call, **more: at_exit.append(partial(*call, **more)))
    folder.mkdir(exist_ok=True)
    user_envs.LOG.clear()
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    program = getattr(script.module, "PROGRAM", [])  # plot.py has none
    called = program[:]
    with this_process_as_it_was(), redirected[0], redirected[1], register:
        os.chdir(folder)
        sys.argv = [script.file, *map(str, args)]
        status = 0
        try:
            script.module.main()
        except SystemExit as end:
            status = end.code
        except Exception:  # what Python does with it
            traceback.print_exc()
            status = 1
        for function in at_exit:
            function()
    program[:] = called
    printed, complained = (stream.buffer.getvalue().decode(encoding) for stream in (out, err))
    return SimpleNamespace(status=status, out=printed, err=complained)


def run(script: Script, folder: Path, *args: object, **settings: object):
    """`call` with the small settings, on this script's `Walk`. It must succeed."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = call(script, folder, "--env-id", script.env(), *SMALL, *args, *flags)
    assert (done.status, done.err) == (0, "")
    return done


def environment(**variables: str) -> dict[str, str]:
    """Variables of a process that finds `user_envs`, and prints the same everywhere."""
    dropped = ("COLUMNS", "FORCE_COLOR", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = str(ROOT / "tests")
    return {**kept, "SDL_VIDEODRIVER": "dummy", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": path, **variables}


def command(script: Script, *args: object) -> list[str]:
    """The command that runs a script in a process of its own."""
    return [sys.executable, str(ROOT / script.file), *map(str, args)]


def start(folder: Path, words: list[str], **variables: str) -> subprocess.Popen:
    """Start a command in a folder, as the leader of a process group."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(words, cwd=folder, env=environment(**variables), start_new_session=True, **pipes)


def finish(process: subprocess.Popen):
    """Wait until a process has ended. Returns its status, and what it printed."""
    try:
        out, err = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hangs: {process.communicate()}")
    return SimpleNamespace(status=process.returncode, out=out, err=err)


def shell(script: Script, folder: Path, *args: object, **variables: str):
    """Run a script in a folder, in a process of its own."""
    return finish(start(folder, command(script, *args), **variables))


def assert_refused(result, folder: Path, *words: str) -> None:
    """One line on stderr that has the words, exit status 2, and nothing written."""
    assert result.status == 2, result
    assert result.err.count("\n") == 1, result.err
    assert len(result.err) < 600, "too long to be read"
    for word in words:
        assert word in result.err
    assert not (folder / "runs").exists()


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint of the only run below a folder."""
    (path,) = folder.glob("runs/*/checkpoint.pt")
    return path


def load(path: Path) -> dict:
    """What a checkpoint holds."""
    return torch.load(path, weights_only=True)


def steps_done(path: Path) -> int:
    return load(path)["state"]["global_step"]


def tensors(content: object):
    """All tensors in nested dicts and lists."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, (dict, list)):
        for item in content.values() if isinstance(content, dict) else content:
            yield from tensors(item)


def same(a: object, b: object) -> bool:
    """Equality, bit for bit, of nested dicts and lists with tensors in them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


def events(folder: Path) -> EventAccumulator:
    """All that TensorBoard shows of a run, nothing thinned out."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """A run's curves by tag, and by step; a step that is there twice fails. The speed is left out."""
    log, found = events(folder), {}
    for tag in log.Tags()["scalars"]:
        steps = [event.step for event in log.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag} has a step twice, or goes back"
        if tag != "charts/SPS":
            found[tag] = {event.step: event.value for event in log.Scalars(tag)}
    return found


def printed_command(text: str, flag: str) -> list[str]:
    """The arguments after `python <script>` of the last command with this flag, as a user would copy it."""
    line = [line for line in text.splitlines() if f" {flag} " in line and "python " in line][-1]
    return shlex.split(line[line.index("python ") :])[2:]


def printed_checkpoint(text: str, flag: str, folder: Path) -> Path:
    """The checkpoint in the last command with this flag."""
    words = printed_command(text, flag)
    return folder / words[words.index(flag) + 1]
