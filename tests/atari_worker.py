"""A process of a test in test_atari.py, which torchrun may start: `python atari_worker.py <folder>`."""

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from helpers import ATARI, weights  # noqa: E402
from test_atari import make_agent, make_args, make_rollout  # noqa: E402

import ppo_atari as ppo  # noqa: E402


def learn(**changes):
    """An iteration on this process's share of a rollout: weights, metrics, and the number of steps."""
    # One minibatch per epoch: what is in it does not depend on the number of processes.
    args = make_args(num_minibatches=1, learning_rate=1e-5, norm_adv=False, **changes)
    whole = make_rollout(args, make_agent(args), seed=4, chance=0.3)
    whole.valid[:, 2:] = whole.valid[:, :2]  # as many transitions in each half
    rollout, share = ppo.Rollout(args, 5), args.num_envs // processes
    for name in ("obs", "policies", "values", "actions", "rewards", "terminated", "truncated", "valid"):
        setattr(rollout, name, getattr(whole, name)[:, rank * share : (rank + 1) * share])
    agent = make_agent(args, seed=rank)  # other weights than the first process's, until they are connected
    learner = DistributedDataParallel(agent) if processes > 1 else agent
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    metrics = ppo.update(learner, optimizer, ppo.make_batch(rollout, args), args, ATARI.make_state(args))
    return weights(agent), metrics, int(optimizer.state[agent.actor.weight]["step"])


torch.set_num_threads(1)
torch.optim.Adam([torch.zeros(1)])  # before `connect`, as in `train`
rank, processes = ppo.connect(make_args())
results = [learn(update_epochs=2)]
results.append(learn(update_epochs=4, target_kl=1.0001 * results[0][1]["kl"]))
torch.save(results, Path(sys.argv[1], f"{processes}-{rank}.pt"))
if processes > 1:
    dist.destroy_process_group()
