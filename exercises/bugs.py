"""Broken copies of ppo_minimal.py, to find the bug in. Spoilers: this file has the answers.

A copy has one bug, and ten of the rewrites below. They change how the code reads and not what it does, so that a
comparison with the original does not give the bug away.
"""

import difflib
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
    new: str
    faulty: tuple[str, ...]  # parts of `new` of which a learner is to find one
    near: str  # the beginning of a line that takes part in it, but is right
    hint: str  # after a wrong answer
    why: str


BUGS = [
    Bug(
        old="    log_ratio = policy.log_prob(actions) - old_log_probs\n",
        new="    log_probs = policy.log_prob(actions)\n"
        "    with torch.no_grad():\n"
        "        old_log_probs = agent.policy(obs).log_prob(actions)\n"
        "    log_ratio = log_probs - old_log_probs\n",
        faulty=(
            "    with torch.no_grad():\n"
            "        old_log_probs = agent.policy(obs).log_prob(actions)\n"
            "    log_ratio = log_probs - old_log_probs",
        ),
        near="log_probs = policy.log_prob",
        hint="Which metric is exactly 0, and what would make it so?",
        why="The old log-probabilities are computed anew, with the weights that are being trained. So the ratio is"
        " always 1, nothing is ever clipped, the approximate KL is exactly 0, and nothing holds the policy.",
    ),
    Bug(
        old="        batch = [x.flatten(0, 1) for x in (obs, actions, old_log_probs, advantages, returns)]  # [B, ...]\n",
        new="        batch = [x.transpose(0, 1).flatten(0, 1) for x in (obs, actions, old_log_probs)]  # [B, ...]\n"
        "        batch += [advantages.flatten(), returns.flatten()]\n",
        faulty=(
            "batch = [x.transpose(0, 1).flatten(0, 1) for x in (obs, actions, old_log_probs)]  # [B, ...]\n"
            "        batch += [advantages.flatten(), returns.flatten()]",
        ),
        near="advantages, returns = compute_gae",
        hint="The updates have the right size, but the return falls: which action is judged by which advantage?",
        why="Observations and actions are in the order of the environments, advantages and returns in that of the"
        " steps: advantages belong to other actions. So the return falls, and the critic predicts nothing.",
    ),
    Bug(
        old="policy, values = agent.policy(obs), agent.value(obs)\n",
        new="policy, values = agent.policy(obs), agent.critic(obs)\n",
        faulty=("policy, values = agent.policy(obs), agent.critic(obs)",),
        near="value_loss =",
        hint="The critic predicts a constant: what does its loss compare, and in which shapes?",
        why="The critic's values are [B, 1], the returns [B]: their difference is a [B, B] table by broadcasting. The"
        " loss is smallest where all values are the mean of the returns, so the critic learns only that, and the"
        " explained variance stays at 0.",
    ),
    Bug(
        old="            obs[t] = torch.as_tensor(current_obs)\n"
        "            with torch.no_grad():\n"
        "                policy = agent.policy(obs[t])\n"
        "                actions[t] = policy.sample()\n"
        "                old_log_probs[t] = policy.log_prob(actions[t])\n"
        "            current_obs, reward, termination, truncation, infos = envs.step(actions[t].numpy())\n",
        new="            with torch.no_grad():\n"
        "                policy = agent.policy(torch.as_tensor(current_obs))\n"
        "                actions[t] = policy.sample()\n"
        "                old_log_probs[t] = policy.log_prob(actions[t])\n"
        "            current_obs, reward, termination, truncation, infos = envs.step(actions[t].numpy())\n"
        "            obs[t] = torch.as_tensor(current_obs)\n",
        faulty=("obs[t] = torch.as_tensor(current_obs)",),
        near="policy = agent.policy(torch",
        hint="The KL stays large when the learning rate is nearly 0, so it is not the update: what else differs between acting and learning?",
        why="The observation is stored after the step: it is the one that the action led to, not the one in which it"
        " was chosen. Each action is learnt for the wrong state. A KL that stays large, although the learning rate"
        " decays to 0, is no update: acting and learning differ.",
    ),
    Bug(
        old="return Categorical(logits=self.actor(obs))",
        new="return Categorical(logits=self.actor(obs).softmax(-1))",
        faulty=("return Categorical(logits=self.actor(obs).softmax(-1))",),
        near="self.actor = mlp(",
        hint="The entropy stops at a value above 0: what keeps the policy from becoming certain?",
        why="The softmax is taken twice, since Categorical takes that of its logits. With logits between 0 and 1, the"
        " probabilities of two actions stay between 0.27 and 0.73: the policy cannot become certain, and its"
        " entropy cannot fall below 0.58 nats.",
    ),
    Bug(
        old="            next_obs[t], rewards[t] = torch.as_tensor(current_obs), torch.as_tensor(reward)\n"
        "            terminated[t], truncated[t] = torch.as_tensor(termination), torch.as_tensor(truncation)\n"
        "            episode_return += reward\n"
        "            episode_length += 1\n"
        "            for n in np.flatnonzero(termination | truncation):  # current_obs[n] is of the next episode\n"
        '                next_obs[t, n] = torch.as_tensor(infos["final_obs"][n])\n',
        new="            next_obs[t], rewards[t] = torch.as_tensor(current_obs), torch.as_tensor(reward)\n"
        "            terminated[t], truncated[t] = torch.as_tensor(termination), torch.as_tensor(truncation)\n"
        "            episode_return += reward\n"
        "            episode_length += 1\n"
        "            for n in np.flatnonzero(termination | truncation):\n",
        faulty=(
            "next_obs[t], rewards[t] = torch.as_tensor(current_obs), torch.as_tensor(reward)",
            "for n in np.flatnonzero(termination | truncation):",
        ),
        near="terminated[t], truncated[t]",
        hint="No metric shows it: compare what is stored in each tensor with the comment where it is made.",
        why='Nothing is stored in next_obs from infos["final_obs"]. Where a time limit ends an episode, next_obs has'
        " the first observation of the next one, and the advantage the value of another state. After a fall,"
        " it does not count, and in a solved CartPole both states are worth the same: so no metric shows it.",
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
    ("    ended = terminated | truncated\n", "    ended = torch.logical_or(terminated, truncated)\n"),
    ("nn.init.orthogonal_(layer.weight, gain)", "nn.init.orthogonal_(layer.weight, gain=gain)"),
    ("entropy = policy.entropy().mean()", "entropy = torch.mean(policy.entropy())"),
    (
        '        metrics["explained_variance"] = 1 - (returns - values).var() / returns.var()\n',
        "        unexplained = (returns - values).var() / returns.var()\n"
        '        metrics["explained_variance"] = 1 - unexplained\n',
    ),
    (
        "    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs)  # so far\n",
        "    episode_return = np.zeros(args.num_envs)  # so far\n"
        "    episode_length = np.zeros(args.num_envs)\n",
    ),
    (
        "        advantages[t] = advantage\n    return",
        "        advantages[t].copy_(advantage)\n    return",
    ),
    ("nn.init.zeros_(layer.bias)", "layer.bias.data.zero_()"),
    ("old_log_probs", "past_log_probs"),
    ("batch_size", "total_rows"),
    ("current_obs", "seen_obs"),
    ("writer", "log"),
    ("obs_size", "num_inputs"),
]


HEADER = """A copy of ppo_minimal.py with one bug.

    python {name}
    tensorboard --logdir runs
"""


def rewrite(text: str, old: str, new: str) -> str:
    """Apply a rewrite. The text stays as it is where the bug has taken the place of what is rewritten."""
    if old.isidentifier():
        return re.sub(rf"\b{old}\b", new, text)
    return text.replace(old, new) if text.count(old) == 1 else text


def rewritten(text: str, seed: int, number: int = 10) -> str:
    """Apply as many rewrites, chosen by the seed."""
    for old, new in random.Random(seed).sample(REWRITES, len(REWRITES)):
        if number == 0:
            break
        changed = rewrite(text, old, new)
        if changed != text:
            text, number = changed, number - 1
    return text


def make(number: int) -> tuple[str, set[int]]:
    """The text of a broken copy, and the lines of its faulty statement, counted from 1."""
    bug, original = BUGS[number - 1], ORIGINAL.read_text(encoding="utf-8")
    assert original.count(bug.old) == 1, "ppo_minimal.py has changed: this bug no longer fits"
    new = bug.new
    for faulty in bug.faulty:
        assert new.count(faulty) == 1
        new = new.replace(faulty, f"{MARK}{faulty}{MARK}")
    text = original.replace(bug.old, new)
    start, end = text.index('"""') + 3, text.index("\n  [PPO] Schulman")
    text = text[:start] + HEADER.format(name=f"bug_{number}.py") + text[end:]
    text = rewritten(text.replace("__ppo_minimal__", f"__bug_{number}__"), number)
    lines, line = set(), 1
    for index, part in enumerate(text.split(MARK)):  # every second part is faulty
        last = line + part.count("\n")
        if index % 2:
            lines |= set(range(line, last + 1))
        line = last
    return text.replace(MARK, ""), lines


def write(number: int, folder: Path) -> str:
    """Write a broken copy into a folder, unless it is there, and say what to do with it."""
    path = folder / f"bug_{number}.py"
    if path.exists():
        about = f"{path.name} exists, and is kept."
    else:
        path.write_text(make(number)[0], encoding="utf-8")
        about = f"{path.name} is a copy of ppo_minimal.py with one bug, and ten changes that do no harm."
    return f"""{about}
run it, half a minute:  python {path.name}
read its metrics:       python coach.py check "runs/*__bug_{number}__*"
name a line L of it:    python exercises/check.py bug {number} --line L"""


def without_comment(line: str) -> str:
    """A line without the comment at its end, which a learner may have written."""
    return line.split("  #")[0].rstrip()


def judge(number: int, line: int, folder: Path) -> tuple[bool, str]:
    """Whether a line of the copy in a folder is part of the faulty statement, and an answer."""
    bug, (text, faulty) = BUGS[number - 1], make(number)
    path = folder / f"bug_{number}.py"
    if not path.exists():
        return False, f"bug_{number}.py is not in this folder: `check.py bug {number}` writes it"
    given = [without_comment(row) for row in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    original = [without_comment(row) for row in text.splitlines()]
    if not 1 <= line <= len(given):
        return False, f"bug_{number}.py has {len(given)} lines"
    # A learner may have added lines since the copy was written.
    for block in difflib.SequenceMatcher(None, given, original, autojunk=False).get_matching_blocks():
        if block.a <= line - 1 < block.a + block.size:
            written = line - block.a + block.b
            if written in faulty:
                return True, f"Right. {bug.why}"
            if original[written - 1].strip().startswith(bug.near):
                return False, "Close: this line takes part in it, but another one is wrong."
            return False, f"Not this line. {bug.hint}"
    return (
        False,
        f"You changed this line. To start again, delete bug_{number}.py and run `check.py bug {number}`",
    )
