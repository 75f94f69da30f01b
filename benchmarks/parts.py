"""Do three special parts help `ppo_continuous.py`? Makes the table of the study from `parts.csv`.

    python benchmarks/parts.py

A score is (greedy return - r) / (best published - r), where r is the mean return of uniformly random actions.
The interquartile mean leaves out the lowest and the highest quarter of all scores of all environments, and
its 95% interval is the bootstrap's, both by rliable (Agarwal et al. 2021, "Deep Reinforcement Learning at the
Edge of the Statistical Precipice"). P is the probability that a seed is better than one of the first setting.
Both are of the seeds that all environments have. The mean returns with standard deviations are of all seeds.
"""

from __future__ import annotations

from functools import cache

import gymnasium as gym
import pandas as pd
from experiments import HERE, PUBLISHED
from report import interval, markdown, probability_of_improvement, spread
from rliable.metrics import aggregate_iqm


@cache
def random_return(env_id: str) -> float:
    """Mean return of 100 episodes of uniformly random actions."""
    env, total = gym.make(env_id), 0.0
    env.action_space.seed(1)
    for episode in range(100):
        env.reset(seed=episode)
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            over = terminated or truncated
    return total / 100


def score(env_id: str, greedy: float) -> float:
    """0 for random actions, 1 for the best published return."""
    low = random_return(env_id)
    return (greedy - low) / (PUBLISHED[env_id][0] - low)


def main() -> None:
    """Print the table."""
    table = pd.read_csv(HERE / "parts.csv")
    table["score"] = [score(*pair) for pair in zip(table.env_id, table.greedy, strict=True)]
    env_ids = sorted(set(table.env_id))
    rows: list[dict[str, str]] = []
    for setting, found in table.groupby("setting", sort=False):
        by_seed = found.pivot_table(index="seed", columns="env_id", values="score")
        scores = by_seed.reindex(columns=env_ids).dropna().to_numpy()
        if not len(scores):
            continue  # no seed has all environments
        row = {"setting": str(setting), "seeds": str(len(scores))}
        row["interquartile mean"] = "**{:.2f}** [{:.2f}, {:.2f}]".format(*interval(aggregate_iqm, scores))
        if not rows:
            first = scores
        better = interval(probability_of_improvement, scores, first)
        row["P"] = "{:.2f} [{:.2f}, {:.2f}]".format(*better) if rows else ""
        rows.append(row)
    print(markdown(rows))
    returns = table.pivot_table("greedy", "env_id", "setting", spread, sort=False)
    returns["random"] = [f"{random_return(str(env_id)):.1f}" for env_id in returns.index]
    print(returns.to_string(na_rep=""))


if __name__ == "__main__":
    main()
