"""What the environments do arrives in the rollout, in the evaluation and in the errors, row by row."""

import functools
import random
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import scripted_envs
import torch
from gymnasium import spaces
from scripted_envs import BAD_KEY, FIRST_ACTION, blank
from torch import nn

import ppo

KEY, ENVS, STEPS, ROLLOUTS = 10, 4, 5, 12
VECTORISATIONS = {
    "native": {"env_id": "scripted_envs:ScriptedNative-v0"},
    "sync": {"env_id": "scripted_envs:Scripted-v0"},
    "async": {"env_id": "scripted_envs:Scripted-v0", "async_envs": True},
}


def make_args(**settings):
    """Small settings of the scripted environment."""
    small = {"env_id": VECTORISATIONS["sync"]["env_id"], "num_envs": ENVS, "num_steps": STEPS}
    return ppo.Args(**{**small, "hidden_size": 8, "eval_episodes": ENVS, "device": "cpu", **settings})


def make_agent(args, envs, one_hot):
    """An agent whose policy is neither uniform nor sure, and depends on the normalised observation."""
    torch.manual_seed(3)
    agent = ppo.Agent(args, one_hot, envs.single_action_space)
    nn.init.normal_(agent.actor[-1].weight, std=0.7)
    agent.obs_moments.mean.copy_(torch.linspace(11, 3, len(one_hot)))
    agent.obs_moments.var.copy_(torch.linspace(1, 9, len(one_hot)))
    return agent


def begin(args, seed=KEY):
    """Environments just reset, an agent and an empty rollout."""
    envs, one_hot = ppo.make_envs(args, args.num_envs)
    agent, rollout = make_agent(args, envs, one_hot), ppo.Rollout(args, len(one_hot))
    rollout.obs[-1] = torch.as_tensor(envs.reset(seed=seed)[0])
    return envs, agent, rollout


@functools.cache
def collected(vectorisation):
    """Copies of several consecutive rollouts of the script."""
    envs, agent, rollout = begin(make_args(**VECTORISATIONS[vectorisation]))
    names, copies = ("obs", "actions", "rewards", "terminated", "truncated", "valid", "acting_policy"), []
    for _ in range(ROLLOUTS):
        ppo.collect_rollout(envs, agent, rollout)
        rows = {name: getattr(rollout, name).clone() for name in names}
        copies.append(SimpleNamespace(**rows, episodes=list(rollout.episodes)))
    envs.close()
    return copies, type(envs.unwrapped), agent


def replay(key, actions):
    """By hand, what one environment does with these actions: rows, and (row, return, length) of episodes."""
    rows, episodes = [], []
    episode, step, total, last, ended = 0, 0, 0.0, -1, False
    for row, action in enumerate(actions):
        obs = scripted_envs.observation(key, episode, step, last)
        if ended:  # filler
            rows.append((obs, 0.0, False, False, False))
            episode, step, total, last, ended = episode + 1, 0, 0.0, -1, False
            continue
        last = int(action) + FIRST_ACTION
        value = scripted_envs.reward(key, episode, step, last)
        step, total = step + 1, total + value
        ended = step == scripted_envs.length(key, episode)
        terminated, truncated = scripted_envs.ending(key, episode) if ended else (False, False)
        rows.append((obs, value, terminated, truncated, True))
        if ended:
            episodes.append((row, total, step))
    return rows, episodes, scripted_envs.observation(key, episode, step, last)


@pytest.fixture(scope="module", params=VECTORISATIONS)
def script(request):
    """The rollouts of each vectorisation, joined along time, and what they must be."""
    copies, kind, _ = collected(request.param)
    assert kind.__name__ == {"native": "ScriptedVector"}.get(
        request.param, f"{request.param.title()}VectorEnv"
    )
    names = ("actions", "rewards", "terminated", "truncated", "valid")
    joined = SimpleNamespace(**{name: torch.cat([getattr(c, name) for c in copies]) for name in names})
    played = [replay(KEY + n, joined.actions[:, n].tolist()) for n in range(ENVS)]
    return copies, joined, played


# The rollout


def test_script_has_every_kind_of_end():
    """The script is not vacuous: all three ends occur, also in last rows, and there are lengths of 1."""
    copies, _, _ = collected("native")
    for select in (lambda flags: flags[:-1], lambda flags: flags[-1:]):
        ends = [torch.stack([select(c.terminated), select(c.truncated)], -1).flatten(0, 1) for c in copies]
        assert {(True, False), (False, True), (True, True)} <= {
            tuple(row) for row in torch.cat(ends).tolist()
        }
    assert 1 in {length for copy in copies for _, length in copy.episodes}
    assert len({int(a) for copy in copies for a in copy.actions.flatten()}) == 3


def test_rewards_and_flags(script):
    """Rewards, terminated, truncated and valid are the script's, across rollout borders too."""
    _, joined, played = script
    for n, (rows, _, _) in enumerate(played):
        _, rewards, terminated, truncated, valid = zip(*rows, strict=True)
        assert joined.rewards[:, n].tolist() == list(rewards)
        assert joined.terminated[:, n].tolist() == list(terminated)
        assert joined.truncated[:, n].tolist() == list(truncated)
        assert joined.valid[:, n].tolist() == list(valid)


def test_observations(script):
    """obs[t] is what was acted on and obs[t+1] its true successor, with the action that was stored."""
    copies, _, played = script
    for n, (rows, _, last) in enumerate(played):
        expected = np.stack([row[0] for row in rows] + [last])
        for i, copy in enumerate(copies):
            assert np.array_equal(copy.obs[:, n].numpy(), expected[i * STEPS : (i + 1) * STEPS + 1])


def test_filler_rows(script):
    """Exactly the rows after an end are filler, also in a next rollout's first row; none after `reset`."""
    copies, joined, _ = script
    ended = joined.terminated | joined.truncated
    assert torch.equal(joined.valid[1:], ~ended[:-1])
    assert copies[0].valid[0].all()
    assert not all(copy.valid[0].all() for copy in copies[1:])


def test_step_count(script):
    """The valid rows are as many as the transitions that the environments made."""
    _, joined, played = script
    finished = sum(length for _, episodes, _ in played for _, _, length in episodes)
    rows_since = [len(rows) - 1 - max(row for row, *_ in episodes) for rows, episodes, _ in played]
    under_way = sum(max(rows - 1, 0) for rows in rows_since)  # one of the rows since the last end is filler
    assert joined.valid.sum() == finished + under_way


def test_episodes(script):
    """Each rollout lists the episodes that ended in it: none is lost or counted twice at a border."""
    copies, _, played = script
    ends = [(row, n, total, steps) for n, (_, es, _) in enumerate(played) for row, total, steps in es]
    for i, copy in enumerate(copies):
        within = sorted(end for end in ends if i * STEPS <= end[0] < (i + 1) * STEPS)
        assert copy.episodes == [(total, steps) for _, _, total, steps in within]


def test_environment_with_statistics_of_its_own():
    """An environment that is registered with Gymnasium's `RecordEpisodeStatistics` trains like any other.

    Its native vector version would leave the wrapper out, and gives way.
    """
    wrapper = gym.wrappers.RecordEpisodeStatistics.wrapper_spec()
    native = {"entry_point": scripted_envs.Scripted, "vector_entry_point": scripted_envs.ScriptedVector}
    gym.register("Counted-v0", **native, additional_wrappers=(wrapper,))
    envs, agent, rollout = begin(make_args(env_id="Counted-v0"))
    assert isinstance(envs.unwrapped, gym.vector.SyncVectorEnv)
    ppo.collect_rollout(envs, agent, rollout)
    envs.close()
    assert rollout.episodes == collected("sync")[0][0].episodes


def test_vectorisations_agree():
    """Native, sync and async vectorisation give the same rollouts."""
    for native, sync, workers in zip(*(collected(kind)[0] for kind in VECTORISATIONS), strict=True):
        for name, values in vars(native).items():
            for other in (sync, workers):
                same = values == getattr(other, name)
                assert same if name == "episodes" else same.all(), name


def test_acting_policy(script):
    """The policy kept for comparison is the one that the last step's actions came from."""
    copies, _, _ = script
    agent = collected("native")[2]
    for copy in copies:
        policies = agent.policy(agent.normalize(copy.obs))
        torch.testing.assert_close(copy.acting_policy, policies[-2])
        assert not torch.allclose(policies[-2], policies[-1], atol=1e-3)
        assert not torch.allclose(policies[-2], policies[-3], atol=1e-3)


def test_actions_come_from_the_policy_of_their_row():
    """Each row's action is the likeliest after the row's own noise, under the normalised observation."""
    envs, agent, rollout = begin(make_args())
    drawn, noise = [], agent.noise
    agent.noise = lambda *shape: drawn.append(noise(*shape)) or drawn[-1]
    ppo.collect_rollout(envs, agent, rollout)
    envs.close()
    moments = agent.obs_moments
    seen = ((rollout.obs[:-1] - moments.mean) / (moments.var + 1e-8).sqrt()).clamp(-10, 10)
    hidden = seen
    for layer in list(agent.actor)[:-1]:
        hidden = torch.tanh(hidden @ layer.weight.T + layer.bias)
    scores = torch.log_softmax(hidden @ agent.actor[-1].weight.T + agent.actor[-1].bias, -1)
    both = scores + torch.cat(drawn).reshape(scores.shape)
    assert torch.equal(rollout.actions, both.argmax(-1))
    assert not torch.equal(rollout.actions, scores.argmax(-1))


def test_act_samples_from_the_policy():
    """With noise, actions are as frequent as π says; without, all are the likeliest; π is a log-softmax."""
    args = make_args(norm_obs=False)
    agent = ppo.Agent(args, np.zeros(4, dtype=bool), spaces.Discrete(3))
    probabilities = torch.tensor([0.25, 0.6, 0.15])
    for parameter in agent.actor[-1].parameters():
        nn.init.zeros_(parameter)
    agent.actor[-1].bias.data = probabilities.log() + 7  # logits need not be normalised
    torch.manual_seed(0)
    rows = 40_000
    action, policy = agent.act(torch.randn(rows, 4), agent.noise(rows))
    torch.testing.assert_close(policy.exp(), probabilities.expand(rows, 3))
    frequencies = torch.bincount(action, minlength=3) / rows
    assert (frequencies - probabilities).abs().max() < 4 * 0.5 / rows**0.5
    pairs = torch.bincount(3 * action[:-1] + action[1:], minlength=9) / (rows - 1)  # rows are independent
    assert (pairs - torch.outer(probabilities, probabilities).flatten()).abs().max() < 0.01
    greedy, same = agent.act(torch.randn(rows, 4))
    assert (greedy == 1).all()
    assert torch.equal(same, policy)


def test_same_seed_same_rollout():
    """The same seed gives the same rollouts, another seed others."""

    def run(seed):
        args = ppo.Args(num_envs=4, num_steps=40, hidden_size=8, seed=seed)
        env_seed = ppo.seed_everything(seed)
        envs, one_hot = ppo.make_envs(args, args.num_envs)
        agent, rollout = ppo.Agent(args, one_hot, envs.single_action_space), ppo.Rollout(args, len(one_hot))
        rollout.obs[-1] = torch.as_tensor(envs.reset(seed=env_seed)[0])
        for _ in range(2):
            ppo.collect_rollout(envs, agent, rollout)
        return rollout

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first.obs, again.obs)
    assert torch.equal(first.actions, again.actions)
    assert torch.equal(first.acting_policy, again.acting_policy)
    assert not torch.equal(first.obs[0], other.obs[0])
    assert not torch.equal(first.actions, other.actions)


# Seeds


def test_environment_seeds_do_not_overlap():
    """No two of the first seeds share an environment's seed, though Gymnasium counts up from each."""
    seeds = sorted(ppo.seed_everything(seed) for seed in range(50))
    assert min(np.diff(seeds)) > 1000
    assert seeds[0] >= 0
    assert seeds[-1] < 2**31  # the evaluation's lie above
    assert [ppo.seed_everything(7)] * 2 == [ppo.seed_everything(7), ppo.seed_everything(7)]


def test_every_generator_is_seeded():
    """PyTorch, NumPy and Python draw the same after the same seed, and different ones after another."""

    def draw(seed):
        ppo.seed_everything(seed)
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    assert draw(4) == draw(4)
    assert not set(draw(4)) & set(draw(5))


def test_seeds_of_a_run(tmp_path, monkeypatch, capsys):
    """Training resets environment i with its seed + i, once, and evaluation has seeds of its own."""
    monkeypatch.chdir(tmp_path)
    scripted_envs.SEEDS.clear()
    ppo.train(make_args(seed=1, total_timesteps=60, num_minibatches=2))
    seeds, first = [seed for seed in scripted_envs.SEEDS if seed is not None], ppo.seed_everything(1)
    assert seeds[:ENVS] == [first + i for i in range(ENVS)]
    greedy, stochastic = seeds[ENVS : 2 * ENVS], seeds[2 * ENVS :]
    assert greedy == stochastic == list(range(greedy[0], greedy[0] + ENVS))
    assert greedy[0] >= 2**31
    assert "greedy" in capsys.readouterr().out


# Spaces

BOX = spaces.Box(0.1, 0.9, (3,))
SPACES = {
    "box": BOX,
    "box of rank 2": spaces.Box(2.0, 50.0, (2, 3)),
    "integer box": spaces.Box(2, 250, (4,), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from 3": spaces.Discrete(4, start=3),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary of rank 2": spaces.MultiBinary((2, 3)),
    "multi-discrete": spaces.MultiDiscrete([2, 4, 3]),
    "tuple": spaces.Tuple((spaces.Discrete(3), BOX, spaces.MultiBinary(2), BOX)),
    "dict": spaces.Dict({"z": spaces.Discrete(3), "a": BOX, "m": spaces.MultiDiscrete([2, 2])}),
    "nested": spaces.Dict(
        {
            "y": spaces.Tuple((BOX, spaces.Dict({"q": spaces.Discrete(2), "b": BOX}))),
            "x": spaces.MultiBinary(3),
            "c": BOX,
        }
    ),
}


def flat_samples(space, number=200):
    """[number, D]: samples of a space as Gymnasium flattens them."""
    space.seed(0)
    return np.stack([spaces.flatten(space, space.sample()) for _ in range(number)])


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_one_hot_mask(space):
    """True exactly for the entries that are always 0 or 1, in the order that Gymnasium flattens to."""
    mask, samples = ppo.one_hot_mask(space), flat_samples(space)
    assert mask.shape == (spaces.flatdim(space),) == samples.shape[1:]
    assert mask.dtype == bool
    assert np.array_equal(mask, np.isin(samples, (0, 1)).all(0))


@pytest.mark.parametrize(
    "space", [spaces.Text(4), spaces.OneOf((spaces.Discrete(3), BOX))], ids=["text", "one of"]
)
def test_one_hot_mask_leaves_out_quantities(space):
    """An entry that takes other values than 0 and 1 is a quantity, to be normalised."""
    assert np.isin(flat_samples(space)[:, ppo.one_hot_mask(space)], (0, 1)).all()


@pytest.mark.parametrize(
    ("env_id", "size", "ones"), [("FrozenLake-v1", 16, 1), ("Taxi-v4", 500, 1), ("Blackjack-v1", 45, 3)]
)
def test_discrete_observations_are_one_hot(env_id, size, ones):
    """Discrete and tuple observations arrive as one-hot vectors, and normalisation leaves them alone."""
    envs, agent, rollout = begin(make_args(env_id=env_id))
    ppo.collect_rollout(envs, agent, rollout)
    envs.close()
    assert rollout.obs.shape == (STEPS + 1, ENVS, size)
    assert agent.one_hot.tolist() == [True] * size
    assert ((rollout.obs == 0) | (rollout.obs == 1)).all()
    assert (rollout.obs.sum(-1) == ones).all()
    assert torch.equal(agent.normalize(rollout.obs), rollout.obs)


def test_nested_observations_arrive_flat():
    """A nested dictionary of boxes and categories is flattened, and only its boxes are normalised."""
    env_id = blank("Nested-v0", SPACES["nested"])
    envs, agent, rollout = begin(make_args(env_id=env_id))
    ppo.collect_rollout(envs, agent, rollout)
    envs.close()
    binary = ((rollout.obs == 0) | (rollout.obs == 1)).all(0).all(0)
    assert torch.equal(binary, agent.one_hot)
    changed = (agent.normalize(rollout.obs) != rollout.obs).any(0).any(0)
    assert torch.equal(changed, ~agent.one_hot)


def test_native_version_only_for_flat_boxes():
    """A native vector version gives way to `FlattenObservation` where observations are not flat yet."""
    native = {"vector_entry_point": scripted_envs.ScriptedVector}
    env_id = blank("NativeDiscrete-v0", spaces.Discrete(6), **native)
    envs, agent, rollout = begin(make_args(env_id=env_id))
    assert isinstance(envs.unwrapped, gym.vector.SyncVectorEnv)
    assert rollout.obs.shape[-1] == len(agent.one_hot) == 6
    envs.close()


def test_async_envs_takes_precedence_over_native():
    """--async-envs gives worker processes where a native version exists, too."""
    args = make_args(env_id="scripted_envs:ScriptedNative-v0", async_envs=True, num_envs=1)
    envs, _ = ppo.make_envs(args, 1)
    envs.close()
    assert isinstance(envs.unwrapped, gym.vector.AsyncVectorEnv)


@pytest.mark.parametrize("env_id", ["CartPole-v1", *(args["env_id"] for args in VECTORISATIONS.values())])
def test_make_envs_makes_as_many_as_asked(env_id):
    """There are as many as the argument, not --num-envs, says; the one made for its spaces is closed."""
    before = scripted_envs.OPEN[0]
    envs, one_hot = ppo.make_envs(make_args(env_id=env_id, num_envs=2), 3)
    assert envs.num_envs == 3
    assert envs.render_mode is None  # training draws no pictures
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP
    assert one_hot.tolist() == [False] * 4
    envs.close()
    assert scripted_envs.OPEN[0] == before


# What cannot be trained on

RANK_1_BYTES = spaces.Box(0, 255, (128,), np.uint8)
REFUSED_SPACES = {
    "continuous actions": (BOX, spaces.Box(-1, 1, (2,)), ["Box", "not Discrete", "ppo_continuous.py"]),
    "multi-discrete actions": (BOX, spaces.MultiDiscrete([2, 3]), ["MultiDiscrete([2 3])", "not Discrete"]),
    "tuple actions": (BOX, spaces.Tuple((spaces.Discrete(2),)), ["Tuple", "not Discrete"]),
    "colour images": (
        spaces.Box(0, 255, (96, 64, 3), np.uint8),
        spaces.Discrete(2),
        ["(96, 64, 3)", "ppo_atari"],
    ),
    "grey images": (spaces.Box(0, 255, (84, 84), np.uint8), spaces.Discrete(2), ["(84, 84)", "ppo_atari.py"]),
    "float images": (spaces.Box(0, 1, (3, 84, 84)), spaces.Discrete(2), ["(3, 84, 84)", "ppo_atari.py"]),
    "sequences": (spaces.Sequence(BOX), spaces.Discrete(2), ["Sequence", "do not flatten"]),
    "graphs": (spaces.Graph(BOX, None), spaces.Discrete(2), ["Graph", "do not flatten"]),
    "nested sequences": (spaces.Dict({"s": spaces.Sequence(BOX)}), spaces.Discrete(2), ["do not flatten"]),
}


def refusal(**settings):
    """The one line that `make_envs` refuses these settings with."""
    args = make_args(**settings)
    with pytest.raises(ppo.Refused) as caught:
        ppo.make_envs(args, args.num_envs)
    message = str(caught.value)
    assert message.startswith(f"cannot train on {args.env_id}: ")
    assert "\n" not in message
    assert "  " not in message
    return message


@pytest.mark.parametrize("name", REFUSED_SPACES)
def test_spaces_that_are_refused(name):
    """Spaces that this script cannot train on are refused, naming them and the script that can."""
    obs, action, words = REFUSED_SPACES[name]
    env_id = blank(f"Refused-{name.replace(' ', '-')}-v0", obs, action)
    message = refusal(env_id=env_id)
    assert all(word in message for word in words), message
    assert ("ppo_continuous.py" in message) == (name == "continuous actions")
    assert ("ppo_atari.py" in message) == ("images" in name)


@pytest.mark.parametrize(
    "space", [RANK_1_BYTES, spaces.Box(0, 1, (5, 4)), spaces.MultiBinary((2, 3))], ids=str
)
def test_spaces_that_are_not_images(space):
    """Bytes in a row and tables of numbers are no images: they are flattened."""
    env_id = blank(f"Flat-{len(space.shape)}-{np.dtype(space.dtype)}-v0", space)
    envs, one_hot = ppo.make_envs(make_args(env_id=env_id), 2)
    assert envs.reset(seed=1)[0].shape == (2, len(one_hot)) == (2, np.prod(space.shape))
    envs.close()


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("NoSuchEnvironment-v0", ["Environment `NoSuchEnvironment` doesn't exist"]),  # Gymnasium's words
        ("CartPole-v99", ["`v99`", "CartPole"]),
        ("no_such_module:Env-v0", ["No module named 'no_such_module'"]),
        ("scripted_envs:NoSuch-v0", ["NoSuch"]),
        ("two:colons:Env-v0", []),
        ("scripted_envs:NeedsDependency-v0", ["no_such_package is not installed, run `pip install it`"]),
        ("scripted_envs:NeedsArgument-v0", ["size"]),
    ],
)
def test_ids_that_are_refused(env_id, words):
    """An id that Gymnasium cannot make is refused in Gymnasium's own words, in one line."""
    message = refusal(env_id=env_id)
    assert all(word in message for word in words), message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("SameStep", "AutoresetMode.SAME_STEP"),
        ("Disabled", "AutoresetMode.DISABLED"),
        ("Unlabelled", "None"),
        ("Text", "NextStep"),
    ],
)
def test_autoreset_modes_that_are_refused(name, mode):
    """A vector environment that resets otherwise, or does not say how, is refused and never trained on."""
    message = refusal(env_id=f"scripted_envs:{name}-v0")
    assert f"its autoreset mode is {mode}, not NEXT_STEP" in message


def test_refused_before_anything_is_written(tmp_path, monkeypatch):
    """`train` refuses an environment before it makes a run folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ppo.Refused):
        ppo.train(make_args(env_id="NoSuchEnvironment-v0", num_minibatches=2))
    assert not list(tmp_path.iterdir())


# Failures in the middle of training


def fail(seed=KEY, **settings):
    """The error of the rollout in which an environment fails, and the number of that rollout."""
    envs, agent, rollout = begin(make_args(**settings), seed)
    try:
        for number in range(ROLLOUTS):
            try:
                ppo.collect_rollout(envs, agent, rollout)
            except ppo.TrainingFailed as error:
                return str(error), number
    finally:
        envs.close()
    return None


@pytest.mark.filterwarnings("ignore")  # Gymnasium prints the worker's traceback as warnings
@pytest.mark.parametrize("workers", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", ["step", "reset"])
def test_environment_that_raises(fault, workers):
    """An environment that raises in the middle ends training with its index and its own words."""
    message, _ = fail(env_id=f"scripted_envs:Fault-{fault}-v0", async_envs=workers)
    assert message.startswith(f"environment {BAD_KEY - KEY} raised ValueError('broken on purpose') at ")
    assert "scripted_envs.py:" in message


@pytest.mark.parametrize("fault", ["step", "reset"])
def test_native_vector_environment_that_raises(fault):
    """A native vector environment that raises ends training with its own words; it has no index to name."""
    message, _ = fail(env_id=f"scripted_envs:FaultNative-{fault}-v0")
    assert "ValueError('broken on purpose')" in message


def fault_row(fault):
    """The row, counted from the first rollout's start, whose step gives the value that is not finite."""
    rows, _, _ = replay(BAD_KEY, [0] * STEPS * ROLLOUTS)
    seen = [tuple(row[0][1:3]) for row in rows]  # episode and step before each row
    return seen.index((1, 0)) - 1 if fault == "reset-nan" else seen.index((1, 2))


@pytest.mark.parametrize("kind", ["sync", "native", "async"])
@pytest.mark.parametrize("fault", ["nan", "inf", "reset-nan"])
def test_value_that_is_not_finite(fault, kind):
    """A NaN or an infinite reward ends training in its own rollout, naming environment, step and values."""
    native = "Native" if kind == "native" else ""
    row = fault_row(fault)
    for steps in {"sync": (STEPS, row + 1, row), "native": (row + 2,), "async": (STEPS,)}[kind]:
        settings = {"env_id": f"scripted_envs:Fault{native}-{fault}-v0", "async_envs": kind == "async"}
        message, number = fail(num_steps=steps, **settings)
        assert number == row // steps
        place = f"environment {BAD_KEY - KEY} returned a value that is not finite in step {row % steps}: "
        assert message.startswith(place), message
        assert ("-inf" if fault == "inf" else "nan") in message.removeprefix(place)


def test_earliest_value_that_is_not_finite():
    """Of several values that are not finite, the earliest is named."""
    envs, agent, rollout = begin(make_args(env_id="scripted_envs:ScriptedNative-v0"))
    step, faults = envs.unwrapped.step, {1: 3, 3: 0}  # step: environment
    calls = iter(range(STEPS))

    def faulty(actions):
        obs, rewards, *rest = step(actions)
        if (t := next(calls)) in faults:
            rewards[faults[t]] = np.nan
        return obs, rewards, *rest

    envs.unwrapped.step = faulty
    with pytest.raises(ppo.TrainingFailed, match=r"environment 3 .* in step 1:"):
        ppo.collect_rollout(envs, agent, rollout)
    envs.close()


def test_first_observation_that_is_not_finite():
    """A NaN in what the very first reset returned is named, too, before anything is learnt from it."""
    envs, agent, rollout = begin(make_args(env_id="scripted_envs:ScriptedNative-v0"))
    rollout.obs[-1, 2, 1] = np.nan
    with pytest.raises(ppo.TrainingFailed, match=r"environment 2 .* in step 0: .*nan"):
        ppo.collect_rollout(envs, agent, rollout)
    envs.close()


def test_guard_keeps_the_cause():
    """`guard` passes results and arguments through, and chains the environment's own error."""
    env = ppo.guard(gym.make("scripted_envs:Fault-step-v0"), 7)
    obs, info = env.reset(seed=BAD_KEY)
    assert obs.tolist() == [BAD_KEY, 0, 0, -1]
    assert info == {}
    for step in range(scripted_envs.length(BAD_KEY, 0)):
        assert env.step(FIRST_ACTION + 1)[1] == scripted_envs.reward(BAD_KEY, 0, step, FIRST_ACTION + 1)
    env.reset()
    env.step(FIRST_ACTION)
    env.step(FIRST_ACTION)
    with pytest.raises(RuntimeError, match="environment 7 raised ValueError") as caught:
        env.step(FIRST_ACTION)
    assert isinstance(caught.value.__cause__, ValueError)


# Evaluation


def prefer(agent, action=None):
    """Make the agent always prefer one action, or be indifferent."""
    for parameter in agent.actor[-1].parameters():
        nn.init.zeros_(parameter)
    if action is not None:
        agent.actor[-1].bias.data[action] = 2.0


def make_evaluation(action=None, **settings):
    """Arguments and agent for `evaluate`, and the keys of the scripts that it will play."""
    args = make_args(**settings)
    agent = ppo.Agent(args, np.zeros(4, dtype=bool), scripted_envs.Scripted.action_space)
    prefer(agent, action)
    first = ppo.seed_everything(args.seed) + 2**31
    return args, agent, [(first + i) % 1000 for i in range(args.eval_episodes)]


def first_episode(key, action, steps=None):
    """Return and length of a script's first episode under one action."""
    steps = steps or scripted_envs.length(key, 0)
    return sum(scripted_envs.reward(key, 0, step, action + FIRST_ACTION) for step in range(steps)), steps


@pytest.mark.parametrize("env_id", ["scripted_envs:Scripted-v0", "scripted_envs:ScriptedNative-v0"])
def test_greedy_evaluation(env_id, tmp_path, capsys):
    """Greedy returns and lengths are the script's first episodes'; what comes after an end does not count."""
    args, agent, keys = make_evaluation(action=2, env_id=env_id, num_envs=1, eval_episodes=9)
    result = ppo.evaluate(agent, args, "greedy", tmp_path)
    returns, lengths = zip(*(first_episode(key, 2) for key in keys), strict=True)
    assert len(set(lengths)) > 4
    assert result["returns"].tolist() == list(returns)
    assert result["lengths"].tolist() == list(lengths)
    spread = f"± {np.std(returns):.1f}, from {min(returns):.1f} to {max(returns):.1f}"
    line = f"greedy return {np.mean(returns):.1f} {spread}, 9 episodes, length {np.mean(lengths):.1f}"
    assert capsys.readouterr().out.split() == line.split()


def test_stochastic_evaluation(tmp_path, capsys):
    """Stochastic evaluation samples its actions, and is the same for the same seed."""
    args, agent, keys = make_evaluation(eval_episodes=9)
    results = [ppo.evaluate(agent, args, "stochastic", tmp_path) for _ in range(2)]
    greedy = ppo.evaluate(agent, args, "greedy", tmp_path)
    low, lengths = (np.array(x) for x in zip(*(first_episode(key, 0) for key in keys), strict=True))
    assert np.array_equal(results[0]["returns"], results[1]["returns"])
    assert np.array_equal(results[0]["lengths"], lengths)
    share = (results[0]["returns"] - low).sum() * 4 / lengths.sum()  # the mean action
    assert 0.5 < share < 1.5
    assert np.array_equal(greedy["returns"], low)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["stochastic"] * 2 + [
        "greedy"
    ]


def test_evaluation_sees_normalised_observations(tmp_path):
    """The greedy actions are those of the policy on normalised observations."""
    args, agent, keys = make_evaluation(eval_episodes=6)
    agent.obs_moments.mean.copy_(torch.tensor([500.0, 0, 0, 0]))
    agent.obs_moments.var.copy_(torch.tensor([300.0**2, 1, 1, 1]))
    torch.manual_seed(5)
    nn.init.normal_(agent.actor[-1].weight, std=3.0)
    expected, picked = [], set()
    for key in keys:
        total, last = 0.0, -1
        for step in range(scripted_envs.length(key, 0)):
            obs = torch.from_numpy(scripted_envs.observation(key, 0, step, last))
            action = int(agent.actor(agent.normalize(obs)).argmax())
            last, _ = action + FIRST_ACTION, picked.add(action)
            total += scripted_envs.reward(key, 0, step, last)
        expected.append(total)
    assert len(picked) > 1
    assert ppo.evaluate(agent, args, "greedy", tmp_path)["returns"].tolist() == expected


@pytest.mark.parametrize("limit", [1, 20])
def test_endless_episodes_are_cut(limit, tmp_path, capsys):
    """An episode without end is cut at --eval-max-steps, and the printed line says how many were."""
    args, agent, keys = make_evaluation(
        1, env_id="scripted_envs:Endless-v0", eval_max_steps=limit, eval_episodes=9
    )
    result = ppo.evaluate(agent, args, "greedy", tmp_path)
    ends = [10**9 if key % 2 else scripted_envs.length(key, 0) for key in keys]
    expected = [first_episode(key, 1, min(end, limit)) for key, end in zip(keys, ends, strict=True)]
    assert list(zip(result["returns"].tolist(), result["lengths"].tolist(), strict=True)) == expected
    cut = sum(end > limit for end in ends)
    assert 0 < cut < 9
    assert capsys.readouterr().out.rstrip().endswith(f", {cut} cut at --eval-max-steps")


def test_evaluation_shares_this_process(tmp_path, monkeypatch):
    """Evaluation starts no worker processes, and its environments are as many as --eval-episodes."""
    args, agent, _ = make_evaluation(0, async_envs=True, num_envs=1, eval_episodes=3)
    monkeypatch.setattr(gym.vector, "AsyncVectorEnv", None)
    before = scripted_envs.OPEN[0]
    assert len(ppo.evaluate(agent, args, "greedy", tmp_path)["returns"]) == 3
    assert scripted_envs.OPEN[0] == before


@pytest.mark.filterwarnings("ignore:.*Overwriting existing videos")
def test_videos(tmp_path):
    """--capture-video records the first episode of each environment of the greedy evaluation only."""
    pytest.importorskip("moviepy")
    args = ppo.Args(capture_video=True, eval_episodes=6, eval_max_steps=30, hidden_size=8)
    envs, one_hot = ppo.make_envs(args, 1)
    agent = ppo.Agent(args, one_hot, envs.single_action_space)
    prefer(agent, 0)  # falls over within 11 steps
    ppo.evaluate(agent, args, "stochastic", tmp_path)
    assert not list(tmp_path.rglob("*"))
    lengths = ppo.evaluate(agent, args, "greedy", tmp_path)["lengths"]
    assert len(set(lengths)) > 1  # so that some environment began a second episode
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.mp4"))
    assert names == [f"videos/episode-{i}/rl-video-episode-0.mp4" for i in range(6)]


def test_actions_that_do_not_start_at_zero(tmp_path, monkeypatch):
    """A `Discrete` action space that does not start at 0 trains and evaluates."""
    monkeypatch.chdir(tmp_path)
    results = ppo.train(make_args(total_timesteps=60, num_minibatches=2))
    assert set(results) == {"greedy", "stochastic"}
    assert all(len(result["returns"]) == ENVS for result in results.values())
