"""ppo.py as its user meets it: the command line, its exit status, its output and its files."""

import ast
import filecmp
import importlib
import inspect
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

SCRIPT = Path(__file__).resolve().parent.parent / "ppo.py"
sys.path.insert(0, str(SCRIPT.parent))
ppo = importlib.import_module("ppo")

SMALL = ["--num-envs", 4, "--num-steps", 32, "--eval-episodes", 3]  # a rollout of 128 rows
ROWS = 4 * 32
STATUS = re.compile(r"([\d,]+) steps +(\d+)% +([\d,]+)/s, (\d+):(\d\d) left +return (-?[\d.]+)")
USERS_ENV = '''
import gymnasium as gym
import numpy as np


class MyEnv(gym.Env):
    """Ten steps an episode; the reward is the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), float(action), self.t == 10, False, {}

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)
'''
MODULE = (
    USERS_ENV
    + '''
import multiprocessing
import os
import signal
import time
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiDiscrete, Sequence
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Counted(MyEnv):
    """Counts the steps of all its instances; in step 150 it stops the training, as Ctrl-C does."""

    steps = 0

    def step(self, action):
        Counted.steps += 1
        if Counted.steps == 150:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class Slow(MyEnv):
    """Takes so long that a signal comes while it steps."""

    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


class Fails(MyEnv):
    """Fails after 100 steps: two rollouts of 32, and some."""

    def __init__(self, how, render_mode=None):
        super().__init__(render_mode)
        self.how, self.total = how, 0

    def reset(self, **kwargs):
        if self.how == "reset":
            raise RuntimeError("cannot start")
        return super().reset(**kwargs)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.total += 1
        if self.total > 100:
            if self.how == "raises":
                raise RuntimeError("the simulator broke")
            if self.how == "dies" and multiprocessing.parent_process():
                os.kill(os.getpid(), signal.SIGKILL)
            reward = {"nan reward": np.nan, "huge reward": 1e38}.get(self.how, reward)
            obs = obs * np.nan if self.how == "nan observation" else obs
        return obs, reward, *rest


class Stopped(Fails):
    """Fails after one of its instances has stopped the training, as Ctrl-C does."""

    sent = False

    def step(self, action):
        if self.total == 100 and not Stopped.sent:
            Stopped.sent = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class Spaces(MyEnv):
    """Other spaces than a small vector and two actions."""

    def __init__(self, obs=MyEnv.observation_space, action=MyEnv.action_space, render_mode=None):
        super().__init__(render_mode)
        self.observation_space, self.action_space = obs, action

    def observe(self):
        return self.observation_space.sample()


class NotRendered(MyEnv):
    metadata = {"render_modes": []}

    def __init__(self, render_mode=None):
        assert render_mode is None


class NotMade(MyEnv):
    def __init__(self, error, render_mode=None):
        raise error


class SameStep(SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([MyEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


gym.register("MyEnv-v0", MyEnv)
gym.register("ns/My-Env-v0", MyEnv)
gym.register("Counted-v0", Counted)
gym.register("Slow-v0", Slow)
gym.register("Stopped-v0", Stopped, kwargs={"how": "huge reward"})
for how in ("raises", "dies", "reset", "nan reward", "huge reward", "nan observation"):
    gym.register(f"{how.title().replace(' ', '')}-v0", Fails, kwargs={"how": how})
gym.register("Image-v0", Spaces, kwargs={"obs": Box(0, 255, (32, 32, 3), np.uint8)})
gym.register("Grey-v0", Spaces, kwargs={"obs": Box(0, 255, (32, 32), np.uint8)})
gym.register("Sequence-v0", Spaces, kwargs={"obs": Sequence(Discrete(3))})
gym.register("Graph-v0", Spaces, kwargs={"obs": Dict(a=Graph(Box(-1, 1, (2,)), None))})
gym.register("MultiDiscrete-v0", Spaces, kwargs={"action": MultiDiscrete([2, 3])})
gym.register("NotRendered-v0", NotRendered)
missing = gym.error.DependencyNotInstalled("run `pip install toolbox`")
gym.register("Dependency-v0", NotMade, kwargs={"error": missing})
gym.register("Import-v0", NotMade, kwargs={"error": ImportError("No module named 'toolbox'")})
gym.register("Licence-v0", NotMade, kwargs={"error": RuntimeError("no licence for the toolbox")})
gym.register("SameStep-v0", MyEnv, vector_entry_point=SameStep)
'''
)


def environment(**variables: str) -> dict[str, str]:
    """This process's environment variables, without those that would change what a script prints."""
    dropped = ("COLUMNS", "FORCE_COLOR", "PYTHONPATH", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**kept, "SDL_VIDEODRIVER": "dummy", "PYTHONIOENCODING": "utf-8", **variables}


def shell(folder: Path, *args: object, script: Path = SCRIPT, timeout: float = 120, **variables: str):
    """Run the script in a folder, in a process of its own; returns returncode, stdout and stderr."""
    return subprocess.run(
        [sys.executable, script, *map(str, args)],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def popen(folder: Path, *args: object, **variables: str) -> subprocess.Popen:
    """Start the script in a folder, as the leader of a process group, and go on."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, args)],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def until(process: subprocess.Popen, pattern: re.Pattern) -> str:
    """Read a process's output until a line holds the pattern; returns what was read."""
    read = ""
    for line in process.stdout:
        read += line
        if pattern.search(line):
            return read
    pytest.fail(f"ended without {pattern.pattern}: {read}{process.stderr.read()}")


def in_process(folder: Path, args: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """What `shell` does, but in this process: for the many cases in which little can differ."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ppo.py", *map(str, args)])
    capsys.readouterr()
    try:
        ppo.main()
        status = 0
    except SystemExit as end:
        status = end.code
    output = capsys.readouterr()
    return SimpleNamespace(returncode=status, stdout=output.out, stderr=output.err)


@pytest.fixture
def main(tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable:
    """`main("--flag", value, ...)` calls ppo.main in an empty folder; `my_module` can be imported."""
    monkeypatch.syspath_prepend(modules)
    return lambda *args: in_process(tmp_path, [*args], monkeypatch, capsys)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `my_module.py`, which registers environments."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "my_module.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The command of the docstring, at 100,000 steps; `times` tells when each line came."""
    folder, started, lines, times = tmp_path_factory.mktemp("solved"), time.monotonic(), [], []
    process = popen(folder, "--env-id", "CartPole-v1", "--total-timesteps", 100_000)
    for line in process.stdout:
        lines.append(line)
        times.append(time.monotonic() - started)
    stderr = process.stderr.read()
    return SimpleNamespace(
        folder=folder, lines=lines, times=times, stderr=stderr, returncode=process.wait(timeout=60)
    )


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A finished run of 2,000 steps, not to be changed: `copy_of` it."""
    folder = tmp_path_factory.mktemp("short")
    done = shell(folder, "--total-timesteps", 2000, *SMALL, "--ent-coef", 0.03)
    assert (done.returncode, done.stderr) == (0, "")
    return SimpleNamespace(folder=folder, run=only_run(folder), stdout=done.stdout)


def copy_of(short: SimpleNamespace, folder: Path) -> Path:
    """The checkpoint in a copy, below `folder`, of all that the run `short` wrote."""
    shutil.copytree(short.folder, folder, dirs_exist_ok=True)
    return only_run(folder) / "checkpoint.pt"


def only_run(folder: Path) -> Path:
    """The one run folder below `folder`."""
    (run,) = (folder / "runs").iterdir()
    return run


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def steps_done(path: Path) -> int:
    return load(path)["state"]["global_step"]


def events(run: Path) -> EventAccumulator:
    """All that TensorBoard shows of a run, nothing thinned out."""
    return EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run by tag, but for the speed."""
    log = events(run)
    tags = [tag for tag in log.Tags()["scalars"] if tag != "charts/SPS"]
    return {tag: [(e.step, e.value) for e in log.Scalars(tag)] for tag in tags}


def same(a: object, b: object) -> bool:
    """Equality, bit for bit, of nested dicts and lists with tensors in them."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


def printed_command(text: str, flag: str) -> list[str]:
    """The arguments of the last command in `text` that has this flag, as a user would copy it."""
    line = [line for line in text.splitlines() if f" {flag} " in line and "python " in line][-1]
    return shlex.split(line[line.index("python ") :])


def run_printed(text: str, flag: str, folder: Path, *more: object):
    """Run the printed command with this flag, and `more` after it, in a process of its own."""
    _, script, *args = printed_command(text, flag)
    return shell(folder, *args, *more, script=Path(script))


def assert_refused(result: object, folder: Path, *words: str) -> None:
    """One line on stderr that has the words, exit status 2, and nothing written."""
    assert result.returncode == 2, result
    assert result.stderr.startswith("ppo.py: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.endswith("\n")
    assert len(result.stderr) < 500, "too long to be read"
    for word in words:
        assert word in result.stderr
    assert not (folder / "runs").is_dir()


def assert_failed(result: object, folder: Path, words: str) -> Path:
    """Exit status 1; the reason and how to go on in the last lines of stderr. Returns the last checkpoint."""
    assert result.returncode == 1, result
    *_, resume, reason = result.stderr.splitlines()
    assert reason.startswith("ppo.py: "), result.stderr
    assert words in reason
    checkpoint = folder / printed_command(resume, "--resume")[-1]
    assert all(x.isfinite().all() for x in load(checkpoint)["agent"].values())
    return checkpoint


# A run


def test_cartpole_is_solved(solved: SimpleNamespace) -> None:
    """The first command that a user tries ends, in 100,000 steps, with the highest return there is."""
    assert (solved.returncode, solved.stderr) == (0, "")
    greedy = re.search(r"^greedy +return ([\d.]+).* 10 episodes", "".join(solved.lines), re.MULTILINE)
    assert greedy.group(1) == "500.0"


def test_redirected_output_is_readable(solved: SimpleNamespace) -> None:
    """A header, then about a line a second with steps, speed, time left and return, as it happens."""
    text = "".join(solved.lines)
    assert "\r" not in text
    assert "\x1b" not in text
    assert max(map(len, solved.lines)) < 250
    header = " ".join(solved.lines[:6])
    args = ppo.Args()
    rows, steps = args.num_envs * args.num_steps, args.update_epochs * args.num_minibatches
    for number in (100_000, rows, -(-100_000 // rows), steps, steps * -(-100_000 // rows)):
        assert re.search(rf"\b{number:,}\b", header), f"{number:,}"
    assert "CartPole-v1" in header
    shown = [(when, STATUS.search(line)) for when, line in zip(solved.times, solved.lines, strict=True)]
    shown = [(when, match) for when, match in shown if match]
    messages = sum(line.startswith("[") for line in solved.lines)
    seconds = shown[-1][0] - shown[0][0]
    assert seconds / 3 <= len(shown) <= seconds + 2 + messages
    steps = [int(match.group(1).replace(",", "")) for _, match in shown]
    assert steps == sorted(set(steps))
    assert all(
        abs(step / 1000 - int(match.group(2))) <= 1 for step, (_, match) in zip(steps, shown, strict=True)
    )
    left = [60 * int(match.group(4)) + int(match.group(5)) for _, match in shown]
    assert left[0] > left[-1]
    assert float(shown[-1][1].group(6)) > 5 * float(shown[0][1].group(6))


def test_ends_with_what_to_do_next(solved: SimpleNamespace) -> None:
    """The last lines say how to view, watch and continue, and name files that are there."""
    text, checkpoint = "".join(solved.lines[-3:]), only_run(solved.folder) / "checkpoint.pt"
    assert "tensorboard --logdir runs" in text
    for flag in ("--evaluate", "--resume"):
        command = printed_command(text, flag)
        assert (solved.folder / command[command.index(flag) + 1]).samefile(checkpoint)
        assert Path(command[1]) == SCRIPT
    assert "--capture-video" in printed_command(text, "--evaluate")
    assert int(printed_command(text, "--resume")[-1]) > 100_000


def test_printed_commands_work(short: SimpleNamespace, tmp_path: Path) -> None:
    """Pasted into a shell, the printed commands train on, and show the run in TensorBoard."""
    copy_of(short, tmp_path)
    resumed = run_printed(short.stdout, "--resume", tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert 4000 <= steps_done(only_run(tmp_path) / "checkpoint.pt") < 4000 + ROWS
    logdir = re.search(r"tensorboard (--logdir .*)", short.stdout).group(1)
    view = [sys.executable, "-m", "tensorboard.main", *shlex.split(logdir), "--inspect"]
    viewed = subprocess.run(view, cwd=tmp_path, env=environment(), capture_output=True, encoding="utf-8")
    assert "charts/episodic_return" in viewed.stdout, viewed.stderr


# The run folder


def test_run_folder_has_a_safe_name(main: Callable, tmp_path: Path, short: SimpleNamespace) -> None:
    """<env>__<exp>__<seed>__<time>, one folder whatever stands in an id or a name."""
    assert re.fullmatch(r"CartPole-v1__ppo__1__\d+", short.run.name)
    name = "../a b:c"
    done = main("--env-id", "my_module:ns/My-Env-v0", "--exp-name", name, "--total-timesteps", 50, *SMALL)
    assert done.returncode == 0
    run = only_run(tmp_path)
    assert re.fullmatch(r"my_module\W?_?ns_My-Env-v0__[\w.+-]+__1__\d+", run.name)
    assert re.fullmatch(r"[\w.+-]+", run.name)
    assert sorted(path.name[:6] for path in run.iterdir()) == ["checkp", "events"]
    assert os.listdir(tmp_path) == ["runs"]


def test_runs_share_no_folder(main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs started at once have a folder each, and none takes another's at the same tick of the clock."""
    both = [popen(tmp_path, "--total-timesteps", 50, *SMALL) for _ in range(2)]
    assert [process.communicate(timeout=120)[1] for process in both] == ["", ""]
    assert [process.returncode for process in both] == [0, 0]
    assert len(list((tmp_path / "runs").glob("*/checkpoint.pt"))) == 2
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    assert main("--total-timesteps", 50, *SMALL).returncode == 0
    (first,) = (tmp_path / "runs").glob("*__10*0")
    before = {path: path.read_bytes() for path in first.iterdir()}
    assert main("--total-timesteps", 50, *SMALL).returncode in (0, 2)
    assert before == {path: path.read_bytes() for path in first.iterdir()}


def test_tensorboard_has_all_tags(short: SimpleNamespace) -> None:
    """The tags that dashboards know, ours, the table of settings, and the page of hyperparameters."""
    log = events(short.run)
    episodic = [
        f"episodic_{name}{part}" for name in ("return", "length") for part in ("", "_std", "_min", "_max")
    ]
    charts = [*episodic, "SPS", "learning_rate", "clip_coef", "ent_coef", "kl_coef"]
    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance grad_norm kl"
    wanted = {f"charts/{name}" for name in charts} | {f"losses/{name}" for name in losses.split()}
    wanted |= {"losses/policy_mismatch", "eval/greedy_return", "eval/stochastic_return"}
    assert wanted <= set(log.Tags()["scalars"])
    (table,) = log.Tensors("settings/text_summary")
    names = [field.name for field in fields(ppo.Args)]
    for name in names:
        assert f"|{name}|" in table.tensor_proto.string_val[0].decode()
    start = log.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    hyperparameters = HParamsPluginData.FromString(start).session_start_info.hparams
    assert set(hyperparameters) == set(names)
    assert hyperparameters["ent_coef"].number_value == 0.03


def test_curves_have_a_point_an_iteration(short: SimpleNamespace) -> None:
    """From the first rollout's steps to the checkpoint's, never more than a rollout apart."""
    data = curves(short.run)
    steps = [0, *(step for step, _ in data["losses/kl"])]
    assert all(0 < b - a <= ROWS for a, b in pairwise(steps))
    assert steps[-1] == steps_done(short.run / "checkpoint.pt") >= 2000
    assert [step for step, _ in data["charts/learning_rate"]] == steps[1:]
    rates = [value for _, value in data["charts/learning_rate"]]
    assert rates == pytest.approx([1e-3 * (1 - step / 2000) for step in steps[:-1]], rel=1e-4)
    assert [value for _, value in data["charts/ent_coef"]] == pytest.approx([0.03] * len(rates))
    assert all(low <= mean <= high for (_, low), (_, mean), (_, high) in zip(
        *(data[f"charts/episodic_return{part}"] for part in ("_min", "", "_max")), strict=True
    ))  # fmt: skip
    returns, lengths = data["charts/episodic_return"], data["charts/episodic_length"]
    assert [value for _, value in returns] == [value for _, value in lengths]  # CartPole pays 1 a step


def test_steps_are_the_environments_own(main: Callable, tmp_path: Path) -> None:
    """The x axis counts what the environments really stepped, not the rows in which they only reset."""
    stopped = main("--env-id", "my_module:Counted-v0", "--total-timesteps", 10**6, *SMALL)
    assert stopped.returncode == 130
    counted = sys.modules["my_module"].Counted.steps
    assert steps_done(only_run(tmp_path) / "checkpoint.pt") == counted
    assert curves(only_run(tmp_path))["losses/kl"][-1][0] == counted
    assert 150 <= counted < 2 * ROWS


def test_checkpoint_holds_all(short: SimpleNamespace) -> None:
    """It loads without running code from it, and has weights, both normalisers, optimiser, random state."""
    content = load(short.run / "checkpoint.pt")
    assert set(content) >= {"format", "args", "state", "agent", "optimizer", "random"}
    assert set(content["args"]) == {field.name for field in fields(ppo.Args)}
    assert content["args"]["ent_coef"] == 0.03
    assert content["agent"]["obs_moments.count"] == content["state"]["global_step"]
    assert content["agent"]["return_moments.count"] == content["state"]["global_step"]
    assert {"actor.0.weight", "critic.0.weight"} <= content["agent"].keys()
    weights = [value for name, value in content["agent"].items() if name.startswith(("actor.", "critic."))]
    (moments,) = content["optimizer"]["state"].values()  # the optimiser sees all weights as one vector
    assert len(moments["exp_avg"]) == len(moments["exp_avg_sq"]) == sum(value.numel() for value in weights)
    assert content["random"][0].dtype == torch.uint8
    assert not list(short.run.glob("*.tmp"))


# Determinism


def test_same_seed_same_run(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """In another process the same seed gives the same curves and weights, bit for bit; another does not."""
    command = ["--total-timesteps", 2000, *SMALL, "--ent-coef", 0.03]
    assert main(*command).returncode == 0
    again = only_run(tmp_path)
    assert curves(again) == curves(short.run)
    assert same(load(again / "checkpoint.pt"), load(short.run / "checkpoint.pt")), "checkpoints differ"
    assert main(*command, "--seed", 2).returncode == 0
    (other,) = (tmp_path / "runs").glob("*__2__*")
    assert not same(load(other / "checkpoint.pt")["agent"], load(again / "checkpoint.pt")["agent"])
    assert curves(other)["charts/episodic_return"] != curves(again)["charts/episodic_return"]


# Evaluation


def results(text: str) -> list[str]:
    return re.findall(r"^(?:greedy|stochastic) .*$", text, re.MULTILINE)


def test_evaluation_repeats(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """A new process gets the returns printed when training ended; nothing in the run folder changes."""
    checkpoint = copy_of(short, tmp_path)
    evaluated = shell(tmp_path, "--evaluate", checkpoint)
    assert (evaluated.returncode, evaluated.stderr) == (0, "")
    assert len(results(evaluated.stdout)) == 2
    assert results(evaluated.stdout) == results(short.stdout)
    five = [main("--evaluate", checkpoint, "--eval-episodes", 5).stdout for _ in range(2)]
    assert five[0] == five[1]
    assert all("5 episodes" in line for line in results(five[0]))
    cut = main("--evaluate", checkpoint, "--eval-max-steps", 7)
    assert "return 7.0" in cut.stdout
    assert "3 cut" in cut.stdout
    other = main("--evaluate", checkpoint, "--seed", 5)
    assert results(other.stdout) != results(short.stdout)
    comparison = filecmp.dircmp(short.folder, tmp_path)
    assert not comparison.left_only + comparison.right_only
    for path in short.run.iterdir():
        assert path.read_bytes() == (checkpoint.parent / path.name).read_bytes()


def test_videos_play(short: SimpleNamespace, tmp_path: Path) -> None:
    """The printed command records each greedy episode, from its first frame to its last."""
    moviepy = pytest.importorskip("moviepy")
    checkpoint = copy_of(short, tmp_path)
    evaluated = run_printed(short.stdout, "--evaluate", tmp_path, "--eval-episodes", 2)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "Traceback" not in evaluated.stderr
    low, high = map(float, re.search(r"from ([\d.]+) to ([\d.]+)", evaluated.stdout).groups())
    videos = list(checkpoint.parent.glob("**/*.mp4"))
    assert len(videos) == 2
    frames = []
    for path in videos:
        with moviepy.VideoFileClip(str(path)) as clip:
            assert clip.get_frame(0).std() > 0
            frames.append(round(clip.duration * clip.fps))
    assert sorted(frames) == pytest.approx([low, high], abs=2)


# Resuming


def test_two_resumes_are_identical(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """All that training depends on is in the checkpoint: what follows from it is the same, bit for bit."""
    (tmp_path / "a").mkdir()
    first, second = copy_of(short, tmp_path / "a"), copy_of(short, tmp_path / "b")
    done = shell(tmp_path, "--resume", first, "--total-timesteps", 3000)
    assert (done.returncode, done.stderr) == (0, "")
    torch.rand(7)  # nothing may depend on what this process did before
    assert main("--resume", second, "--total-timesteps", 3000).returncode == 0
    assert steps_done(first) >= 3000
    for part in ("state", "agent", "optimizer", "random"):
        assert same(load(first)[part], load(second)[part]), f"{part} differs"
    assert curves(first.parent) == curves(second.parent)
    steps = [step for step, _ in curves(first.parent)["losses/kl"]]
    assert len(set(steps)) == len(steps) == 1 + steps.index(steps_done(first))
    assert set(steps) > {step for step, _ in curves(short.run)["losses/kl"]}
    assert not same(load(first)["agent"], load(short.run / "checkpoint.pt")["agent"])


def test_resume_uses_all_parts(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """Where a checkpoint's random state, optimiser or normalisers differ, so does what follows from it."""
    after = []
    for change in ("none", "random", "optimizer", "obs_moments.mean", "return_moments.var"):
        (tmp_path / change).mkdir()
        path = copy_of(short, tmp_path / change)
        content = load(path)
        if change == "random":
            content["random"][0] = torch.Generator().manual_seed(7).get_state()
        elif change == "optimizer":
            for moments in content["optimizer"]["state"].values():
                moments["exp_avg"].zero_()
        elif change != "none":
            content["agent"][change] += 1
        torch.save(content, path)
        assert main("--resume", path, "--total-timesteps", 2100).returncode == 0
        after.append(load(path)["agent"]["actor.0.weight"])
    assert not any(torch.equal(after[0], other) for other in after[1:])


def test_flags_override_saved_ones(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """With --resume, a flag that is given counts, and the others are as they were."""
    checkpoint = copy_of(short, tmp_path)
    flags = ["--learning-rate", 0.0123, "--no-anneal-lr", "--total-timesteps", 2300]
    planned = main("--resume", checkpoint, *flags, "--plan")
    assert planned.returncode == 0
    for setting in ("2,300", "learning_rate 0.0123", "anneal_lr False", "ent_coef 0.03"):
        assert setting in planned.stdout
    assert filecmp.cmp(checkpoint, short.run / "checkpoint.pt", shallow=False), "--plan wrote"
    assert main("--resume", checkpoint, *flags).returncode == 0
    args, before = load(checkpoint)["args"], steps_done(short.run / "checkpoint.pt")
    assert (args["learning_rate"], args["anneal_lr"], args["ent_coef"]) == (0.0123, False, 0.03)
    rates = [value for step, value in curves(checkpoint.parent)["charts/learning_rate"] if step > before]
    assert rates == pytest.approx([0.0123] * 3)
    assert not (tmp_path / "runs" / "runs").exists()
    assert only_run(tmp_path) == checkpoint.parent


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--clip-coef", 0.1], "clip_coef", 0.1),
        (["--surrogate", "kl-penalty", "--kl-coef", 5], "kl_coef", 5),
        (["--adapt", "learning-rate", "--learning-rate", 2e-3, "--no-anneal-lr"], "learning_rate", 2e-3),
        (["--adapt", "clip-coef", "--clip-coef", 0.15], "clip_coef", 0.15),
    ],
)
def test_coefficients_given_anew_are_those_of_the_next_iteration(
    short: SimpleNamespace, main: Callable, tmp_path: Path, flags: list, name: str, value: float
) -> None:
    """With --resume, a coefficient that is given replaces the saved one, also where it adapts from there."""
    checkpoint = copy_of(short, tmp_path)
    before = steps_done(checkpoint)
    assert main("--resume", checkpoint, *flags, "--total-timesteps", 2300).returncode == 0
    logged = [number for step, number in curves(checkpoint.parent)[f"charts/{name}"] if step > before]
    assert logged[0] == pytest.approx(value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num-envs", 8),
        ("--num-steps", 16),
        ("--hidden-size", 32),
        ("--env-id", "Acrobot-v1"),
        ("--no-norm-obs", ""),
    ],
)
def test_fixed_settings_stay(short: SimpleNamespace, main: Callable, flag: str, value: object) -> None:
    """Settings that a checkpoint's networks and rollouts depend on cannot be changed."""
    checkpoint = short.run / "checkpoint.pt"
    flags = [flag, value] if value else [flag]
    result = main("--resume", checkpoint, "--total-timesteps", 9000, *flags)
    assert_refused(
        result, Path.cwd(), flag.removeprefix("--no-").strip("-").replace("-", "_"), "checkpoint.pt"
    )


def test_finished_run_needs_more_steps(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """Resuming what is done is refused, with the flag that helps, and leaves the run as it is."""
    result = main("--resume", short.run / "checkpoint.pt")
    assert_refused(result, tmp_path, "--total-timesteps", f"{steps_done(short.run / 'checkpoint.pt'):,}")


def test_sigkill_at_any_time(tmp_path: Path) -> None:
    """Killed thrice between checkpoints and resumed, a run's curves have no gap and nothing twice."""
    generator, beyond = random.Random(0), 0
    args = ["--total-timesteps", 10**6, *SMALL]
    for seconds in (0.7, 0.7, 1e-9):  # with checkpoints all the time, it is killed while it writes one
        process = popen(tmp_path, *args, "--checkpoint-seconds", seconds)
        text = until(process, STATUS)
        time.sleep(generator.uniform(0.3, 1.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        path = only_run(tmp_path) / "checkpoint.pt"
        logged = [e.step for file in path.parent.glob("events*") for e in EventFileLoader(str(file)).Load()]
        beyond += max(logged) > steps_done(path)
        args = ["--resume", path]
        assert "folder" in text
    assert beyond, "no run was killed between a checkpoint and the next events: the test shows nothing"
    before = steps_done(path)
    finished = shell(tmp_path, "--resume", path, "--total-timesteps", before + 300)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert not list(path.parent.glob("*.tmp"))
    assert before + 300 <= steps_done(path) < before + 300 + ROWS
    for tag, curve in curves(path.parent).items():
        steps = [step for step, _ in curve]
        assert steps == sorted(set(steps)), f"{tag} has a step twice, or goes back"
        if tag.startswith("losses/"):
            gaps = [b - a for a, b in zip([0, *steps], steps, strict=False)]
            assert max(gaps) <= ROWS, f"{tag} has a gap of {max(gaps)}"
            assert steps[-1] == steps_done(path)


# Signals


SLOW = ["--async-envs", "--env-id", "my_module:Slow-v0", "--update-epochs", "1"]


@pytest.mark.parametrize(
    ("number", "status", "whom", "flags"),
    [
        (signal.SIGTERM, 143, os.kill, []),
        (signal.SIGINT, 130, os.killpg, []),
        (signal.SIGTERM, 143, os.kill, SLOW),
        (signal.SIGINT, 130, os.killpg, SLOW),  # what Ctrl-C does in a terminal
        (signal.SIGTERM, 143, os.killpg, SLOW),  # what job schedulers and `timeout` do
    ],
)
def test_signal_saves_and_ends(
    number: signal.Signals, status: int, whom: Callable, flags: list[str], modules: Path, tmp_path: Path
) -> None:
    """The iteration is finished and saved, and the command that goes on is printed, and works."""
    args = ["--total-timesteps", 10**6, *SMALL, "--checkpoint-seconds", 1000, *flags]
    process = popen(tmp_path, *args, PYTHONPATH=str(modules))
    shown = STATUS.search(until(process, STATUS)).group(1)
    whom(process.pid, number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (status, "")
    last = stdout.splitlines()[-1]
    path = tmp_path / printed_command(last, "--resume")[-1]
    steps = steps_done(path)
    assert steps >= int(shown.replace(",", "")) > 0
    assert f"{steps:,}" in last
    assert curves(path.parent)["losses/kl"][-1][0] == steps
    if whom is os.killpg and not flags:
        resumed = run_printed(last, "--resume", tmp_path, "--total-timesteps", steps + 1)
        assert (resumed.returncode, resumed.stderr) == (0, "")


# Worker processes


def test_async_envs(modules: Path, main: Callable, tmp_path: Path) -> None:
    """Worker processes train as one process does, bit for bit; and such a checkpoint evaluates in one."""
    args = ["--env-id", "my_module:MyEnv-v0", "--total-timesteps", 600, *SMALL]
    done = shell(tmp_path, *args, "--async-envs", PYTHONPATH=str(modules))
    assert (done.returncode, done.stderr) == (0, "")
    workers = only_run(tmp_path)
    evaluated = shell(tmp_path, "--evaluate", workers / "checkpoint.pt", PYTHONPATH=str(modules))
    assert (evaluated.returncode, evaluated.stderr) == (0, "")
    assert results(evaluated.stdout) == results(done.stdout) != []
    assert main(*args, "--exp-name", "alone").returncode == 0
    (alone,) = (tmp_path / "runs").glob("*alone*")
    assert curves(alone) == curves(workers)


# Refusals

BAD = {
    "--env-id CartPole-v9": "v1",
    "--env-id CartPol-v1": "CartPole",
    "--env-id nothing": "nothing",
    "--env-id no_module:MyEnv-v0": "no_module",
    "--env-id my_module:NoEnv-v0": "NoEnv",
    "--env-id Pendulum-v1": "ppo_continuous.py",
    "--env-id my_module:Image-v0": "ppo_atari.py",
    "--env-id my_module:Grey-v0": "ppo_atari.py",
    "--env-id my_module:Sequence-v0": "Sequence",
    "--env-id my_module:Graph-v0": "Graph",
    "--env-id my_module:MultiDiscrete-v0": "MultiDiscrete",
    "--env-id my_module:Dependency-v0": "pip install toolbox",
    "--env-id my_module:Import-v0": "toolbox",
    "--env-id my_module:Licence-v0": "no licence for the toolbox",
    "--env-id my_module:SameStep-v0": "SAME_STEP",
    "--env-id my_module:NotRendered-v0 --capture-video --total-timesteps 50": "NotRendered",
    "--num-envs 0": "--num-envs",
    "--num-envs -3": "--num-envs",
    "--num-steps 1": "--num-steps",
    "--num-minibatches 0": "--num-minibatches",
    "--num-envs 16 --num-steps 64 --num-minibatches 513": "512",
    "--update-epochs 0": "--update-epochs",
    "--total-timesteps 0": "--total-timesteps",
    "--hidden-size 0": "--hidden-size",
    "--eval-episodes 0": "--eval-episodes",
    "--eval-max-steps 0": "--eval-max-steps",
    "--num-threads 0": "--num-threads",
    "--seed -1": "--seed",
    "--gamma 1.5": "--gamma",
    "--gamma nan": "--gamma",
    "--gae-lambda -0.1": "--gae-lambda",
    "--learning-rate nan": "--learning-rate",
    "--learning-rate -1": "--learning-rate",
    "--learning-rate inf": "--learning-rate",
    "--learning-rate 0": "--learning-rate",
    "--clip-coef 0": "--clip-coef",
    "--ent-coef -0.1": "--ent-coef",
    "--vf-coef nan": "--vf-coef",
    "--max-grad-norm 0": "--max-grad-norm",
    "--target-kl 0": "--target-kl",
    "--checkpoint-seconds nan": "--checkpoint-seconds",
    "--adapt kl-coef": "--surrogate kl-penalty",
    "--adapt clip-coef --surrogate kl-penalty": "--surrogate clip",
    "--resume none.pt": "none.pt",
    "--evaluate none.pt": "none.pt",
    "--resume=": "empty",
    "--evaluate=": "empty",
    "--num-envs 100000 --num-steps 1000000": "lower --num-envs or --num-steps",
}
UNSAFE = {
    "--update-epochs 31": "--update-epochs",
    "--clip-coef 0.4": "--clip-coef",
    "--no-norm-adv --no-norm-rewards": "--norm-rewards",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flags", [*BAD, *UNSAFE])
def test_bad_request(flags: str, main: Callable, tmp_path: Path) -> None:
    """Refused before anything is written, in one line that names what to change."""
    assert_refused(main(*flags.split()), tmp_path, {**BAD, **UNSAFE}[flags])


@pytest.mark.parametrize("flags", UNSAFE)
def test_unsafe_request(flags: str, main: Callable, tmp_path: Path) -> None:
    """The refusal of what is only known to break PPO names the flag that overrides it, and that flag does."""
    assert "--allow-unsafe" in main(*flags.split()).stderr
    assert main(*flags.split(), "--allow-unsafe", "--plan").returncode == 0


def test_what_is_missing_here(
    short: SimpleNamespace, main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there is refused at the start, with what to do, but where an evaluation does without it."""
    if not torch.cuda.is_available():
        assert_refused(main("--device", "cuda"), tmp_path, "cuda", "cpu")
    if not torch.backends.mps.is_available():
        assert_refused(main("--device", "mps"), tmp_path, "mps", "cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert_refused(main("--compile"), tmp_path, "compiler: no-such-compiler or clang++")
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert_refused(main("--capture-video"), tmp_path, "pip install moviepy")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_refused(main("--track"), tmp_path, "pip install wandb")
    content = load(short.run / "checkpoint.pt")
    content["args"] |= {"compile": True, "track": True}
    torch.save(content, tmp_path / "elsewhere.pt")
    assert results(main("--evaluate", tmp_path / "elsewhere.pt").stdout) == results(short.stdout)


def damaged(good: Path, path: Path, how: str) -> None:
    """Write to `path` what `how` makes of a good checkpoint."""
    content = load(good)
    match how:
        case "half":
            path.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
        case "empty":
            path.touch()
        case "text":
            path.write_text("hello, I am no checkpoint\n")
        case "folder":
            path.mkdir()
        case "other dict":
            torch.save({"a": 1}, path)
        case "list":
            torch.save([1, 2], path)
        case "code":
            torch.save({"format": content["format"], "a": Path("b")}, path)
        case "other format":
            torch.save({**content, "format": "ppo-other-7"}, path)
        case "no settings":
            torch.save({"format": content["format"]}, path)
        case "unknown setting":
            torch.save({**content, "args": {**content["args"], "no_such_flag": 1}}, path)
        case "unknown state":
            torch.save({**content, "state": {**content["state"], "no_such_thing": 1}}, path)
        case "other shape":
            torch.save({**content, "args": {**content["args"], "hidden_size": 16}}, path)
        case "other environment":
            torch.save({**content, "args": {**content["args"], "env_id": "Acrobot-v1"}}, path)


DAMAGES = "half, empty, text, folder, other dict, list, code, other format, no settings, unknown setting"
DAMAGES += ", unknown state, other shape, other environment"


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("how", DAMAGES.split(", "))
def test_bad_checkpoint(how: str, flag: str, short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """Whatever is wrong with a checkpoint, one line names it, and no new file appears beside it."""
    path = tmp_path / "bad.pt"
    damaged(short.run / "checkpoint.pt", path, how)
    assert_refused(main(flag, path, "--total-timesteps", 9000), tmp_path, "bad.pt")
    assert os.listdir(tmp_path) == ["bad.pt"]


def test_resume_and_evaluate_are_one_too_many(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """Of two checkpoints, it is not guessed which is meant."""
    path = copy_of(short, tmp_path / "copy")
    assert_refused(main("--resume", path, "--evaluate", short.run / "checkpoint.pt"), tmp_path, "--evaluate")


def test_no_other_checkpoint_is_overwritten(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """An earlier checkpoint, kept under another name, is trained on in a folder of its own only."""
    later = copy_of(short, tmp_path / "copy")
    early = shutil.copy(later, later.with_name("early.pt"))
    before = later.read_bytes()
    assert_refused(main("--resume", early, "--total-timesteps", 3000), tmp_path, "early.pt", str(later))
    assert later.read_bytes() == before
    assert main("--evaluate", early).returncode == 0
    (tmp_path / "own").mkdir()
    alone = shutil.move(early, tmp_path / "own")
    assert main("--resume", alone, "--total-timesteps", 3000).returncode == 0
    assert steps_done(tmp_path / "own/checkpoint.pt") >= 3000


def test_an_evaluation_has_no_plan(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """--plan promises to do nothing, so that an evaluation cannot have it."""
    assert_refused(main("--evaluate", short.run / "checkpoint.pt", "--plan"), tmp_path, "--plan")


def test_refusals_in_a_process(short: SimpleNamespace, main: Callable, tmp_path: Path) -> None:
    """As a user sees them: exit status 2, one line, no traceback; tyro's words for wrong flags."""
    assert_refused(shell(tmp_path, "--env-id", "CartPol-v1"), tmp_path, "CartPole")
    damaged(short.run / "checkpoint.pt", tmp_path / "half.pt", "half")
    assert_refused(shell(tmp_path, "--evaluate", "half.pt"), tmp_path, "half.pt")
    for wrong in (main("--no-such-flag"), main("--gamma", "high"), shell(tmp_path, "--no-such-flag")):
        assert wrong.returncode == 2
        assert "Traceback" not in wrong.stderr
        assert re.search("--no-such-flag|--gamma", wrong.stderr)
    (tmp_path / "runs").write_text("in the way")
    blocked = shell(tmp_path, "--total-timesteps", 50)
    assert_refused(blocked, tmp_path, "run folder", "runs")
    assert (tmp_path / "runs").read_text() == "in the way"


# Failures of training


@pytest.mark.parametrize(
    ("env_id", "flags", "reason"),
    [
        ("Raises", "", "the simulator broke"),
        ("NanReward", "", "nan"),
        ("NanObservation", "", "nan"),
        ("HugeReward", "--no-norm-rewards --no-norm-adv --allow-unsafe", "not finite"),
        ("Stopped", "--no-norm-rewards --no-norm-adv --allow-unsafe", "not finite"),
    ],
)
def test_training_fails(env_id: str, flags: str, reason: str, main: Callable, tmp_path: Path) -> None:
    """Exit status 1, the reason, how to go on; the last checkpoint is of before the failure, and loads."""
    args = ["--env-id", f"my_module:{env_id}-v0", *SMALL, "--checkpoint-seconds", 1e-9, *flags.split()]
    failed = main(*args)
    checkpoint = assert_failed(failed, tmp_path, reason)
    assert failed.stderr.count("\n") == 2, failed.stderr
    assert 0 < steps_done(checkpoint) < 4 * 100
    failed_after = int(re.search(r"step ([\d,]+)", failed.stderr).group(1).replace(",", ""))
    assert steps_done(checkpoint) <= failed_after <= steps_done(checkpoint) + ROWS
    assert "Traceback" not in failed.stdout + failed.stderr
    assert main("--evaluate", checkpoint).returncode == 0


@pytest.mark.parametrize("good", [0, 2])
def test_a_full_disk(good: int, main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback and no half file: the reason, and the last checkpoint, if there is one."""
    save, left = torch.save, [good]

    def fill(content: object, path: Path) -> None:
        if left[0] == 0:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        left[0] -= 1
        save(content, path)

    monkeypatch.setattr(torch, "save", fill)
    failed = main(*SMALL, "--total-timesteps", 2000, "--checkpoint-seconds", 1e-9)
    reason = "the checkpoint cannot be written: [Errno 28] No space left on device"
    assert failed.stderr.count("\n") == 1 + (good > 0)
    if good:
        assert 0 < steps_done(assert_failed(failed, tmp_path, reason)) <= ROWS
    else:
        assert (failed.returncode, failed.stderr) == (1, f"ppo.py: {reason}\n")
    assert not [*tmp_path.rglob("*.tmp")]


def test_first_reset_fails(main: Callable, tmp_path: Path) -> None:
    """Where there is no checkpoint yet, none is promised."""
    failed = main("--env-id", "my_module:Reset-v0", *SMALL)
    assert failed.returncode in (1, 2)
    assert "cannot start" in failed.stderr.splitlines()[-1]
    for path in re.findall(r"\S+\.pt", failed.stdout + failed.stderr):
        assert (tmp_path / path).exists(), f"{path} is named but not there"


@pytest.mark.parametrize(
    ("env_id", "start_method"), [("Raises", "fork"), ("Raises", "spawn"), ("Dies", "fork")]
)
def test_worker_fails(env_id: str, start_method: str, modules: Path, tmp_path: Path) -> None:
    """A worker that raises or is killed ends the run, however workers are started on this system."""
    code = f"import multiprocessing\nmultiprocessing.set_start_method({start_method!r})\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    path = os.pathsep.join(map(str, (tmp_path, modules)))
    args = ["--env-id", f"my_module:{env_id}-v0", "--async-envs", "--num-envs", 2, "--num-steps", 32]
    process = popen(tmp_path, *args, "--checkpoint-seconds", 1e-9, PYTHONPATH=path)
    try:
        stdout, stderr = process.communicate(timeout=45)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hangs: {process.communicate()}")
    result = SimpleNamespace(returncode=process.returncode, stdout=stdout, stderr=stderr)
    checkpoint = assert_failed(result, tmp_path, "the simulator broke" if env_id == "Raises" else "")
    assert 0 < steps_done(checkpoint) < 2 * 100


# Help and plan


def test_help_documents_every_flag(main: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """--help lists each setting with its docstring and its default."""
    monkeypatch.setenv("COLUMNS", "120")
    shown = main("--help")
    assert shown.returncode == 0
    text = re.sub(r"[│╭╮╰╯─\s]+", " ", shown.stdout)
    body = ast.parse(inspect.getsource(ppo.Args)).body[0].body
    settings = [statement for statement in body if isinstance(statement, ast.AnnAssign)]
    assert [setting.target.id for setting in settings] == [field.name for field in fields(ppo.Args)]
    for setting in settings:
        docstring = body[body.index(setting) + 1].value.value
        assert f"--{setting.target.id.replace('_', '-')}" in text
        assert " ".join(docstring.split()) in text, setting.target.id
    assert text.count("(default: ") == len(settings)


def test_plan(main: Callable, tmp_path: Path) -> None:
    """--plan says what a run would do and when it would advise, and writes nothing; a run begins the same."""
    args = [
        "--total-timesteps",
        300,
        *SMALL,
        "--num-minibatches",
        3,
        "--update-epochs",
        7,
        "--target-kl",
        0.02,
    ]
    planned = main(*args, "--plan")
    assert (planned.returncode, planned.stderr, os.listdir(tmp_path)) == (0, "", [])
    for size in (
        "CartPole-v1",
        "300",
        "seed 1",
        "cpu",
        "4 env",
        "32 steps",
        "128 rows",
        "42 rows",
        "63 in all",
    ):
        assert size in planned.stdout
    assert "21 gradient steps" in planned.stdout
    for setting in ("learning_rate 0.001", "anneal_lr True", "target_kl 0.02", "clip_coef 0.2", "gamma 0.99"):
        assert setting in planned.stdout
    for threshold in ("0.05", "0.1", "0.4", "1e-6"):
        assert threshold in planned.stdout
    assert "not finite" in planned.stdout
    ran = main(*args)
    assert ran.stdout.splitlines()[:5] == planned.stdout.splitlines()[:5]
    assert "advice" not in ran.stdout


# Copies


def test_copied_alone_it_runs(tmp_path: Path) -> None:
    """In an empty folder, with nothing else on the path, the script trains."""
    shutil.copy(SCRIPT, tmp_path)
    command = [sys.executable, "-I", "ppo.py", "--total-timesteps", "300", *map(str, SMALL)]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(results(done.stdout)) == 2


def test_inline_metadata() -> None:
    """The script's own list of what it needs is the project's."""
    tomllib = pytest.importorskip("tomllib")
    block = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"  # PEP 723's own
    (found,) = (match for match in re.finditer(block, SCRIPT.read_text()) if match["type"] == "script")
    content = "".join(line[2:] for line in found["content"].splitlines(keepends=True))
    script = tomllib.loads(content)
    project = tomllib.loads((SCRIPT.parent / "pyproject.toml").read_text())["project"]
    assert sorted(script["dependencies"]) == sorted(project["dependencies"])
    assert script["requires-python"] == project["requires-python"]


def test_users_environment_by_name(modules: Path, tmp_path: Path) -> None:
    """`module:EnvId-v0` is found beside the script, also when resumed, and elsewhere with PYTHONPATH."""
    shutil.copy(SCRIPT, tmp_path)
    shutil.copy(modules / "my_module.py", tmp_path)
    args = ["--env-id", "my_module:MyEnv-v0", "--total-timesteps", 300, *SMALL]
    done = shell(tmp_path, *args, script=Path("ppo.py"))
    assert (done.returncode, done.stderr) == (0, "")
    resumed = run_printed(done.stdout, "--resume", tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    (tmp_path / "ppo.py").unlink()
    done = shell(tmp_path, *args, "--seed", 2, PYTHONPATH=".")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [[], ["--async-envs"]])
def test_users_environment_in_the_script(flags: list[str], tmp_path: Path) -> None:
    """What the docstring says: a class defined in a copy, and `MyEnv()` in the place of `gym.make(...)`."""
    text, made = re.subn(r"gym\.make\(.*\)", "MyEnv()", SCRIPT.read_text())
    assert made == 2, "once in the docstring, once in the code"
    text = text.replace("\ndef make_env(", f"{USERS_ENV}\n\ndef make_env(", 1)
    (tmp_path / "mine.py").write_text(text)
    done = shell(tmp_path, "--total-timesteps", 300, *SMALL, *flags, script=Path("mine.py"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "length 10.0" in done.stdout
    assert "__mine__" in only_run(tmp_path).name


def test_wandb_refuses(main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What W&B says, in one line, and no folder."""

    def init(**_: object) -> None:
        raise Exception("no API key")

    wandb = types.ModuleType("wandb")
    wandb.init, wandb.__spec__ = init, ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert_refused(main("--track", *SMALL), tmp_path, "W&B", "no API key")


@pytest.mark.skipif(not find_spec("wandb"), reason="needs wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    """--track mirrors a run to Weights & Biases, here into files."""
    done = shell(tmp_path, "--total-timesteps", 300, *SMALL, "--track", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*"))
