"""Broken copies of ppo_minimal.py, to find the bug in. Spoilers: this file has the answers.

A copy has one bug, and ten of the rewrites below. They change how the code reads and not what it does, so that a
comparison with the original does not give the bug away.
"""

import ast
import random
import re
from dataclasses import dataclass
from pathlib import Path

ORIGINAL = Path(__file__).resolve().parents[1] / "ppo_minimal.py"
MARK = "\0"  # stands before and behind the faulty code while a copy is made


@dataclass(frozen=True)
class Bug:
    """What is replaced by what, and why that is wrong."""

    old: str
    new: str  # with the faulty code between two marks
    why: str


def bug(old: str, new: str, faulty: str, why: str) -> Bug:
    """A bug whose faulty code is a part of the new text."""
    assert new.count(faulty) == 1
    return Bug(old, new.replace(faulty, MARK + faulty + MARK), why)


BUGS = [
    bug(
        "    log_ratio = policy.log_prob(actions) - old_log_probs\n",
        "    log_probs = policy.log_prob(actions)\n"
        "    with torch.no_grad():\n"
        "        old_log_probs = agent.policy(obs).log_prob(actions)\n"
        "    log_ratio = log_probs - old_log_probs\n",
        "    with torch.no_grad():\n"
        "        old_log_probs = agent.policy(obs).log_prob(actions)\n"
        "    log_ratio = log_probs - old_log_probs",
        "The old log-probabilities are computed anew, with the weights that are being trained. So the ratio is"
        " always 1, nothing is ever clipped, the approximate KL is exactly 0, and nothing holds the policy.",
    ),
    bug(
        "            obs[t] = torch.as_tensor(current_obs)\n"
        "            with torch.no_grad():\n"
        "                policy = agent.policy(obs[t])\n"
        "                actions[t] = policy.sample()\n"
        "                old_log_probs[t] = policy.log_prob(actions[t])\n"
        "            current_obs, reward, termination, truncation, infos = envs.step(actions[t].numpy())\n",
        "            with torch.no_grad():\n"
        "                policy = agent.policy(torch.as_tensor(current_obs))\n"
        "                actions[t] = policy.sample()\n"
        "                old_log_probs[t] = policy.log_prob(actions[t])\n"
        "            current_obs, reward, termination, truncation, infos = envs.step(actions[t].numpy())\n"
        "            obs[t] = torch.as_tensor(current_obs)\n",
        "obs[t] = torch.as_tensor(current_obs)",
        "The observation is stored after the step: it is the one that the action led to, not the one in which it"
        " was chosen. Each action is learnt for the wrong state.",
    ),
    bug(
        "policy, values = agent.policy(obs), agent.value(obs)\n",
        "policy, values = agent.policy(obs), agent.critic(obs)\n",
        "policy, values = agent.policy(obs), agent.critic(obs)",
        "The critic's values are [B, 1], the returns [B]: their difference is a [B, B] table by broadcasting. The"
        " loss is smallest where all values are the mean of the returns, so the critic learns only that.",
    ),
    bug(
        "        batch = [x.flatten(0, 1) for x in (obs, actions, old_log_probs, advantages, returns)]  # [B, ...]\n",
        "        batch = [x.transpose(0, 1).flatten(0, 1) for x in (obs, actions, old_log_probs)]  # [B, ...]\n"
        "        batch += [advantages.flatten(), returns.flatten()]\n",
        "batch = [x.transpose(0, 1).flatten(0, 1) for x in (obs, actions, old_log_probs)]  # [B, ...]\n"
        "        batch += [advantages.flatten(), returns.flatten()]",
        "Observations and actions are in the order of the environments, advantages and returns in that of the"
        " steps: advantages belong to other actions.",
    ),
    bug(
        "return Categorical(logits=self.actor(obs))",
        "return Categorical(logits=self.actor(obs).softmax(-1))",
        "return Categorical(logits=self.actor(obs).softmax(-1))",
        "The softmax is taken twice, since Categorical takes that of its logits. With logits between 0 and 1, the"
        " probabilities of two actions stay between 0.27 and 0.73: the policy cannot become certain.",
    ),
    bug(
        "    deltas = rewards + gamma * next_values * ~terminated - values\n"
        "    ended = terminated | truncated\n",
        "    ended = terminated | truncated\n    deltas = rewards + gamma * next_values * ~ended - values\n",
        "deltas = rewards + gamma * next_values * ~ended - values",
        "A time limit counts as the end of the task: V(s_{t+1}) must be left out only where `terminated`. No metric"
        " shows it, and CartPole is learnt all the same.",
    ),
]

# Rewrites that change no weight: what is replaced by what, or a word and its new name.
REWRITES = [
    (
        "    for t in reversed(range(len(deltas))):\n",
        "    for t in range(len(deltas) - 1, -1, -1):\n",
    ),
    (
        "advantage = deltas[t] + gamma * gae_lambda * advantage * ~ended[t]",
        "advantage = torch.where(ended[t], deltas[t], deltas[t] + gamma * gae_lambda * advantage)",
    ),
    (
        "    return advantages, advantages + values\n",
        "    returns = advantages + values\n    return advantages, returns\n",
    ),
    (
        "    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # not in [PPO]\n",
        "    mean, std = advantages.mean(), advantages.std()\n"
        "    advantages = (advantages - mean) / (std + 1e-8)  # not in [PPO]\n",
    ),
    ("    ratio = log_ratio.exp()  #", "    ratio = torch.exp(log_ratio)  #"),
    (
        "clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)",
        "clipped_ratio = torch.clamp(ratio, min=1 - args.clip_coef, max=1 + args.clip_coef)",
    ),
    (
        "policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()",
        "policy_loss = torch.max(-ratio * advantages, -clipped_ratio * advantages).mean()",
    ),
    (
        "value_loss = 0.5 * (values - returns).square().mean()",
        "value_loss = 0.5 * ((returns - values) ** 2).mean()",
    ),
    (
        "return self.critic(obs).squeeze(-1)",
        "return self.critic(obs)[..., 0]",
    ),
    ("nn.init.zeros_(layer.bias)", "nn.init.constant_(layer.bias, 0.0)"),
    (
        "            episode_return += reward\n            episode_length += 1\n",
        "            episode_length += 1\n            episode_return += reward\n",
    ),
    (
        "for n in np.flatnonzero(termination | truncation):",
        "for n in np.flatnonzero(np.logical_or(termination, truncation)):",
    ),
    (
        '        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.total_timesteps)\n',
        "        remaining = 1 - global_step / args.total_timesteps\n"
        "        for group in optimizer.param_groups:\n"
        '            group["lr"] = args.learning_rate * remaining\n',
    ),
    (
        "            for rows in torch.randperm(batch_size).tensor_split(args.num_minibatches):\n",
        "            order = torch.randperm(batch_size)\n"
        "            for rows in order.tensor_split(args.num_minibatches):\n",
    ),
    (
        "                loss, metrics = ppo_loss(agent, *(x[rows] for x in batch), args)\n"
        "                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n"
        "                minibatch = [x[rows] for x in batch]\n"
        "                loss, metrics = ppo_loss(agent, *minibatch, args)\n",
    ),
    (
        "    actions = torch.zeros(shape, dtype=torch.long)",
        "    actions = torch.zeros(shape, dtype=torch.int64)",
    ),
    (
        "            next_obs[t], rewards[t] = torch.as_tensor(current_obs), torch.as_tensor(reward)\n",
        "            next_obs[t] = torch.as_tensor(current_obs)\n"
        "            rewards[t] = torch.as_tensor(reward)\n",
    ),
    (
        "values, next_values = agent.value(obs), agent.value(next_obs)",
        "values = agent.value(obs)\n            next_values = agent.value(next_obs)",
    ),
    ("old_log_probs", "behaviour_log_probs"),
    ("batch_size", "num_transitions"),
    ("current_obs", "latest_obs"),
    ("writer", "log"),
    ("obs_size", "num_inputs"),
]


def rewrite(text: str, old: str, new: str) -> str:
    """Apply a rewrite. The text stays as it is where the bug has taken the place of what is rewritten."""
    if old.isidentifier():
        return re.sub(rf"\b{old}\b", new, text)
    return text.replace(old, new) if text.count(old) == 1 else text


def rewritten(text: str, seed: int, number: int = 10) -> str:
    """Apply as many rewrites, chosen by the seed."""
    for old, new in random.Random(seed).sample(REWRITES, len(REWRITES)):
        changed = rewrite(text, old, new)
        if changed != text and number > 0:
            text, number = changed, number - 1
    return text


def make(number: int) -> tuple[str, range]:
    """The text of a broken copy, and the range of its faulty lines, counted from 1."""
    chosen, original = BUGS[number - 1], ORIGINAL.read_text(encoding="utf-8")
    assert original.count(chosen.old) == 1, "ppo_minimal.py has changed: this bug no longer fits"
    text = original.replace(chosen.old, chosen.new).replace("__ppo_minimal__", f"__bug_{number}__")
    text = rewritten(text.replace("python ppo_minimal.py", f"python bug_{number}.py"), number)
    before, faulty, _ = text.split(MARK)
    first = before.count("\n") + 1
    return text.replace(MARK, ""), range(first, first + faulty.count("\n") + 1)


def lines_of(text: str, faulty: range) -> set[int]:
    """All lines of the statements that have faulty lines."""
    lines = set(faulty)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            statement = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if set(statement) & set(faulty):
                lines |= set(statement)
    return lines


def write(number: int, folder: Path) -> str:
    """Write a broken copy into a folder, unless it is there, and say what to do with it."""
    name = f"bug_{number}.py"
    if not (folder / name).exists():
        (folder / name).write_text(make(number)[0], encoding="utf-8")
    return f"""{name} is a copy of ppo_minimal.py with one bug, and ten changes that do no harm.
run it:        python {name}
read metrics:  python coach.py check runs/*__bug_{number}__*
               tensorboard --logdir runs
then find it:  python exercises/check.py bug {number} --line L    (L: a line of {name}, as it was written)"""


def judge(number: int, line: int) -> tuple[bool, str]:
    """Whether a line is part of the faulty statement, and an answer."""
    text, faulty = make(number)
    if line in lines_of(text, faulty):
        return True, f"Right. {BUGS[number - 1].why}"
    return (
        False,
        "This line does no harm. Which metric is not as it should be, and which code does it come from?",
    )
