"""A process of a test in test_atari.py, which torchrun may start: `python atari_worker.py <folder>`."""

import os
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from helpers import ATARI, weights  # noqa: E402
from test_atari import Scripted, make_agent, make_args, make_rollout, make_scripted  # noqa: E402

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
    agent = make_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    metrics = ppo.update(agent, optimizer, ppo.make_batch(rollout, args), args, ATARI.make_state(args))
    return weights(agent), metrics, int(optimizer.state[agent.actor.weight]["step"])


def keep(optimizer, *_):
    """Keep the weights after a gradient step."""
    kept["weights"] = torch.cat([x.detach().flatten() for x in optimizer.param_groups[0]["params"]])


torch.set_num_threads(1)
os.chdir(sys.argv[1])
torch.optim.Adam([torch.zeros(1)])  # before `connect`, as in `train`
rank, processes = ppo.connect(make_args())
learnt = [learn(update_epochs=2)]
learnt.append(learn(update_epochs=4, target_kl=1.0001 * learnt[0][1]["kl"]))
kept = {"learnt": learnt}
ppo.make_envs, ppo.connect = make_scripted, lambda args: (rank, processes)  # which can connect only once
register_optimizer_step_post_hook(keep)
ppo.train(make_args(num_envs=2, total_timesteps=40, update_epochs=1, eval_episodes=2))
kept["seed"], kept["actions"] = Scripted.resets[0]
torch.save(kept, f"{processes}-{rank}.pt")
