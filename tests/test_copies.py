"""What the scripts have in common is the same text in each: the copies of ppo.py are compared with it.

A script is cut into parts: its head (what it needs, and its docstring), and each import, assignment,
function, method and setting, with the comments in and above it. Parts of the same name must have the same
text, in the same order. `COPIES` lists what differs because the domain does; what is listed there and no
longer differs must go from it.
"""

import ast
import difflib
import functools
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent
ORIGINAL = "ppo.py"
# For each copy: the parts that only it has, those that only ppo.py has, those of which each script has its
# own, and those that are the same but for some lines of ppo.py (-) and of the copy (+).
COPIES = {
    "ppo_continuous.py": {
        "added": "Args.init_log_std LOG_2PI action_figures narrow wide outside ADVICE|=",
        "missing": "collapse",
        "own": "check_spaces Agent.policy Agent.noise Agent.act Agent.env_actions log_prob entropy "
        "kl_divergence",
        "lines": '''
@ head
- #     "gymnasium[classic-control,toy-text]>=1.1",
+ #     "gymnasium[classic-control,mujoco]>=1.1",
- """Proximal Policy Optimization for discrete actions, in one file.
+ """Proximal Policy Optimization for continuous actions, in one file.
- python ppo.py --env-id CartPole-v1
+ python ppo_continuous.py --env-id HalfCheetah-v5
- trains on any Gymnasium environment with `Discrete` actions and observations that flatten to a vector. To use
+ trains on any Gymnasium environment with `Box` actions and observations that flatten to a vector. To use
- Shapes: T steps a rollout (--num-steps), N environments (--num-envs), D entries an observation, A actions,
+ Shapes: T steps a rollout (--num-steps), N environments (--num-envs), D entries an observation, A an action,
@ FORMAT
- FORMAT = "ppo-discrete-1"
+ FORMAT = "ppo-continuous-1"
@ FIXED
- FIXED = "env_id", "num_envs", "num_steps", "hidden_size", "norm_obs"
+ FIXED = "env_id", "num_envs", "num_steps", "hidden_size", "norm_obs", "init_log_std"
@ BOUNDS
- "ent_coef vf_coef kl_coef entropy_tolerance target_entropy": (0, 1e6),
+ "ent_coef vf_coef kl_coef entropy_tolerance": (0, 1e6),
+ "target_entropy": (-1e6, 1e6),
+ "init_log_std": (-5, 3),
@ MLP
- """Two tanh layers and a linear one: orthogonal weights of gain √2, last `gain`; biases 0 (Huang 2022)."""
+ """Two ELU layers and a linear one: orthogonal weights of gain √2, last `gain`; biases 0 (Huang 2022)."""
@ MLP.forward
- x = F.linear(x, *first).tanh()
- x = F.linear(x, *second).tanh()
+ x = F.elu(F.linear(x, *first))
+ x = F.elu(F.linear(x, *second))
@ Agent.__init__
- self.norm_obs, self.num_actions, self.first_action = args.norm_obs, int(actions.n), int(actions.start)
- self.actor = MLP(len(one_hot), args.hidden_size, self.num_actions, gain=0.01)  # near-uniform at first
+ self.norm_obs, self.num_actions = args.norm_obs, math.prod(actions.shape)
+ self.shape, self.dtype = actions.shape, actions.dtype
+ self.actor = MLP(len(one_hot), args.hidden_size, self.num_actions, gain=0.01)  # near 0 at first
+ self.log_std = nn.Parameter(args.init_log_std * torch.ones(self.num_actions))  # for all states
+ # The policy's -1 to 1 is the environment's low to high, or without two bounds, 1 to both sides of the
+ # permitted value nearest to 0.
+ self.low, self.high = actions.low.astype(np.float64), actions.high.astype(np.float64)
+ bounded, near = self.high / 2 - self.low / 2 < 1e9, np.clip(0, self.low, self.high)
+ low, high = np.where(bounded, self.low, near - 1), np.where(bounded, self.high, near + 1)
+ self.scale, self.middle = (high - low) / 2, (high + low) / 2
@ Batch
- # Rows to learn from: obs [B, D], normalised; actions [B]; what the old networks made of them, policy [B, A] =
- # log π_old(·|s), log_probs [B] = log π_old(a|s) and values [B] = V_old(s); advantages [B] and returns [B].
+ # Rows to learn from: obs [B, D], normalised; actions [B, A]; what the old networks made of them: policy
+ # [B, 2A], log_probs [B] = log π_old(a|s) and values [B] = V_old(s); advantages [B] and returns [B].
@ ppo_loss
- `policy` [B, A] and `values` [B] are what the networks, as they are now, make of `batch.obs`.
+ `policy` [B, 2A] and `values` [B] are what the networks, as they are now, make of `batch.obs`.
@ Rollout
- actions, rewards, terminated, truncated, valid [T, N]: valid is false in the filler rows, where Gymnasium
- ignores the action and starts an episode.
+ actions [T, N, A], uncut; rewards, terminated, truncated, valid [T, N]: valid is false in the filler rows,
+ where Gymnasium ignores the action and starts an episode.
@ Rollout.__init__
- def __init__(self, args: Args, obs_size: int):
+ def __init__(self, args: Args, obs_size: int, action_size: int):
- self.actions, self.rewards = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps)
+ self.actions, self.rewards = torch.zeros(*steps, action_size), torch.zeros(steps)
- self.acting_policy = torch.zeros(0)  # [N, A], of the last step, for `update` to compare
+ self.acting_policy = torch.zeros(0)  # [N, 2A], of the last step, for `update` to compare
@ ADVICE
- ADVICE = {kl_watch: 5, kl_act: 5, drift: 10, idle: 20, critic: 20, collapse: 10, mismatch: 1}  # iterations
+ ADVICE = {kl_watch: 5, kl_act: 5, drift: 10, idle: 20, critic: 20}  # iterations
@ train
- rollout, figures = Rollout(args, len(one_hot)), dict[str, float]()
+ rollout, figures = Rollout(args, len(one_hot), agent.num_actions), dict[str, float]()
+ figures |= action_figures(agent, rollout)
''',  # noqa: E501
    },
}


def read(script: str) -> str:
    return (FOLDER / script).read_text()


def name_of(statement: ast.stmt) -> str:
    """What a part is called."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return statement.name
    if isinstance(statement, ast.Import):
        return f"import {statement.names[0].name}"
    if isinstance(statement, ast.ImportFrom):
        return f"from {statement.module}"
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        return ",".join(node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    first, second, *_ = ast.unparse(statement).split()
    return first + second if isinstance(statement, ast.AugAssign) else f"{first} {second}"


def is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@functools.cache
def parts_of(text: str) -> dict[str, str]:
    """The script's parts in order, by name; together they are every line of it that is not blank.

    A setting's default is left out: each script has its own.
    """
    lines, parts, end = text.splitlines(), dict[str, str](), 0

    def add(name: str, last: int) -> None:
        nonlocal end
        while name in parts:
            name += "'"
        parts[name], end = "\n".join(lines[end:last]).strip("\n"), last

    for statement in ast.parse(text).body:
        if not isinstance(statement, ast.ClassDef):
            add("head" if is_string(statement) else name_of(statement), statement.end_lineno)
            continue
        first, *members = statement.body
        assert is_string(first) or statement.name == "Args", f"class {statement.name} has no docstring"
        add(statement.name, first.end_lineno if is_string(first) else statement.lineno)
        for member in members if is_string(first) else statement.body:
            if is_string(member):  # the docstring of the setting above it
                parts[list(parts)[-1]] += "\n" + "\n".join(lines[end : member.end_lineno])
                end = member.end_lineno
            else:
                if statement.name == "Args":
                    line = lines[member.lineno - 1].encode()
                    kept = line[: member.annotation.end_col_offset] + line[member.value.end_col_offset :]
                    lines[member.lineno - 1] = kept.decode()
                add(f"{statement.name}.{name_of(member)}", member.end_lineno)
    if "".join(lines[end:]).strip():
        add("tail", len(lines))
    return parts


def lines_of(row: dict[str, str]) -> dict[str, list[str]]:
    """The lines by which a copy's parts differ, by the name of the part."""
    found = dict[str, list[str]]()
    for line in row["lines"].strip().splitlines():
        if line.startswith("@ "):
            lines = found[line[2:]] = []
        else:
            lines.append(line)
    return found


def changed_lines(original: str, copy: str) -> list[str]:
    """The lines that only one of two texts has, those of the original after -, those of the copy after +."""
    if original == copy:
        return []
    diff = difflib.unified_diff(original.splitlines(), copy.splitlines(), n=0, lineterm="")
    return [f"{line[0]} {line[1:].strip()}" for line in list(diff)[2:] if not line.startswith("@@")]


def complaints(script: str, original: dict[str, str], copy: dict[str, str], row: dict) -> dict[str, str]:
    """What is wrong with a copy, by the name of the part."""
    added, missing, own = (row[key].split() for key in ("added", "missing", "own"))
    lines, found = lines_of(row), dict[str, str]()
    for name in copy.keys() - original.keys() - set(added):
        found[name] = f"{script} has {name}, which {ORIGINAL} has not"
    for name in original.keys() - copy.keys() - set(missing):
        found[name] = f"{script} lacks {name}, which {ORIGINAL} has"
    for name in added:
        if name not in copy or name in original:
            found[name] = f"{name} is listed as one that only {script} has, and is not"
    for name in missing:
        if name not in original or name in copy:
            found[name] = f"{name} is listed as one that only {ORIGINAL} has, and is not"
    for name in (*own, *lines):
        if original.get(name) == copy.get(name):
            found[name] = f"{script}: {name} is listed as different from {ORIGINAL}'s, and is not"
    common = [name for name in copy if name in original]
    for name in common:
        if name in own or name in found:
            continue
        different, expected = changed_lines(original[name], copy[name]), lines.get(name, [])
        if different != expected:
            listed = "\nListed were only:\n" + "\n".join(expected) if expected else ""
            shown = "\n".join(different)
            found[name] = f"{script}: {name} is not as in {ORIGINAL}, which has - for +:\n{shown}{listed}"
    order = [name for name in original if name in copy]
    for name, expected in zip(common, order, strict=True):
        if name != expected:
            found[name] = f"{script}: {name} stands where {ORIGINAL} has {expected}"
            break
    return found


def check(script: str, copy: str) -> dict[str, str]:
    """The complaints about this text of a script."""
    return complaints(script, parts_of(read(ORIGINAL)), parts_of(copy), COPIES[script])


@pytest.mark.parametrize("script", COPIES)
def test_a_copy_has_not_drifted(script):
    """Every part is the original's, but for what is listed; and what is listed does differ."""
    found = check(script, read(script))
    assert not found, "\n\n" + "\n\n".join(found.values())


def test_every_script_is_compared():
    """No script is left out."""
    assert {path.name for path in FOLDER.glob("ppo*.py")} == {ORIGINAL, *COPIES}


@pytest.mark.parametrize("script", [ORIGINAL, *COPIES])
def test_parts_are_the_whole_script(script):
    """Put together again, the parts are the script, but for blank lines and the settings' defaults."""
    whole = [line for line in read(script).splitlines() if line.strip()]
    parts = parts_of(read(script)).items()
    joined = [(name, line) for name, part in parts for line in part.splitlines() if line.strip()]
    for line, (name, part) in zip(whole, joined, strict=True):
        assert part == line or (name.startswith("Args.") and line.startswith(f"{part} = "))


@pytest.mark.parametrize("script", COPIES)
def test_a_changed_character_is_noticed_in_every_part(script):
    """One character changed, in the copy or in the original, is reported for the part that it is in."""
    original, copy, row = parts_of(read(ORIGINAL)), parts_of(read(script)), COPIES[script]
    common = [name for name in copy if name in original and name not in row["own"].split()]
    assert len(common) > 100
    for name in common:
        for place in (0, len(copy[name]) // 2, -1):
            changed = list(copy[name])
            changed[place] = "€"
            found = complaints(script, original, copy | {name: "".join(changed)}, row)
            assert list(found) == [name]
            assert script in found[name]
        changed = {name: original[name] + "€"}
        assert list(complaints(script, original | changed, copy, row)) == [name]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("    A time limit ends the sum", "    The time limit ends the sum", "compute_gae"),  # a docstring
        (", PPO paper, equation 8", ", PPO paper, equation 9", "ppo_loss"),  # a comment
        ("# Rows to learn from", "# Row to learn from", "Batch"),  # a comment above
        ("λ: trades bias (0)", "λ: trades bias (1)", "Args.gae_lambda"),  # a setting's docstring
        ("    seed: int", "    seed: float", "Args.seed"),  # a setting's type
        ("    # Algorithm", "    # The algorithm", "Args.total_timesteps"),
        ("self.var.lerp_", "self.var.copy_", "RunningMoments.update"),  # a method
        ("clamp(-10, 10))", "clamp(-10, 11))", "Agent.normalize"),
        ("@torch.inference_mode()\ndef collect", "@torch.no_grad()\ndef collect", "collect_rollout"),
        ("import shlex", "import shelve", "import shelve"),
        ("from gymnasium.vector import ", "from gymnasium.vector import utils, ", "from gymnasium.vector"),
        ("def drift(", "def drifts(", "drift"),
        ("if __name__ == ", "if not __name__ != ", "if __name__"),
    ],
)
def test_drift_is_named(old, new, name):
    """A change in the text of a copy is reported with the names of script and part."""
    for script in COPIES:
        text = read(script)
        assert text.count(old) == 1
        found = check(script, text.replace(old, new))
        assert name in found
        assert script in found[name]
        assert name in found[name]


def test_defaults_are_each_scripts_own():
    """Another default is no drift."""
    text = read("ppo_continuous.py")
    other = text.replace("    gamma: float = 0.99\n", "    gamma: float = 0.9\n")
    assert other != text
    assert check("ppo_continuous.py", other) == check("ppo_continuous.py", text)


def test_another_order_is_drift():
    """Parts that have changed places are reported."""
    parts = parts_of(read("ppo_continuous.py"))
    names = list(parts)
    i = names.index("status")
    names[i - 1], names[i] = names[i], names[i - 1]
    moved = {name: parts[name] for name in names}
    row = COPIES["ppo_continuous.py"]
    assert list(complaints("ppo_continuous.py", parts_of(read(ORIGINAL)), moved, row)) == ["status"]


@pytest.mark.parametrize("script", COPIES)
def test_the_list_cannot_rot(script):
    """Whatever is listed and differs no longer is reported: a text, lines, an addition, an omission."""
    original, copy, row = parts_of(read(ORIGINAL)), parts_of(read(script)), COPIES[script]
    for name in (*row["own"].split(), *lines_of(row)):
        assert list(complaints(script, original, copy | {name: original[name]}, row)) == [name]
    for name in row["added"].split():
        assert name in complaints(script, original | {name: copy[name]}, copy, row)
        assert name in complaints(script, original, {n: copy[n] for n in copy if n != name}, row)
    for name in row["missing"].split():
        assert name in complaints(script, original, copy | {name: original[name]}, row)
        assert name in complaints(script, {n: original[n] for n in original if n != name}, copy, row)
    for name, (line, *_) in lines_of(row).items():
        fewer = row | {"lines": row["lines"].replace(f"@ {name}\n{line}\n", f"@ {name}\n")}
        assert list(complaints(script, original, copy, fewer)) == [name]
