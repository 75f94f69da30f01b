"""The command line: refusals, help, plan, output, exit status, and that the same seed gives the same run."""

import dataclasses
import importlib
import os
import pty
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, get_origin, get_type_hints

import cli_helpers as cli
import numpy as np
import pytest
import torch
import user_envs
from cli_helpers import CONTINUOUS, PPO, SMALL, call, checkpoint_in, each_script, load, run, steps_done

ATARI = cli.Script(importlib.import_module("ppo_atari"))
with_atari = pytest.mark.parametrize(
    "script", [PPO, CONTINUOUS, ATARI], ids=["ppo", "ppo_continuous", "ppo_atari"]
)

# Refusals

NONSENSE = [
    "num_envs=0", "num_steps=1", "num_minibatches=0", "num_minibatches=5000", "update_epochs=0", "seed=-1",
    "total_timesteps=0", "total_timesteps=nan", "eval_episodes=0", "num_threads=-1", "gamma=1.5", "gamma=nan",
    "gae_lambda=-0.1", "learning_rate=0", "learning_rate=inf", "clip_coef=0", "ent_coef=-0.1", "vf_coef=nan",
    "max_grad_norm=0", "target_kl=0", "checkpoint_seconds=0", "log_seconds=nan",
]  # fmt: skip
UNSAFE = {
    "update_epochs=31": "--update-epochs",
    "clip_coef=0.4": "--clip-coef",
    "norm_adv=0 norm_rewards=0": "--norm-rewards",
}


def changes(text):
    """The settings in a text."""
    pairs = (word.split("=") for word in text.split())
    return {name: int(value) if value.lstrip("-").isdigit() else float(value) for name, value in pairs}


@with_atari
@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused(script, text):
    """Values outside their bounds raise `Refused`, with the flag's name and value."""
    name, value = text.replace("_", "-").split("=")
    with pytest.raises(script.module.Refused, match=rf"--{name}\b.*(is {value}|must be at most)"):
        script.module.check_args(dataclasses.replace(script.module.Args(), **changes(text)))


@cli.each_script_fast
@pytest.mark.parametrize("text", UNSAFE)
def test_unsafe_settings_are_refused_unless_allowed(script, text):
    """Settings that are known to break PPO are refused with the flag that allows them."""
    args = dataclasses.replace(script.module.Args(), **changes(text))
    with pytest.raises(script.module.Refused, match=f"{UNSAFE[text]}.*--allow-unsafe"):
        script.module.check_args(args)
    script.module.check_args(dataclasses.replace(args, allow_unsafe=True))


REFUSALS = {  # of the whole command; each is in ppo.py, and most are in all
    "--num-envs 0": "--num-envs",
    "--clip-coef 0.4": "--allow-unsafe",
    "--adapt kl-coef": "--surrogate kl-penalty",
    "--adapt clip-coef --surrogate kl-penalty": "--surrogate clip",
    "--target-entropy 0.5 --ent-coef 0": "--ent-coef",
    "--resume a.pt --evaluate b.pt": "a.pt",
    "--resume=": "need the path",
    "--evaluate=": "need the path",
    "--resume none.pt": "none.pt",
    "--evaluate none.pt": "none.pt",
    "--hidden-size 1000000": "--hidden-size",
    "--env-id CartPole-v9": "v1",
    "--env-id CartPol-v1": "CartPole",
    "--env-id no_module:Env-v0": "no_module",
    "--env-id user_envs:NoEnv-v0": "NoEnv",
    "--env-id user_envs:NeedsPackage-v0": "pip install it",
    "--env-kwargs =2": "--env-kwargs",
    "--env-kwargs {": "--env-kwargs",
    "--env-kwargs size=print": "--env-kwargs",
    "--env-kwargs a=1)+dict(b=2": "--env-kwargs",
    "--env-kwargs max_episode_steps=1e3": "max_episode_steps",
    "--env-kwargs id='x'": "multiple values",
    "--env-kwargs **{'size':1}": "every argument needs a name",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_a_refusal_is_one_line(flags, tmp_path):
    """What cannot be right is one line, exit status 2, and nothing is written."""
    result = call(PPO, tmp_path, *flags.split())
    cli.assert_refused(result, tmp_path, "ppo.py: ", REFUSALS[flags])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous", "ppo_atari", "ppo_rlhf", "grpo"])
def test_settings_of_other_code(name):
    """Choices and whole numbers are checked also where they do not come from the command line."""
    module = importlib.import_module(name)
    kinds = get_type_hints(module.Args)
    choices = [setting for setting, kind in kinds.items() if get_origin(kind) is Literal]
    assert choices or name == "ppo_rlhf"
    for setting in choices:
        with pytest.raises(module.Refused, match=f"{setting} is 'none_of_them'; it must be one of '"):
            module.check_args(dataclasses.replace(module.Args(), **{setting: "none_of_them"}))
    for value in (1.0, "1", True, None):
        with pytest.raises(module.Refused, match=f"seed is {value!r}; it must be a whole number"):
            module.check_args(dataclasses.replace(module.Args(), seed=value))


@with_atari
@pytest.mark.parametrize(
    "flags", ["--num-envs 0", "--resume none.pt", "--env-id no_module:Env-v0", "--resume="]
)
def test_each_script_refuses_in_one_line(script, flags, tmp_path):
    """So in every script, under its own name."""
    result = call(script, tmp_path, *flags.split())
    cli.assert_refused(result, tmp_path, f"{script.file}: ", flags.split()[-1].partition(":")[0].rstrip("="))


@with_atari
def test_an_unknown_flag(script, tmp_path):
    """Exit status 2, and the flag's name."""
    result = call(script, tmp_path, "--no-such-flag")
    assert result.status == 2
    assert "--no-such-flag" in result.err


def test_continuous_actions_have_refusals_of_their_own(tmp_path):
    """Settings of `ppo_continuous.py` that exclude each other."""
    for flags, word in (
        ("--init-log-std -3 --min-log-std -2", "--min-log-std"),
        ("--total-timesteps 100", "--total-timesteps"),
    ):
        cli.assert_refused(call(CONTINUOUS, tmp_path, *flags.split()), tmp_path, word)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there(tmp_path):
    """It is refused with what can be used."""
    cli.assert_refused(call(PPO, tmp_path, "--device", "cuda"), tmp_path, "--device cuda", "use cpu")


@pytest.mark.slow
@each_script
def test_no_compiler(script, tmp_path):
    """--compile is refused where there is none for C++."""
    compilers = {"CXX": "no-such-compiler"}
    result = cli.shell(script, tmp_path, "--env-id", script.env(), "--compile", **compilers)
    cli.assert_refused(result, tmp_path, "--compile needs a C++ compiler")


def test_no_folder_can_be_made(tmp_path):
    """A file in the way of the run folder is one line."""
    (tmp_path / "runs").write_text("in the way")
    result = call(PPO, tmp_path, *SMALL, "--total-timesteps", 50)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "cannot start a run" in result.err


# Help and plan


@with_atari
def test_help(script, tmp_path):
    """The script's purpose, three examples, and each flag with a text and its default, in four groups."""
    shown = call(script, tmp_path, "--help")
    assert shown.status == 0
    plain = re.sub(r"[│╭╮╰╯─\s]+", " ", shown.out)
    purpose = script.module.__doc__.split("\n")[0]
    assert shown.out.index(purpose) < shown.out.index("--exp-name")
    assert len(re.findall(rf"^    \w.*{script.file} --", shown.out, re.MULTILINE)) >= 3
    groups = "Experiment", "Environment", "Algorithm", "Performance"
    starts = [re.search(rf"{group} options", shown.out, re.IGNORECASE).start() for group in groups]
    assert starts == sorted(starts)
    for setting in dataclasses.fields(script.module.Args):
        flag = re.escape(f" --{setting.name.replace('_', '-')}")
        assert re.search(rf"{flag}\b[^·]*?\w\w\w \w.*?\(default: ", plain), flag
    assert plain.count("(default: ") == len(dataclasses.fields(script.module.Args))


@with_atari
def test_plan(script, tmp_path):
    """Sizes, schedules, that whole rollouts count, and all advice with its iterations; nothing is written."""
    flags = *("--num-envs", 6), *("--num-steps", 40), *("--num-minibatches", 3), *("--update-epochs", 7)
    env = [] if script is ATARI else ["--env-id", script.env()]
    planned = call(
        script, tmp_path, *env, *flags, "--total-timesteps", "2e6", "--learning-rate", 0.0123, "--plan"
    )
    assert (planned.status, planned.err, list(tmp_path.iterdir())) == (0, "", [])
    for text in (
        "2,000,000 steps",
        "rounded up to",
        "seed 1",
        "6 env",
        "40 steps",
        "240 tr",
        "0.0123",
        "to 0",
    ):
        assert text in planned.out
    assert "21 gradient steps" in planned.out
    for _, iterations, _, text in script.module.ADVICE:
        assert re.search(rf"\b{iterations} .*{re.escape(text)}", planned.out)


@pytest.mark.slow
def test_a_plan_starts_no_processes(tmp_path):
    """With --async-envs, neither --plan nor --evaluate makes an environment in a process of its own."""
    kwargs = ["--env-kwargs", "fault='tell'", "--async-envs", "--env-id", PPO.env()]
    run(PPO, tmp_path, *kwargs, total_timesteps=100)
    path, worker = checkpoint_in(tmp_path), tmp_path / "worker"
    worker.unlink()
    for flags in (["--plan"], ["--evaluate", path]):
        assert call(PPO, tmp_path, *kwargs, *flags).status == 0
        assert not worker.exists()


# Values of flags


@each_script
@pytest.mark.parametrize("text", ["endless=True, sleep=0.5", '{"endless": true, "sleep": 0.5}'])
def test_arguments_of_the_environment(script, text):
    """As Python's keyword arguments, and as JSON."""
    env = script.module.make_env(script.args(env_kwargs=text))
    assert (env.unwrapped.endless, env.unwrapped.sleep) == (True, 0.5)


def test_arguments_of_the_environment_are_saved(tmp_path):
    """A resumed run and an evaluation make the same environment."""
    cut = ["--eval-max-steps", 30]
    run(PPO, tmp_path, *cut, total_timesteps=100, env_kwargs="endless=True")
    path = checkpoint_in(tmp_path)
    resumed = run(PPO, tmp_path, "--resume", path, *cut, total_timesteps=200)
    assert not user_envs.LOG["episodes"]
    assert load(path)["args"]["env_kwargs"] == "endless=True"
    assert "no episode finished yet" in resumed.out


# What a run prints


@each_script
def test_ends_with_what_to_do_next(script, tmp_path):
    """The last lines name files that are there, and commands that work."""
    done = run(script, tmp_path, total_timesteps=200)
    path = checkpoint_in(tmp_path)
    assert "tensorboard --logdir runs" in done.out
    assert re.search(r"return -?[\d.]+ ± [\d.]+, from -?[\d.]+ to [\d.]+, 3 episodes", done.out)
    assert cli.printed_checkpoint(done.out, "--evaluate", tmp_path).samefile(path)
    assert "--capture-video" in cli.printed_command(done.out, "--evaluate")
    resumed = call(script, tmp_path, *cli.printed_command(done.out, "--resume"))
    assert (resumed.status, resumed.err) == (0, "")
    assert steps_done(path) >= 400


@pytest.mark.parametrize("uv", [False, True])
def test_commands_call_what_was_called(uv, tmp_path, monkeypatch, capsys):
    """After `train` in a program of one's own, that is the script; under `uv run`, so are the commands."""
    if uv:
        monkeypatch.setenv("UV", "/usr/bin/uv")
    assert f"resume     {'uv run' if uv else 'python'} ppo.py " in run(PPO, tmp_path, total_timesteps=50).out
    monkeypatch.chdir(tmp_path)
    PPO.module.train(PPO.module.Args(total_timesteps=50, num_envs=4, num_steps=8, num_minibatches=1))
    assert f"resume     python {PPO.module.__file__} --resume" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous", "ppo_atari", "ppo_rlhf", "grpo"])
def test_commands_call_a_copy_or_a_program_around_it(name, monkeypatch, capsys):
    """The commands that `main` prints call what was started: a copy, or a program that changes the script."""
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "PROGRAM", ["python", module.__file__])
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help"])
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(SystemExit):
        module.main()
    assert module.PROGRAM == ["python", "mine.py"]


def test_lines_in_a_file(tmp_path):
    """Where the output is no terminal: a line every --log-seconds, after the first with the time left."""
    done = run(PPO, tmp_path, total_timesteps=700, log_seconds=0.25, env_kwargs="sleep=0.002")
    assert "\r" not in done.out
    lines = re.findall(r"^ *([\d,]+) steps +\d+%  return [\d.]+  KL [\d.]+(.*)$", done.out, re.MULTILINE)
    times = {e.step: e.wall_time for e in cli.events(checkpoint_in(tmp_path).parent).Scalars("losses/kl")}
    longest = max(b - a for a, b in pairwise(times.values()))
    began, *steps = (int(step) for step, _ in lines)
    gaps = [times[b] - times[a] for a, b in pairwise([began, *steps])]
    assert len(gaps) >= 3
    assert min(gaps[:-1]) > 0.2  # the last line is printed in any case
    assert max(gaps) < 0.25 + 2 * longest
    assert lines[0][1] == "", "compiling would count"
    for step, (_, shown) in zip(steps, lines[1:], strict=True):
        speed, minutes, seconds = map(int, re.fullmatch(r"  (\d+)/s  (\d+):(\d\d) left", shown).groups())
        expected = (step - began) / (times[step] - times[began])
        assert speed == pytest.approx(expected, rel=0.3)
        assert 60 * minutes + seconds == pytest.approx(max(700 - step, 0) / expected, abs=1.5)


@pytest.mark.slow
@each_script
def test_a_line_on_a_terminal(script, tmp_path):
    """It is updated in place, and never fills 80 columns, or the terminal would begin another."""
    ours, theirs = pty.openpty()
    flags = ["--env-id", script.env(), *SMALL, "--total-timesteps", 3000, "--env-kwargs", "sleep=0.0005"]
    variables = cli.environment(COLUMNS="80")
    process = subprocess.Popen(
        cli.command(script, *flags), cwd=tmp_path, env=variables, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    read = b""
    while True:
        try:
            read += os.read(ours, 4096)
        except OSError:  # the terminal is closed: the process has ended
            break
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = read.decode().replace("\r\n", "\n")
    updates = [line for line in re.split("[\r\n]", text) if " steps " in line and "KL" in line]
    assert len(updates) > 3
    assert text.count("\r") >= len(updates), "a line was not updated in place"
    assert max(map(len, updates)) < 80
    assert re.search(r"/s  \d+:\d\d left", updates[-1])
    assert text.count("\n") < 20


def test_an_encoding_without_greek(tmp_path):
    """Where ± and γ cannot be printed, something else is."""
    assert call(PPO, tmp_path, "--help", encoding="ascii").status == 0
    done = call(PPO, tmp_path, "--env-id", PPO.env(), *SMALL, "--total-timesteps", 50, encoding="ascii")
    assert (done.status, done.err) == (0, "")
    assert "evaluation return" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("end", ["| head -n 1", "> /dev/full"])
def test_output_that_fails(end, tmp_path):
    """Where a line cannot be printed, training continues, and the exit status is 0."""
    flags = ["--env-id", PPO.env(), *SMALL, "--total-timesteps", 300, "--log-seconds", 1e-9]
    line = " ".join(cli.command(PPO, *flags))
    result = cli.finish(cli.start(tmp_path, ["bash", "-c", f"set -o pipefail; {line} {end}"]))
    assert (result.status, result.err) == (0, "")
    assert steps_done(checkpoint_in(tmp_path)) >= 300


# The same seed


@each_script
def test_same_seed_same_run(script, tmp_path):
    """The same seed gives the same curves and checkpoint, bit for bit; another does not."""
    results = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        torch.rand(7)  # nothing may depend on what this process did before
        np.random.rand(7)  # noqa: NPY002
        done = run(script, tmp_path / name, total_timesteps=600, seed=seed)
        path, results[name] = checkpoint_in(tmp_path / name), re.findall("evaluation.*", done.out)
        results[name] += [load(path), cli.curves(path.parent)]
    assert cli.same(results["a"], results["b"])
    for first, other in zip(results["a"][1:], results["c"][1:], strict=True):
        assert not cli.same(first, other)
    weights, others = results["a"][1]["agent"], results["c"][1]["agent"]
    assert not any(cli.same(weights[name], others[name]) for name in weights if name.endswith("0.weight"))


@pytest.mark.slow
def test_same_seed_in_other_processes(tmp_path):
    """So in a process of its own, and with the environments in worker processes."""
    flags = ["--env-id", PPO.env(), *SMALL, "--total-timesteps", 600]
    results = []
    for name, more in (("a", []), ("b", ["--async-envs"])):
        (tmp_path / name).mkdir()
        done = cli.shell(PPO, tmp_path / name, *flags, *more)
        assert (done.status, done.err) == (0, "")
        path = checkpoint_in(tmp_path / name)
        results.append([load(path), cli.curves(path.parent), re.findall("evaluation.*", done.out)])
    assert cli.same(results[0], results[1])


# A script alone


@pytest.mark.slow
@each_script
def test_copied_alone_it_runs(script, tmp_path):
    """In an empty folder, with nothing else on the path, the script trains."""
    shutil.copy(cli.ROOT / script.file, tmp_path)
    env = {PPO: "CartPole-v1", CONTINUOUS: "Pendulum-v1"}[script]
    words = [sys.executable, "-I", script.file, "--env-id", env, "--total-timesteps", 300, *SMALL]
    done = subprocess.run(list(map(str, words)), cwd=tmp_path, env={}, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} - {"MUJOCO_LOG.TXT"} == {"runs", script.file}
    assert steps_done(checkpoint_in(tmp_path)) >= 300


@pytest.mark.slow
@each_script
def test_a_class_of_the_users_own(script, tmp_path):
    """In a copy of the script, `MyEnv()` in the place of `gym.make(...)` trains on it, as `make_env` says."""
    kind = "box" if script is CONTINUOUS else "discrete"
    mine = f"class MyEnv(user_envs.Walk):\n    def __init__(self):\n        super().__init__({kind!r})\n\n\n"
    text, made = re.subn(r"(?<=return )gym\.make\(.*\)", "MyEnv()", (cli.ROOT / script.file).read_text())
    assert made == 1
    text = text.replace("def make_env(", f"import user_envs\n\n{mine}def make_env(", 1)
    (tmp_path / "mine.py").write_text(text)
    words = [sys.executable, "mine.py", "--total-timesteps", 300, *SMALL]
    done = cli.finish(cli.start(tmp_path, list(map(str, words))))
    assert (done.status, done.err) == (0, "")
    assert steps_done(checkpoint_in(tmp_path)) >= 300


@with_atari
def test_inline_metadata(script):
    """The script's list of what it needs has what the project needs, and the same Python."""
    tomllib = pytest.importorskip("tomllib")
    text = (cli.ROOT / script.file).read_text()
    (found,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)
    needs = tomllib.loads(re.sub("^# ?", "", found, flags=re.MULTILINE))
    project = tomllib.loads((cli.ROOT / "pyproject.toml").read_text())["project"]
    assert needs["requires-python"] == project["requires-python"]
    ours = {need for need in needs["dependencies"] if not need.startswith(("gymnasium", "ale-py"))}
    assert ours == {need for need in project["dependencies"] if not need.startswith("gymnasium")}


@pytest.mark.skipif(not find_spec("moviepy"), reason="needs moviepy")
@pytest.mark.slow
def test_videos(tmp_path):
    """The printed command records each episode, from its first frame to its last."""
    import moviepy

    done = run(PPO, tmp_path, total_timesteps=100)
    user_envs.LOG.clear()
    flags = [*cli.printed_command(done.out, "--evaluate"), "--eval-episodes", 2]
    assert call(PPO, tmp_path, *flags).status == 0
    lengths = sorted(length for _, _, length in user_envs.LOG["episodes"])
    frames = []
    for path in checkpoint_in(tmp_path).parent.glob("videos/*.mp4"):
        with moviepy.VideoFileClip(str(path)) as clip:
            frames.append(round(clip.duration * clip.fps))
    assert sorted(frames) == pytest.approx([length + 1 for length in lengths], abs=1)
