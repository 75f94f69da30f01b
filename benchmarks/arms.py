"""Changes of ppo_continuous.py that no flag makes, for the comparison of results/one_setting.md.

Each takes the script, and returns what replaces its names, so that the script itself stays as it is. What is
worth its lines, by the rule there, comes into the script, and what is not has a row in the table alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Names = dict[str, Any]  # what replaces the names of a module


class Networks(NamedTuple):
    """What ppo_loss asks of an agent."""

    policy: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]


AVERAGED_DECAY = 0.98  # of the average of weights: about the last 50 iterations


def popart(script: ModuleType) -> Names:
    """The critic learns targets with mean 0 and variance 1 (van Hasselt et al. 2016, arXiv:1602.07714).

    Mean and variance are those of the last rollouts' returns. When they change, the critic's last layer
    changes such that its values stay as they were.
    """

    class Agent(script.Agent):
        def __init__(self, *given: Any):
            super().__init__(*given)
            self.rollouts = nn.Buffer(torch.zeros(()))
            self.target_mean, self.target_var = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

        def target_std(self) -> Tensor:
            """At least a tenth of the rewards' scale, so that the critic's gradient is not most of it."""
            return self.target_var.sqrt().clamp(min=0.1)

        def include(self, returns: Tensor) -> None:
            """Update the moments by the returns [B] of a rollout, and keep all values."""
            mean, std = self.target_mean.clone(), self.target_std()
            self.rollouts += 1
            share = 0.1 / (1 - 0.9**self.rollouts)  # of the new data: 1 at first, later a tenth
            delta = returns.mean() - mean
            self.target_var.lerp_(returns.var(correction=0), share).add_(share * (1 - share) * delta.square())
            self.target_mean.add_(share * delta)
            last = self.critic[-1]
            last.weight.data *= std / self.target_std()
            last.bias.data.copy_((std * last.bias.data + mean - self.target_mean) / self.target_std())

        def normalized_value(self, obs: Tensor) -> Tensor:
            """V(s) [...] in the scale of the targets."""
            return super().value(obs)

        def value(self, obs: Tensor) -> Tensor:
            """V(s) [...]."""
            return self.target_mean + self.target_std() * super().value(obs)

    def ppo_loss(agent: Agent, batch: Any, args: Any, state: Any) -> tuple[Tensor, dict[str, Tensor]]:
        mean, std = agent.target_mean, agent.target_std()
        batch = batch._replace(
            old_values=(batch.old_values - mean) / std, returns=(batch.returns - mean) / std
        )
        networks = Networks(policy=agent.policy, value=agent.normalized_value)
        return original_loss(networks, batch, args, state)

    def update(agent: Agent, optimizer: Any, compute: Callable, batch: Any, *more: Any) -> dict[str, float]:
        with torch.no_grad():
            agent.include(batch.returns)
        return original_update(agent, optimizer, compute, batch, *more)

    original_loss, original_update = script.ppo_loss, script.update
    return {"Agent": Agent, "ppo_loss": ppo_loss, "update": update}


def rising_horizon(script: ModuleType) -> Names:
    """γ rises from 0.99 to 0.999, with equal factors of the horizon 1 / (1 - γ)."""

    def adjust_coefficients(state: Any, args: Any) -> None:
        original(state, args)
        args.gamma = 1 - 0.01 * 0.1 ** min(1, state.global_step / args.total_timesteps)

    original = script.adjust_coefficients
    return {"adjust_coefficients": adjust_coefficients}


def coloured_noise(script: ModuleType) -> Names:
    """The noise of actions has a spectrum f^-½ in time (Hollenstein et al. 2023, arXiv:2312.11091).

    Each action has the Gaussian distribution that log_prob gives it, but actions of one rollout are not
    independent, and log_prob does not know it.
    """

    def collect_rollout(envs: Any, agent: Any, rollout: Any, args: Any) -> list:
        noise[:] = coloured(args.num_steps, args.num_envs, envs.single_action_space.shape[0], exponent=0.5)
        return original(envs, agent, rollout, args)

    def sample(policy: Tensor) -> Tensor:
        means, log_stds = policy.chunk(2, -1)
        return means + log_stds.exp() * noise.pop(0)

    original, noise = script.collect_rollout, []
    return {"collect_rollout": collect_rollout, "sample": sample}


def coloured(*shape: int, exponent: float) -> Tensor:
    """Gaussian noise of this shape with variance 1, and a spectrum f^-exponent along the first dimension.

    The lowest frequency, 0, has the amplitude of the next one. It is the first half of a longer sequence,
    whose end is correlated with its beginning.
    """
    steps = 2 * shape[0]
    frequencies = torch.fft.rfftfreq(steps)
    frequencies[0] = frequencies[1]
    amplitudes = frequencies ** (-exponent / 2)
    power = torch.fft.irfft(amplitudes.square(), n=steps)[0]  # the mean over positive and negative ones
    spectrum = torch.fft.rfft(torch.randn(steps, *shape[1:]), dim=0)
    filtered = spectrum * (amplitudes / power.sqrt()).view(-1, *[1] * (len(shape) - 1))
    return torch.fft.irfft(filtered, n=steps, dim=0)[: shape[0]]


def equal_betas(script: ModuleType) -> Names:
    """β1 = β2 = 0.99 in Adam (Dohare et al. 2024, "Loss of plasticity in deep continual learning")."""

    def update(agent: Any, optimizer: Any, *more: Any) -> dict[str, float]:
        for group in optimizer.param_groups:
            group["betas"] = 0.99, 0.99
        return original(agent, optimizer, *more)

    original = script.update
    return {"update": update}


def relative_time(script: ModuleType) -> Names:
    """Adam starts at time 0 in each iteration, with its moments (Ellis et al. 2024, arXiv:2412.17113)."""

    def update(agent: Any, optimizer: Any, *more: Any) -> dict[str, float]:
        for moments in optimizer.state.values():
            moments["step"].zero_()
        return original(agent, optimizer, *more)

    original = script.update
    return {"update": update}


def beta_policy(script: ModuleType) -> Names:
    """A Beta distribution between the bounds of each action (Chou et al. 2017), with α, β > 1.

    π(·|s) is [..., 2A]: α and β. At first, its deviation is that of --init-log-std -1 on the range -1 to 1.
    It has no lower limit.
    """

    class Agent(script.Agent):
        def __init__(self, args: Any, obs_space: Any, action_size: int):
            super().__init__(args, obs_space, action_size)
            obs_size = obs_space.shape[0]
            self.actor = script.mlp(obs_size, args.hidden_size, 2 * action_size, 0.01, args.activation)
            first = 0.5 * (math.exp(-2 * args.init_log_std) - 1)  # α = β, from σ² = 1 / (2α + 1)
            nn.init.constant_(self.actor[-1].bias, math.log(math.expm1(first - 1)))

        def policy(self, obs: Tensor) -> Tensor:
            return 1 + nn.functional.softplus(self.actor(obs))

    def sample(policy: Tensor) -> Tensor:
        alpha, beta = policy.chunk(2, -1)
        return 2 * torch.distributions.Beta(alpha, beta).sample() - 1

    def most_likely(policy: Tensor) -> Tensor:
        """The means: modes are extreme where α and β are near 1."""
        alpha, beta = policy.chunk(2, -1)
        return 2 * alpha / (alpha + beta) - 1

    def log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
        return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)

    def log_prob(policy: Tensor, actions: Tensor) -> Tensor:
        alpha, beta = policy.chunk(2, -1)
        x = ((actions + 1) / 2).clamp(1e-6, 1 - 1e-6)
        logs = (alpha - 1) * x.log() + (beta - 1) * (1 - x).log() - log_beta(alpha, beta)
        return (logs - math.log(2)).sum(-1)

    def entropy(policy: Tensor) -> Tensor:
        alpha, beta = policy.chunk(2, -1)
        both = alpha + beta
        inner = log_beta(alpha, beta) + (both - 2) * torch.digamma(both)
        inner = inner - (alpha - 1) * torch.digamma(alpha) - (beta - 1) * torch.digamma(beta)
        return (inner + math.log(2)).sum(-1)

    def kl_divergence(old_policy: Tensor, policy: Tensor) -> Tensor:
        old_alpha, old_beta = old_policy.chunk(2, -1)
        alpha, beta = policy.chunk(2, -1)
        logs = log_beta(alpha, beta) - log_beta(old_alpha, old_beta)
        terms = (old_alpha - alpha) * torch.digamma(old_alpha) + (old_beta - beta) * torch.digamma(old_beta)
        both = (alpha + beta - old_alpha - old_beta) * torch.digamma(old_alpha + old_beta)
        return (logs + terms + both).sum(-1)

    functions = sample, most_likely, log_prob, entropy, kl_divergence
    return {"Agent": Agent} | {function.__name__: function for function in functions}


def averaged(script: ModuleType) -> Names:
    """Trains as usual, and plays the mean of the weights of the last iterations, too.

    The results of `train` have its returns as "averaged_returns", in the episodes of the last policy. If the
    run was resumed, it is the mean since then.
    """

    def update(agent: nn.Module, *more: Any) -> dict[str, float]:
        metrics = original(agent, *more)
        for name, weights in agent.named_parameters():
            mean.setdefault(name, weights.detach().clone()).lerp_(weights.detach(), 1 - AVERAGED_DECAY)
        return metrics

    class Run(script.Run):
        def finish(self, env: Any, show_commands: bool) -> dict:
            results = super().finish(env, show_commands)
            content = torch.load(self.path, weights_only=True)
            content["agent"] |= mean
            path = Path(self.path).with_name("averaged.pt")
            torch.save(content, path)
            return results | {"averaged_returns": script.evaluate(path, self.args, env)}

    original, mean = script.update, {}
    return {"update": update, "Run": Run}


CHANGES: dict[str, Callable[[ModuleType], Names]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        popart,
        rising_horizon,
        coloured_noise,
        equal_betas,
        relative_time,
        beta_policy,
        averaged,
    )
}
