"""PPO of Tianshou, TorchRL and skrl, with the settings of our scripts, for `throughput.py`.

Each function trains as the library's own example for PPO does, in one process with vectorized environments.
It takes the settings of `ppo.py` or `ppo_continuous.py`, and calls `progress.add` after each rollout. RSL-RL
is not among them: it does not take Gymnasium's environments.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn


class Progress:
    """Steps, mean return of the last 100 episodes, and time at each rollout's end."""

    def __init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=100)
        self.rows: list[tuple[float, float, float]] = []

    def make_env(self, env_id: str) -> gym.Env:
        """An environment that clips actions, and whose returns are recorded."""
        env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
        env.return_queue = self.returns
        space = env.action_space
        if not isinstance(space, gym.spaces.Box):
            return env
        return gym.wrappers.TransformAction(env, lambda action: action.clip(space.low, space.high), space)

    def add(self, steps: float) -> None:
        """A rollout of all environments is over, after so many steps in all."""
        self.rows.append((steps, float(np.mean(self.returns or np.nan)), time.time()))


def network(sizes: list[int], last_gain: float, discrete: bool) -> nn.Sequential:
    """As in our scripts: two layers, and a linear one, with orthogonal weights."""
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    activation = nn.Tanh if discrete else nn.ELU
    return nn.Sequential(layers[0], activation(), layers[1], activation(), *layers[2:])


def tianshou(args: Any, progress: Progress) -> None:
    """Tianshou 2."""
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
    from tianshou.algorithm.optim import LRSchedulerFactoryLinear, TorchOptimizerFactory
    from tianshou.data import Collector, CollectStats, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv, VectorEnvNormObs
    from tianshou.trainer import OnPolicyTrainerParams
    from tianshou.utils.net.common import ModuleWithVectorOutput
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

    env = progress.make_env(args.env_id)
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    envs: Any = DummyVectorEnv([partial(progress.make_env, args.env_id) for _ in range(args.num_envs)])
    if args.norm_obs:
        envs = VectorEnvNormObs(envs)
    envs.seed(args.seed)
    size, rollout = env.observation_space.shape[0], args.num_envs * args.num_steps

    class Body(nn.Module):  # Tianshou adds the last layer
        def __init__(self) -> None:
            super().__init__()
            self.layers = network([size, 64, 64, 1], 1.0, discrete)[:-1]

        def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
            return self.layers(torch.as_tensor(obs, dtype=torch.float32)), state

    actor_body, critic_body = (ModuleWithVectorOutput.from_module(Body(), 64) for _ in range(2))
    if discrete:
        actor = DiscreteActor(
            preprocess_net=actor_body, action_shape=env.action_space.n, softmax_output=False
        )
        critic: nn.Module = DiscreteCritic(preprocess_net=critic_body)
        policy = DiscreteActorPolicy(actor=actor, action_space=env.action_space)
        last = actor.last
    else:
        shape = env.action_space.shape
        actor = ContinuousActorProbabilistic(preprocess_net=actor_body, action_shape=shape, unbounded=True)
        nn.init.constant_(actor.sigma_param, -0.5)
        critic = ContinuousCritic(preprocess_net=critic_body)

        def normal(loc_scale: tuple[torch.Tensor, torch.Tensor]) -> torch.distributions.Distribution:
            return torch.distributions.Independent(torch.distributions.Normal(*loc_scale), 1)

        policy = ProbabilisticActorPolicy(
            actor=actor, dist_fn=normal, action_space=env.action_space, action_bound_method="clip"
        )
        last = actor.mu
    for layer, gain in ((last, 0.01), (critic.last, 1.0)):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, gain)
                nn.init.zeros_(module.bias)
    steps = int(args.total_timesteps)
    schedule = LRSchedulerFactoryLinear(
        max_epochs=1, epoch_num_steps=steps, collection_step_num_env_steps=rollout
    )
    adam = TorchOptimizerFactory(torch.optim.Adam, lr=args.learning_rate, eps=1e-5, fused=True)
    algorithm = PPO(
        policy=policy,
        critic=critic,
        optim=adam.with_lr_scheduler_factory(schedule),
        advantage_normalization=True,
        vf_coef=args.vf_coef / 2,  # as of all three: their value loss lacks our ½
        ent_coef=args.ent_coef,
        max_grad_norm=0.5,
        return_scaling=args.norm_rewards,
        max_batchsize=rollout,
    )

    def before_rollout(epoch: int, step: int) -> None:
        if step > 0:
            progress.add(step)

    algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=Collector[CollectStats](
                algorithm, envs, VectorReplayBuffer(rollout, args.num_envs)
            ),
            max_epochs=1,
            epoch_num_steps=steps,
            collection_step_num_env_steps=rollout,
            update_step_num_repetitions=args.update_epochs,
            batch_size=rollout // args.num_minibatches,
            training_fn=before_rollout,
            show_progress=False,
            verbose=False,
        )
    )


def torchrl(args: Any, progress: Progress) -> None:
    """TorchRL. It is compiled if actions are discrete; if not, that was no faster."""
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torchrl._utils import compile_with_warmup
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import ClipTransform, DoubleToFloat, GymWrapper, SerialEnv, TransformedEnv, VecNorm
    from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value.advantages import GAE

    def make() -> Any:
        return GymWrapper(progress.make_env(args.env_id), categorical_action_encoding=True)

    env = TransformedEnv(SerialEnv(args.num_envs, make))
    if args.norm_obs:
        env.append_transform(VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2))
        env.append_transform(ClipTransform(in_keys=["observation"], low=-10, high=10))
    env.append_transform(DoubleToFloat())
    env.set_seed(args.seed)
    size, rollout = env.observation_spec["observation"].shape[-1], args.num_envs * args.num_steps
    spec = env.action_spec_unbatched
    discrete = compiled = spec.dtype == torch.int64
    if discrete:
        body: nn.Module = network([size, 64, 64, spec.space.n], 0.01, True)
        keys, kind = ["logits"], torch.distributions.Categorical
    else:
        actions = spec.shape[-1]
        scale = AddStateIndependentNormalScale(actions, scale_lb=1e-8, init_value=-0.5)
        body = nn.Sequential(network([size, 64, 64, actions], 0.01, False), scale)
        keys, kind = ["loc", "scale"], IndependentNormal
    actor = ProbabilisticActor(
        TensorDictModule(body, ["observation"], keys),
        in_keys=keys,
        spec=env.full_action_spec_unbatched,
        distribution_class=kind,
        return_log_prob=True,
    )
    critic = ValueOperator(network([size, 64, 64, 1], 1.0, discrete), in_keys=["observation"])
    steps = int(args.total_timesteps)
    collector = Collector(env, actor, frames_per_batch=rollout, total_frames=steps, compile_policy=compiled)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rollout, compilable=compiled),
        sampler=SamplerWithoutReplacement(),
        batch_size=rollout // args.num_minibatches,
        compilable=compiled,
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False, vectorized=not compiled)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_coeff=args.ent_coef,
        critic_coeff=args.vf_coef / 2,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, torch.tensor(args.learning_rate), eps=1e-5, fused=True)

    def update(batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_module(batch)
        (loss["loss_critic"] + loss["loss_objective"] + loss["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        return loss.detach()

    if compiled:
        update, advantage = (compile_with_warmup(each, warmup=1) for each in (update, advantage))
    done = 0
    for data in collector:
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * (1 - done / steps))
        done += data.numel()
        with torch.no_grad():
            data = advantage(data)
        buffer.extend(data.reshape(-1))
        for _ in range(args.update_epochs):
            for batch in buffer:
                update(batch)
        collector.update_policy_weights_()
        progress.add(done)
    collector.shutdown()


def skrl(args: Any, progress: Progress) -> None:
    """skrl 2. It also learns from the steps that only reset an environment."""
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.trainers.torch import SequentialTrainer
    from skrl.utils import set_seed

    set_seed(args.seed)
    makers = [partial(progress.make_env, args.env_id) for _ in range(args.num_envs)]
    env = wrap_env(gym.vector.SyncVectorEnv(makers), verbose=False)
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    size, rollout = env.observation_space.shape[0], args.num_steps

    mixin: Any = CategoricalMixin if discrete else GaussianMixin

    class Policy(mixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            mixin.__init__(self)
            self.net = network([size, 64, 64, self.num_actions], 0.01, discrete)
            self.log_std = nn.Parameter(torch.full((self.num_actions,), -0.5))

        def compute(self, inputs: Any, role: str) -> tuple[torch.Tensor, dict]:
            return self.net(inputs["observations"]), {} if discrete else {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):
        def __init__(self) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = network([size, 64, 64, 1], 1.0, discrete)

        def compute(self, inputs: Any, role: str) -> tuple[torch.Tensor, dict]:
            return self.net(inputs["observations"]), {}

    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    config = PPO_CFG()
    config.rollouts, config.learning_epochs = rollout, args.update_epochs
    config.mini_batches, config.learning_rate = args.num_minibatches, args.learning_rate
    iterations = int(args.total_timesteps) // (rollout * args.num_envs)
    config.learning_rate_scheduler = torch.optim.lr_scheduler.LinearLR  # a step for each epoch
    config.learning_rate_scheduler_kwargs = {
        "start_factor": 1.0,
        "end_factor": 0.0,
        "total_iters": iterations * args.update_epochs,
    }
    config.value_clip, config.value_loss_scale = 0.0, args.vf_coef / 2
    config.entropy_loss_scale, config.time_limit_bootstrap = args.ent_coef, True
    if args.norm_obs:
        config.observation_preprocessor = RunningStandardScaler
        config.observation_preprocessor_kwargs = {"size": env.observation_space, "device": "cpu"}
        config.value_preprocessor = RunningStandardScaler
        config.value_preprocessor_kwargs = {"size": 1, "device": "cpu"}
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0

    class Agent(PPO):
        def update(self, *, timestep: int, timesteps: int) -> None:
            super().update(timestep=timestep, timesteps=timesteps)
            progress.add((timestep + 1) * args.num_envs)

    memory = RandomMemory(memory_size=rollout, num_envs=args.num_envs, device="cpu")
    models = {"policy": Policy(), "value": Value()}
    agent = Agent(models=models, memory=memory, cfg=config, **spaces)
    timesteps = iterations * rollout
    SequentialTrainer(
        cfg={"timesteps": timesteps, "headless": True, "disable_progressbar": True}, env=env, agents=agent
    ).train()
