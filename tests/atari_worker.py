"""A process of `test_two_processes_learn_like_one`: updates on its share of one and the same rollout."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from test_atari import make_agent, make_args, make_rollout, make_state  # noqa: E402

import ppo_atari as ppo  # noqa: E402

rank, size = ppo.world()
torch.set_num_threads(1)
args = make_args(num_minibatches=2, update_epochs=3, max_grad_norm=0.5, learning_rate=1e-3)
agent = make_agent(args)
vector = ppo.flatten_parameters(agent)
before = vector.detach().clone()
optimizer = torch.optim.Adam([vector], 1e-3, eps=1e-5)
if size > 1:
    dist.init_process_group("gloo")  # after Adam, as in the script, which says why
whole = make_rollout(args, agent, seed=4, chance=0.3)
share = slice(rank * args.num_envs // size, (rank + 1) * args.num_envs // size)
rollout = ppo.Rollout(args, agent, args.num_envs // size)
for name in ("obs", "policy", "values", "actions", "rewards", "terminated", "truncated", "valid"):
    getattr(rollout, name).copy_(getattr(whole, name)[:, share])
counts = whole.valid.sum(0)
assert counts[:2].sum() != counts[2:].sum()  # unequal shares, or weights would not matter

_, weights = ppo.deal(rollout.valid.flatten().nonzero().squeeze(-1), 2, rollout.valid.numel() // 2)
of_all = ppo.total((weights > 0).sum(1, keepdim=True))  # rows of each minibatch, in all processes
torch.testing.assert_close(weights, (weights > 0) / of_all)


def deal(rows, parts, size):
    """Even steps to one minibatch, odd ones to the other, in one process and in two."""
    order, filled = torch.zeros(2, parts, size)
    for part in range(parts):
        own = rows[rows // rollout.valid.shape[1] % parts == part]
        order[part, : len(own)], filled[part, : len(own)] = own.float(), 1
    return order.long(), filled / ppo.total(filled.sum(1, keepdim=True))


ppo.deal = deal
figures = ppo.update(agent, optimizer, rollout, make_state(args), args)
if rank == 0:
    torch.save({"before": before, "weights": vector.detach(), "figures": figures}, sys.argv[1])
if size > 1:
    dist.destroy_process_group()
    if sys.platform == "linux":
        threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        assert not [name for name in threads if "gloo" in name], threads  # one that outlives Python aborts it
