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
        "added": "Args.stagger, Args.init_log_std, Args.min_log_std, LOG_2PI, CutOnce, CutOnce.__init__, "
        "CutOnce.step, action_figures, narrow, wide, outside, ADVICE|=",
        "missing": "collapse",
        "own": "check_spaces, Agent.policy, Agent.noise, Agent.act, Agent.env_actions, log_prob, "
        "entropy, kl_divergence",
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
+ Burda 2018        "Exploration by Random Network Distillation", arXiv:1810.12894, §2.4
+ Dohare 2023       "Overcoming Policy Collapse in Deep Reinforcement Learning", EWRL 16
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
+ "min_log_std": (-20, 3),
@ check_args
+ above = f"--min-log-std is {args.min_log_std}; it must be at most --init-log-std, {args.init_log_std}"
+ refuse(args.min_log_std > args.init_log_std, above)
+ few = f"--total-timesteps is {args.total_timesteps}; the first {rows} steps only set the normalisers"
+ refuse(args.norm_obs and args.total_timesteps <= rows, f"{few}; give more, or --no-norm-obs")
@ make_env
+ if args.stagger and (limit := env.spec and env.spec.max_episode_steps):
+ env = CutOnce(env, index * limit // args.num_envs)
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
@ update
+ agent.log_std.data.clamp_(min=args.min_log_std)  # not in the policy: from here it can rise again
@ ADVICE
- ADVICE = {kl_watch: 5, kl_act: 5, drift: 10, idle: 20, critic: 20, collapse: 10, mismatch: 1}  # iterations
+ ADVICE = {kl_watch: 5, kl_act: 5, drift: 10, idle: 20, critic: 20}  # iterations
@ plan
- f"{steps} gradient steps, {steps * rollouts:,} in all",
+ f"{steps} gradient steps, {steps * (rollouts - args.norm_obs):,} in all",
@ evaluate
- envs, _ = make_envs(replace(args, async_envs=False), n, video)
+ envs, _ = make_envs(replace(args, async_envs=False, stagger=False), n, video)
@ train
- optimizer = Adam([flatten_parameters(agent)], args.learning_rate, eps=1e-5, fused=args.device != "mps")
+ # β2 is usually 0.999. With less, the scale of Adam's steps soon follows gradients that grow suddenly, as
+ # they do when an episode fails after many that did not (Dohare 2023).
+ vector, betas = flatten_parameters(agent), (0.9, 0.99)
+ optimizer = Adam([vector], args.learning_rate, betas, eps=1e-5, fused=args.device != "mps")
+ agent.log_std.data.clamp_(min=args.min_log_std)  # a floor given anew holds at once
- rollout, figures = Rollout(args, len(one_hot)), dict[str, float]()
+ rollout, figures = Rollout(args, len(one_hot), agent.num_actions), dict[str, float]()
+ if state.global_step == 0 and args.norm_obs:
+ # Only for the normalisers, or the first update would see raw observations (Burda 2018).
+ scale_rewards(agent, rollout, args.gamma)
+ agent.obs_moments.update(rollout.obs[:-1][rollout.valid].to(agent.one_hot.device))
+ state.global_step = int(rollout.valid.sum())
+ continue
+ figures |= action_figures(agent, rollout)
''',  # noqa: E501
    },
    "ppo_atari.py": {
        "added": "import ctypes, import difflib, import torch.distributed, Args.sticky_actions, "
        "Args.clip_rewards, Args.bfloat16, world, collective, total, LostLives, "
        "LostLives.__init__, LostLives.reset, LostLives.step, Screens, Screens.render_mode, "
        "Screens.__init__, Screens.reset, Screens.step, Screens.render, Agent.forward, deal, "
        "normalize, count_threads, keep_memory",
        "missing": "import multiprocessing, import traceback, from torch.nn, Args.eval_max_steps, "
        "Args.async_envs, Args.norm_obs, Args.norm_rewards, Args.hidden_size, one_hot_mask, "
        "check_spaces, guard, make_env, RunningMoments, RunningMoments.__init__, "
        "RunningMoments.update, MLP, MLP.__init__, MLP.forward, Agent.normalize, Agent.policy, "
        "Agent.value, Agent.env_actions, scale_rewards",
        "own": "from functools, FIXED, make_envs, Agent.__init__, Batch, FIGURES, gradient, compiled, "
        "Rollout.__init__, collect_rollout, update, pick_device, evaluate",
        "lines": r'''
@ head
- #     "gymnasium[classic-control,toy-text]>=1.1",
+ #     "gymnasium>=1.1",
+ #     "ale-py>=0.11.1",
- """Proximal Policy Optimization for discrete actions, in one file.
+ """Proximal Policy Optimization for Atari games, in one file.
- python ppo.py --env-id CartPole-v1
+ python ppo_atari.py --env-id BreakoutNoFrameskip-v4
+ torchrun --nproc-per-node 4 ppo_atari.py --env-id BreakoutNoFrameskip-v4 --num-envs 32
- trains on any Gymnasium environment with `Discrete` actions and observations that flatten to a vector. To use
- your own, register it and name it (`--env-id my_module:MyEnv-v0`), or copy this file, define the class in
- it and in `make_env` put `MyEnv()` in the place of `gym.make(...)`.
+ trains on any game of the Arcade Learning Environment, under DeepMind's protocol, which `make_envs` describes.
+ Under torchrun, processes with equal shares of the environments learn one network together.
- Schulman 2015     "Trust Region Policy Optimization", arXiv:1502.05477
+ Mnih 2015         "Human-level control through deep reinforcement learning", Nature 518
+ Machado 2018      "Revisiting the Arcade Learning Environment", arXiv:1709.06009
- Shapes: T steps a rollout (--num-steps), N environments (--num-envs), D entries an observation, A actions,
- B rows of a batch.
+ Shapes: T steps a rollout (--num-steps), N environments of this process (--num-envs over the processes), A
+ actions, B rows of a batch. An observation is 4 images, the last the newest: [4, 84, 84], bytes.
@ Args.env_id
- """Gymnasium id; `module:EnvId-v0` imports the module first."""
+ """The game. BreakoutNoFrameskip-v4, ALE/Breakout-v5 and Breakout mean the same here."""
@ Args.num_envs
- """N: environments that step in parallel."""
+ """Environments that step in parallel, over all processes."""
@ Args.total_timesteps
- """Environment transitions in all."""
+ """Environment transitions in all, of 4 frames each."""
@ Args.target_kl
- """When an iteration's KL from the old policy exceeds this, end its passes and go back to within it."""
+ """End an iteration's passes when the KL from the old policy exceeds this; it adapts nothing."""
@ Args.device
- """Where the networks live. auto: CUDA from --hidden-size 512; small networks are faster on the CPU."""
+ """Where the network lives. auto: on a GPU that CUDA knows, if there is one."""
@ Args.num_threads
- """CPU threads of PyTorch; for small networks, one is the fastest."""
+ """CPU threads of PyTorch and of the games; 0: the machine's cores, over its processes."""
@ Args.compile
- """Compile the gradient of the loss: faster updates after some 15 seconds (a CPU needs a C++ compiler)."""
+ """Compile acting and the gradient of the loss, on a GPU into CUDA graphs (a CPU needs a C++ compiler)."""
@ FORMAT
- FORMAT = "ppo-discrete-1"
+ FORMAT = "ppo-atari-1"
@ BOUNDS
- "num_envs num_minibatches hidden_size num_threads eval_episodes update_epochs": (1, 1e6),
- "total_timesteps eval_max_steps": (1, 1e15),
- "num_steps": (2, 1e6),  # a rollout of one step may hold nothing but filler rows
- "gamma gae_lambda": (0, 1),
+ "num_envs num_minibatches eval_episodes update_epochs": (1, 1e6),
+ "num_threads": (0, 1e4),
+ "total_timesteps": (1, 1e15),
+ "num_steps": (8, 1e6),  # a rollout of a few steps may hold nothing but filler rows
+ "gamma gae_lambda sticky_actions": (0, 1),
@ check_args
- rows, clip = args.num_envs * args.num_steps, args.surrogate == "clip"
+ _, size = world()
+ rows, clip = args.num_envs // size * args.num_steps, args.surrogate == "clip"
- most = f"at most {rows // 2}, 2 of a rollout's {rows} rows for each"
- refuse(args.num_minibatches > rows / 2, f"--num-minibatches is {args.num_minibatches}; it must be {most}")
+ most = f"at most {rows // 8}, for 8 of the {rows} rows of a process each: some are fillers"
+ shares = f"--num-envs is {args.num_envs}, which {size} processes cannot share equally"
+ refuse(args.num_envs % size, f"{shares}; give a multiple of {size}")
+ refuse(args.num_minibatches > rows / 8, f"--num-minibatches is {args.num_minibatches}; it must be {most}")
+ refuse(not find_spec("ale_py"), "Atari games need: pip install ale-py")
+ gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
+ few = pick_device(args).type == "cuda" and here > gpus
+ refuse(few, f"{here} processes need a GPU each, and this machine has {gpus}; use --device cpu")
+ refuse(args.device == "mps" and size > 1, "--device mps is for one process; use --device cpu")
+ blind = args.adapt != "none" and args.update_epochs * args.num_minibatches == 1
+ refuse(blind, "--adapt needs several gradient steps an iteration: the KL is that before the last ones")
+ old = args.capture_video and not hasattr(gym.wrappers.vector, "RecordVideo")
+ refuse(old, "--capture-video needs: pip install 'gymnasium>=1.3'")
- unscaled = args.update_epochs > 1 and not (args.norm_adv or args.norm_rewards)
+ unscaled = args.update_epochs > 1 and not (args.norm_adv or args.clip_rewards)
- refuse(unscaled, f"several epochs need --norm-adv or --norm-rewards to bound their steps{override}")
+ refuse(unscaled, f"several epochs need --norm-adv or --clip-rewards to bound their steps{override}")
@ Agent
- """Actor, critic and the running statistics that they rely on: all that a saved policy needs."""
+ """The convolutional network of Mnih 2015, with two heads: actor and critic."""
@ Agent.noise
- exponential = torch.empty(*shape, self.num_actions, device=self.one_hot.device).exponential_()
- return -exponential.log()
+ return -torch.empty(*shape, self.num_actions, device=self.weights[0].device).exponential_().log()
@ Agent.act
- def act(self, obs: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
- """Raw observations [N, D] to actions [N] and the log policy [N, A] that they come from.
+ def act(self, obs: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
+ """Observations [N, 4, 84, 84] to actions [N], the log policy [N, A] they come from, and values [N].
- policy = self.policy(self.normalize(obs))
- return (policy if noise is None else policy + noise).argmax(-1), policy
+ policy, values = self(obs)
+ return (policy if noise is None else policy + noise).argmax(-1), policy, values
@ ppo_loss
- """The scalar loss to minimise (PPO paper, equation 9, negated) and the figures [6] named in `FIGURES`.
+ """The scalar loss to minimise (PPO paper, equation 9, negated) and the figures [7] named in `FIGURES`.
- `policy` [B, A] and `values` [B] are what the networks, as they are now, make of `batch.obs`.
+ `policy` [B, A] and `values` [B] are what the network, as it is now, makes of `batch.obs`. Both results
+ are this process's part of a sum over all processes.
- if args.norm_adv and len(advantages) > 1:
- advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
- loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies).mean()
+ loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies) @ batch.weights
- figures = (policy_losses, value_losses, entropies, -log_ratio, ratio - 1 - log_ratio, outside)
- return loss, torch.stack(figures).mean(1)
+ kl = kl_divergence(batch.policy, policy)
+ figures = (policy_losses, value_losses, entropies, -log_ratio, ratio - 1 - log_ratio, outside, kl)
+ return loss, torch.stack(figures) @ batch.weights
@ Rollout
- """T steps of N environments, on the CPU, allocated once. The next rollout starts from the last row.
+ """T steps of N environments, allocated once. The next rollout starts from the last row.
- obs [T+1, N, D]: obs[t+1] is the true successor of (obs[t], actions[t]), also where an episode ends.
- actions, rewards, terminated, truncated, valid [T, N]: valid is false in the filler rows, where Gymnasium
- ignores the action and starts an episode.
+ obs [T+1, N, 4, 84, 84], bytes: obs[t+1] is the true successor of (obs[t], actions[t]), also where an
+ episode ends. policy [T, N, A] and values [T+1, N] are the acting network's, on its device, as obs is.
+ actions, rewards, terminated, truncated, valid [T, N], on the CPU: valid is false in the filler rows, in
+ which a game is reset, or a button pressed for the agent.
@ critic
- """explained variance < 0 after a tenth: the critic misleads; use --norm-rewards or raise --vf-coef"""
+ """explained variance < 0 after a tenth: the critic misleads; use --clip-rewards or raise --vf-coef"""
@ mismatch
- """acting and learning policies differ by > 1e-4: off-policy data; try --device cpu, check `act`"""
- return figures["losses/policy_mismatch"] > 1e-4
+ """acting and learning policies differ by > 1e-4 (bfloat16: 0.1): off-policy data; try --device cpu"""
+ return figures["losses/policy_mismatch"] > (0.1 if args.bfloat16 else 1e-4)
@ plan
- fixed = "surrogate clip_coef kl_coef vf_coef clip_vloss gamma gae_lambda norm_adv norm_obs norm_rewards"
+ fixed = "surrogate clip_coef kl_coef vf_coef clip_vloss gamma gae_lambda norm_adv clip_rewards"
@ train
- Raises `Refused` before anything is written, and `TrainingFailed` when training cannot go on.
+ Of several processes, the first one speaks and writes. Raises `Refused` before anything is written, and
+ `TrainingFailed` when training cannot go on.
- torch.set_num_threads(args.num_threads)
+ (rank, size), device = world(), pick_device(args)
+ torch.set_num_threads(count_threads(args))
+ keep_memory()
- envs, one_hot = make_envs(args, args.num_envs)
- agent = Agent(args, one_hot, envs.single_action_space).to(pick_device(args))
- optimizer = Adam([flatten_parameters(agent)], args.learning_rate, eps=1e-5, fused=args.device != "mps")
+ envs = make_envs(args, args.num_envs // size)
+ agent = Agent(args, envs.single_action_space).to(device)
+ vector = flatten_parameters(agent)
+ optimizer = Adam([vector], args.learning_rate, eps=1e-5, fused=args.device != "mps")
- return {mode: evaluate(agent, args, mode, Path(args.evaluate).parent) for mode in modes}
+ folder = Path(args.evaluate).parent
+ return {} if rank else {mode: evaluate(agent, args, mode, folder) for mode in modes}
- print("\n".join(plan(args) if args.plan else plan(args)[:5]), flush=True)
+ if rank == 0:
+ print("\n".join(plan(args) if args.plan else plan(args)[:5]), flush=True)
+ if size > 1 and device.type == "cuda":
+ torch.cuda.set_device(device)
- rollout, figures = Rollout(args, len(one_hot)), dict[str, float]()
+ rollout, figures = Rollout(args, agent, envs.num_envs), dict[str, float]()
- folder, writer = open_run(args, state)
- path = folder / "checkpoint.pt"
- resume = shlex.join(["python", sys.argv[0], "--resume", str(path)])
- print(f"folder     {folder}", flush=True)
+ if size > 1:
+ # After Adam: what that imports would else keep the group, and gloo's threads with it, to the end. A
+ # thread that outlives Python may abort the process.
+ collective(dist.init_process_group, "nccl" if device.type == "cuda" else "gloo")
+ collective(dist.broadcast, vector.data, 0)  # machines may round the first weights otherwise
+ torch.manual_seed(env_seed + state.global_step + rank)  # random numbers are each process's own
+ if rank == 0:
+ folder, writer = open_run(args, state)
+ path = folder / "checkpoint.pt"
+ here = os.environ.get("LOCAL_WORLD_SIZE", str(size))
+ start = ["torchrun", "--nproc-per-node", here] if size > 1 else ["python"]
+ resume = shlex.join([*start, sys.argv[0], "--resume", str(path)])
+ print(f"folder     {folder}", flush=True)
+ learner = writer, agent, optimizer, state, args
+ stopped = False
- learner = writer, agent, optimizer, state, args
- save_checkpoint(path, *learner)
- rollout.obs[-1] = torch.as_tensor(attempt(envs.reset, seed=env_seed + state.global_step)[0])
- first_step, start, saved, shown = state.global_step, time.monotonic(), time.monotonic(), 0.0
- while state.global_step < args.total_timesteps and not caught:  # PPO paper, Algorithm 1
+ if rank == 0:
+ save_checkpoint(path, *learner)
+ seed = (env_seed + state.global_step) % 2**29 + rank * envs.num_envs  # the ALE wants less than 2**31
+ rollout.obs[-1] = torch.as_tensor(attempt(envs.reset, seed=seed)[0])
+ first_step, begun, saved, shown = state.global_step, time.monotonic(), time.monotonic(), 0.0
+ while state.global_step < args.total_timesteps and not stopped:  # PPO paper, Algorithm 1
- try:
- collect_rollout(envs, agent, rollout)
- except TrainingFailed:
- if caught:  # the signal may have hit the environments' processes, too: stop as intended
- break
- raise
+ collect_rollout(envs, agent, rollout, args)
- state.global_step += int(rollout.valid.sum())
+ sums = total(torch.tensor([int(rollout.valid.sum()), len(caught)], device=device)).tolist()
+ state.global_step, stopped = state.global_step + sums[0], sums[1] > 0
+ everywhere = [rollout.episodes] * size
+ if size > 1:
+ collective(dist.all_gather_object, everywhere, rollout.episodes)
+ rollout.episodes = [episode for episodes in everywhere for episode in episodes]
- figures["charts/SPS"] = (state.global_step - first_step) / (now - start)
+ figures["charts/SPS"] = (state.global_step - first_step) / (now - begun)
+ if rank > 0:
+ continue
- if not caught:
- envs.close()
+ if size > 1:
+ collective(dist.barrier)  # none leaves while another may still fail
- if path.exists():
+ if rank == 0 and path.exists():
- for process in getattr(envs.unwrapped, "processes", ()):  # they may hang or be dead: no use in asking
- process.terminate()
- envs.unwrapped.closed = True
+ if dist.is_initialized():
+ dist.destroy_process_group()
+ if rank > 0:
+ return {}
- if caught and state.global_step < args.total_timesteps:
- print(f"{signal.Signals(caught[0]).name} after step {state.global_step:,}. To go on: {resume}")
- raise SystemExit(128 + caught[0])
+ if stopped and state.global_step < args.total_timesteps:
+ number = caught[0] if caught else signal.SIGTERM  # it was another process that was told to stop
+ print(f"{signal.Signals(number).name} after step {state.global_step:,}. To go on: {resume}")
+ raise SystemExit(128 + number)
- print(f"watch      {resume.replace('--resume', '--evaluate')} --capture-video")
+ print(f"watch      {shlex.join(['python', sys.argv[0], '--evaluate', str(path)])} --capture-video")
@ main
- print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
+ # All processes of a machine refuse the same.
+ if isinstance(error, TrainingFailed) or os.environ.get("LOCAL_RANK", "0") == "0":
+ print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
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
    added, missing, own = (row[key].split(", ") for key in ("added", "missing", "own"))
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
    common = [name for name in copy if name in original and name not in row["own"].split(", ")]
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
    for script, row in COPIES.items():
        if script != "ppo_continuous.py" and name in f"{row['missing']}, {row['own']}".split(", "):
            continue
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
    for name in (*row["own"].split(", "), *lines_of(row)):
        assert list(complaints(script, original, copy | {name: original[name]}, row)) == [name]
    for name in row["added"].split(", "):
        assert name in complaints(script, original | {name: copy[name]}, copy, row)
        assert name in complaints(script, original, {n: copy[n] for n in copy if n != name}, row)
    for name in row["missing"].split(", "):
        assert name in complaints(script, original, copy | {name: original[name]}, row)
        assert name in complaints(script, {n: original[n] for n in original if n != name}, copy, row)
    for name, (line, *_) in lines_of(row).items():
        fewer = row | {"lines": row["lines"].replace(f"@ {name}\n{line}\n", f"@ {name}\n")}
        assert list(complaints(script, original, copy, fewer)) == [name]
