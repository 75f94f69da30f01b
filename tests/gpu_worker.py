"""A test in test_gpu.py starts this program, alone or by torchrun: `python gpu_worker.py <folder>`."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import gpu_envs  # noqa: E402
from helpers import weights  # noqa: E402
from test_gpu import make_agent, make_args, random_rollout  # noqa: E402

import ppo_gpu as ppo  # noqa: E402


def share(columns, axis):
    """Return this process's part of each column."""
    return [column.tensor_split(ppo.PROCESSES, axis)[ppo.RANK].contiguous() for column in columns]


torch.set_num_threads(1)
os.chdir(sys.argv[1])
torch.optim.Adam([torch.zeros(1)])  # before connecting, as in `train`
if ppo.PROCESSES > 1:
    dist.init_process_group("gloo")
kept = {}

moments = ppo.RunningMoments(3)
for part in torch.from_numpy(1000 + 0.1 * np.random.default_rng(0).normal(size=(2, 600, 3))).float():
    moments.update(share([part], 0)[0])
kept["moments"] = moments.mean, moments.var, moments.count

# One minibatch per epoch: what is in it does not depend on the number of processes.
args = make_args(num_minibatches=1, learning_rate=1e-3)
agent = make_agent(args) if ppo.PROCESSES == 1 else ppo.Agent(args, 4, 3, 2)
if ppo.PROCESSES > 1:
    agent.load_state_dict(torch.load("agent.pt"))
else:
    torch.save(agent.state_dict(), "agent.pt")
rollout = random_rollout(args, agent, 4)
rollout = ppo.Rollout(*share(rollout, 1))
batch = ppo.make_batch(agent, rollout, *ppo.normalize_rollout(agent, rollout, args), args)
optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(args.learning_rate), eps=1e-5, fused=True)
orders = torch.arange(len(batch.obs)).expand(args.update_epochs, -1)
messages, all_reduce = [], dist.all_reduce
dist.all_reduce = lambda x: messages.append(x.numel()) or all_reduce(x)
metrics = ppo.update(agent, optimizer, ppo.compute_gradients, batch, orders, args)
dist.all_reduce = all_reduce
kept["metrics"] = {name: x.item() for name, x in metrics.items()}
kept["weights"], kept["messages"] = weights(agent), messages

if ppo.PROCESSES > 1:
    make_batch = ppo.make_batch

    def watched(agent, rollout, *given):
        kept["trained"] = agent.state_dict()  # in place: the last weights
        kept["obs"] = rollout.obs.clone()
        return make_batch(agent, rollout, *given)

    ppo.make_batch = watched
# One process trains to 1,024 steps, at the end of a curriculum; two go on from there.
args = make_args(total_timesteps=1024, env_id="gpu_envs:Curriculum")
envs, eval_envs = gpu_envs.Curriculum(args), gpu_envs.Curriculum(args)
if ppo.PROCESSES > 1:
    args.resume = str(next(Path("runs").iterdir()))
    args.eval_every, args.stop_at, args.total_timesteps = 1.0, 12.0, 1e6
    evaluations = []

    def evaluate(path, args, envs):
        """Return the number of this evaluation. The first process alone evaluates."""
        evaluations.append(path)
        return np.array([float(len(evaluations))])

    ppo.evaluate = evaluate
ppo.train(replace(args), envs, eval_envs)
kept["level"] = envs.level
torch.save(kept, f"{ppo.PROCESSES}-{ppo.RANK}.pt")
