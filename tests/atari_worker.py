"""A process of the tests of torchrun, in test_atari.py: `python atari_worker.py <what> <folder>`."""

import contextlib
import copy
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_atari import make_agent, make_args, make_rollout, make_state  # noqa: E402

import ppo_atari as ppo  # noqa: E402

RANK, PROCESSES = ppo.world()
torch.set_num_threads(1)


def learn(agent, optimizer, whole, args):
    """An iteration on this process's share of a rollout: metrics, weights, and the KL after each step."""
    rollout, share = ppo.Rollout(args, agent), args.num_envs // PROCESSES
    for name in ("obs", "policies", "values", "actions", "rewards", "terminated", "truncated", "valid"):
        getattr(rollout, name)[:] = getattr(whole, name)[:, RANK * share : (RANK + 1) * share]
    batch, metrics = ppo.make_batch(agent, rollout, args)
    kls, kls_here = [], []

    def step(minibatch):
        metrics = ppo.gradient_step(agent, optimizer, args, make_state(args), minibatch)
        kls.append(ppo.distance_moved(agent, minibatch))
        with torch.no_grad():
            kl = ppo.kl_divergence(minibatch.old_policy, agent(minibatch.obs)[0])
        kls_here.append((kl @ minibatch.weights / minibatch.weights.sum()).item())
        return metrics

    metrics |= ppo.update(agent, step, batch, args)
    weights = torch.cat([parameter.detach().flatten() for parameter in agent.parameters()])
    return {"metrics": metrics, "weights": weights, "kls": kls, "kls_here": kls_here}


def share_of_an_update():
    """One minibatch per epoch: what is in it does not depend on the number of processes."""
    args = make_args(num_minibatches=1, update_epochs=4, learning_rate=1e-4)
    whole = make_rollout(args, make_agent(args), seed=4, chance=0.3)
    counts = whole.valid.sum(0)
    assert counts[:2].sum() != counts[2:].sum()  # unequal shares
    agent = make_agent(args, seed=RANK)  # other weights than the first process's, until they are connected
    agent.unused = torch.nn.Linear(2, 2)  # its gradient is None
    another = copy.deepcopy(agent)
    optimizers = [torch.optim.Adam(each.parameters(), eps=1e-5) for each in (agent, another)]
    torch.manual_seed(0)
    with ppo.connect(args, agent, seed=RANK):
        another.load_state_dict(agent.state_dict())
        noise = ppo.gumbel_noise(4)
        results = learn(agent, optimizers[0], whole, args)
        # All together reach this after three epochs; of two processes, one would reach it after two.
        target = ppo.replace(args, target_kl=1.0001 * results["kls"][1])
        return {**results, "noise": noise, "stopped": learn(another, optimizers[1], whole, target)}


def seeds_of_games():
    """Train, resume and evaluate. Returns the number of games and the seed of each reset."""
    resets, make_envs = [], ppo.make_envs

    def recorded(*args, **kwargs):
        envs = make_envs(*args, **kwargs)
        reset = envs.reset

        def call(seed):
            resets.append((envs.num_envs, seed))
            return reset(seed=seed)

        envs.reset = call
        return envs

    ppo.make_envs = recorded
    args = make_args(env_id="Pong", total_timesteps=32, eval_episodes=2, eval_max_steps=2)
    results = ppo.train(args)
    if PROCESSES == 1:
        ppo.train(ppo.replace(args, resume=results["checkpoint"], total_timesteps=64))
    return resets


if __name__ == "__main__":
    folder = Path(sys.argv[2], f"{PROCESSES}-{RANK}")
    folder.mkdir()
    os.chdir(folder)
    results = globals()[sys.argv[1]]()
    torch.save(results, folder / "results.pt")
    if sys.platform == "linux":
        threads = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread may end meanwhile
                threads.append(task.joinpath("comm").read_text().strip())
        assert not [name for name in threads if "gloo" in name], threads  # one that outlives Python aborts it
