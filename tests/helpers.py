"""What the tests of several scripts share: settings, random rollouts, and brute force in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch.optim import Adam

PLAIN = {  # settings that these tests rely on, whatever the defaults are
    "num_envs": 4,
    "num_steps": 12,
    "learning_rate": 3e-3,
    "update_epochs": 3,
    "num_minibatches": 2,
    "surrogate": "clip",
    "clip_coef": 0.2,
    "clip_vloss": False,
    "norm_adv": True,
    "norm_obs": True,
    "norm_rewards": True,
    "recompute_advantages": False,
    "target_kl": None,
    "adapt": "none",
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "kl_coef": 1.0,
    "max_grad_norm": 0.5,
    "gamma": 0.97,
    "gae_lambda": 0.9,
    "hidden_size": 64,
}


def helpers_of(ppo):
    """Helpers that call the functions of one script."""

    def make_args(**changes):
        return replace(ppo.Args(), **PLAIN | changes)

    def make_state(args):
        return ppo.State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)

    def make_optimizer(agent):
        return Adam([ppo.flatten_parameters(agent)], 0.123, eps=1e-5)  # `update` sets the learning rate

    def make_rollout(args, agent, seed=0, chance=0.2):
        """A rollout of random observations and rewards, with actions that the agent has sampled."""
        rng = np.random.default_rng(seed)
        own = [agent.num_actions] if hasattr(agent, "log_std") else []  # actions are vectors
        rollout = ppo.Rollout(args, len(agent.one_hot), *own)
        ends = random_ends(rng, args.num_steps, args.num_envs, chance)
        rollout.terminated, rollout.truncated, rollout.valid = map(torch.from_numpy, ends)
        rollout.obs.copy_(torch.from_numpy(1 + 2 * rng.normal(size=rollout.obs.shape)))
        rollout.rewards.copy_(torch.from_numpy((0.3 + rng.normal(size=rollout.rewards.shape)) * ends[2]))
        rollout.discounted_return.copy_(torch.from_numpy(rng.normal(size=args.num_envs)))
        torch.manual_seed(seed)
        with torch.no_grad():
            rollout.actions, policy = agent.act(rollout.obs[:-1], agent.noise(*rollout.rewards.shape))
        rollout.acting_policy = policy[-1]
        return rollout

    def learn(agent, rollout, args, seed=0, optimizer=None):
        """`update` with its permutations seeded."""
        torch.manual_seed(seed)
        return ppo.update(agent, optimizer or make_optimizer(agent), rollout, make_state(args), args)

    return SimpleNamespace(**{name: value for name, value in locals().items() if name != "ppo"})


def random_ends(rng, steps, envs, chance):
    """terminated, truncated, valid [steps, envs]: after an episode's end comes one filler row."""
    terminated, truncated, valid = np.zeros((3, steps, envs), dtype=bool)
    valid[0] = True
    for t, n in np.ndindex(steps, envs):
        if t > 0:
            valid[t, n] = not (terminated[t - 1, n] or truncated[t - 1, n])
        if valid[t, n] and rng.random() < chance:
            kind = rng.integers(3)
            terminated[t, n], truncated[t, n] = kind != 1, kind != 0
    return terminated, truncated, valid


def weights(agent):
    return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]).clone()


def float64(tensor):
    return tensor.detach().double().numpy()


def brute_force_gae(rewards, values, terminated, truncated, gamma, lam):
    """A_t = Σ_l (γλ)^l δ_{t+l}, each sum for itself, up to the episode's end or the last row."""
    advantages = np.zeros(rewards.shape)
    for t, n in np.ndindex(*rewards.shape):
        for step in range(t, len(rewards)):
            future = 0.0 if terminated[step, n] else gamma * values[step + 1, n]
            delta = rewards[step, n] + future - values[step, n]
            advantages[t, n] += (gamma * lam) ** (step - t) * delta
            if terminated[step, n] or truncated[step, n]:
                break
    return advantages


def brute_force_rewards(agent, rollout, gamma):
    """Rewards over the standard deviation of the discounted returns: the numbers that `update` should use."""
    rewards, valid = float64(rollout.rewards), rollout.valid.numpy()
    seen = []
    for t, n in np.argwhere(valid):
        total, step = 0.0, t
        while step >= 0 and valid[step, n]:
            total += gamma ** (t - step) * rewards[step, n]
            step -= 1
        seen.append(total + (gamma ** (t + 1) * float(rollout.discounted_return[n]) if step < 0 else 0))
    old, count = agent.return_moments, float(agent.return_moments.count)
    mean, var, new = float(old.mean), float(old.var), np.array(seen)
    total = count + len(new)
    whole_mean = (count * mean + new.sum()) / total
    whole_var = (count * (var + mean**2) + (new**2).sum()) / total - whole_mean**2
    return np.clip(rewards / math.sqrt(whole_var + 1e-8), -10, 10)


def layer_pairs(agent, policy):
    """Our layers, and those of Stable-Baselines3's policy in the same places."""
    extractor = policy.mlp_extractor
    actor = extractor.policy_net[0], extractor.policy_net[2], policy.action_net
    critic = extractor.value_net[0], extractor.value_net[2], policy.value_net
    return zip((*agent.actor, *agent.critic), (*actor, *critic), strict=True)
