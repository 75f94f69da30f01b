"""Tests of exercises/: solutions are right, wrong answers are told why, and broken copies have one bug."""

import contextlib
import inspect
import io
import itertools
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import curves, direct_gae, weights
from torch.distributions import Categorical, kl_divergence

import grpo
import ppo_minimal
import ppo_rlhf

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "exercises"
sys.path.insert(0, str(FOLDER))
import bugs  # noqa: E402
import check  # noqa: E402
import graders  # noqa: E402
import solutions  # noqa: E402

import exercises  # noqa: E402

NAMES = list(graders.EXERCISES)


def module(name, function):
    """Return the solutions as a module, with another answer to one exercise."""
    return SimpleNamespace(**vars(solutions) | {name: function})


def run(folder, *words):
    """Run check.py as a learner does, in this process. Return its status and output."""
    shown, status, argv = io.StringIO(), 0, ["check.py", *map(str, words)]
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        mock.patch.object(sys, "argv", argv),
    ):
        try:
            check.main()
        except SystemExit as end:
            status = end.code
    if isinstance(status, str):  # Python prints it, and exits with 1
        return 1, shown.getvalue() + status
    return int(status), shown.getvalue()


# Solutions


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name):
    assert check.grade(name, solutions) == check.Grade(True)


def test_minibatches_have_each_row_once_and_single_advantages_are_0():
    """What is not compared with another computation below."""
    assert all(all(has) for has in check.answers(graders.MINIBATCHES, solutions.make_minibatches).values())
    assert solutions.normalize_advantages(torch.tensor([5.0])).tolist() == [0]
    small = 1e-4 * torch.tensor([3.0, -1.0, 2.0])
    exact = (small - small.mean()) / small.std()
    torch.testing.assert_close(solutions.normalize_advantages(small), exact, rtol=1e-3, atol=0)
    values = torch.tensor([2.0, 1.1], requires_grad=True)
    solutions.value_loss(values, torch.ones(2), torch.full((2,), 3.0), 0.2).backward()
    assert values.grad.tolist() == pytest.approx([0, -0.95])  # the first change is clipped


def test_log_probs_ratios_entropies_and_divergences_are_those_of_torch_distributions():
    torch.manual_seed(1)
    old, new, actions = torch.randn(50, 4), torch.randn(50, 4), torch.randint(4, (50,))
    p, q = Categorical(logits=old), Categorical(logits=new)
    torch.testing.assert_close(solutions.log_prob(new, actions), q.log_prob(actions))
    torch.testing.assert_close(solutions.entropy(new), q.entropy())
    torch.testing.assert_close(solutions.kl_divergence(old, new), kl_divergence(p, q))
    ratios = q.probs.gather(1, actions[:, None])[:, 0] / p.probs.gather(1, actions[:, None])[:, 0]
    torch.testing.assert_close(solutions.ratio(new, actions, p.log_prob(actions)), ratios)
    forbidden = new.masked_fill(torch.arange(4) == 2, -math.inf)
    others = Categorical(logits=new[:, [0, 1, 3]]).entropy()
    torch.testing.assert_close(solutions.entropy(forbidden), others)


def test_kl_estimates_have_the_divergence_as_their_expectation():
    """The expectation over the actions of π_old is taken exactly."""
    torch.manual_seed(2)
    old, new = torch.randn(2, 4)
    p, q = Categorical(logits=old), Categorical(logits=new)
    for index in range(2):
        estimates = [
            solutions.kl_estimates(p.log_prob(a)[None], q.log_prob(a)[None])[index] for a in torch.arange(4)
        ]
        torch.testing.assert_close((p.probs * torch.stack(estimates)).sum(), kl_divergence(p, q))


def test_returns_and_advantages_are_sums():
    rewards = torch.randn(9, generator=torch.Generator().manual_seed(3))
    returns = [sum(0.9**k * r for k, r in enumerate(rewards[t:].tolist())) for t in range(9)]
    torch.testing.assert_close(solutions.discounted_returns(rewards, 0.9), torch.tensor(returns))
    generator = torch.Generator().manual_seed(4)
    rewards, values, next_values = torch.randn(3, 12, 3, generator=generator)
    terminated, truncated = torch.rand(2, 12, 3, generator=generator) < 0.2
    for gae_lambda in (0.0, 0.95, 1.0):
        found, targets = solutions.compute_gae(
            rewards, values, next_values, terminated, truncated, 0.9, gae_lambda
        )
        arrays = (x.numpy() for x in (rewards, values, terminated, truncated))
        expected = torch.tensor(
            direct_gae(*arrays, 0.9, gae_lambda, next_values.numpy()), dtype=torch.float32
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(targets, expected + values, rtol=1e-4, atol=1e-5)


def test_transitions_have_a_gradient_where_autograd_finds_one():
    for ratio, advantage in itertools.product((0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0), (-2.0, 0.5)):
        ratios, advantages = torch.tensor([ratio], requires_grad=True), torch.tensor([advantage])
        (gradient,) = torch.autograd.grad(solutions.clipped_loss(ratios, advantages, 0.2), ratios)
        assert solutions.has_gradient(ratios.detach(), advantages, 0.2).item() == (gradient.item() != 0)
        if gradient.item():
            assert gradient.item() == -advantage  # of a loss


def test_losses_and_normalised_advantages_are_those_of_ppo():
    torch.manual_seed(5)
    new, old, actions = torch.randn(20, 3), torch.randn(20, 3), torch.randint(3, (20,))
    values, old_values, returns, advantages = torch.randn(4, 20)
    old_log_probs = Categorical(logits=old).log_prob(actions)
    agent = SimpleNamespace(policy=lambda _: Categorical(logits=new), value=lambda _: values)
    args = ppo_minimal.Args(vf_coef=0.7, ent_coef=0.3)
    expected, _ = ppo_minimal.ppo_loss(agent, None, actions, old_log_probs, advantages, returns, args)
    ratios = solutions.ratio(new, actions, old_log_probs)
    loss = solutions.clipped_loss(ratios, solutions.normalize_advantages(advantages), 0.2)
    loss += 0.7 * solutions.value_loss(values, values, returns, 0.2) - 0.3 * solutions.entropy(new).mean()
    torch.testing.assert_close(loss, expected)
    inside = (values - old_values).abs() <= 0.2
    clipped = torch.where(inside, values, old_values + 0.2 * (values - old_values).sign())
    larger = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    torch.testing.assert_close(solutions.value_loss(values, old_values, returns, 0.2), larger.mean() / 2)


def test_moments_are_those_of_all_rows():
    torch.manual_seed(6)
    rows = 3 + 2 * torch.randn(40, 5)
    moments = torch.zeros(5), torch.zeros(5), 0
    for part in rows.split([7, 1, 20, 12]):
        moments = solutions.update_moments(*moments, part)
    mean, var, count = moments
    torch.testing.assert_close(mean, rows.mean(0))
    torch.testing.assert_close(var, rows.var(0, correction=0))
    assert count == 40


def test_token_rewards_masks_and_group_advantages_are_those_of_the_language_scripts():
    torch.manual_seed(7)
    tokens = torch.randint(5, (30, 6))
    mask = solutions.response_mask(tokens, 0)
    for row, kept in zip(tokens.tolist(), mask.tolist(), strict=True):
        length = row.index(0) + 1 if 0 in row else 6
        assert kept == [True] * length + [False] * (6 - length)
    scores, log_probs, ref_log_probs = torch.randn(30), torch.randn(30, 6), torch.randn(30, 6)
    found = solutions.token_rewards(scores, log_probs, ref_log_probs, mask, 0.1)
    expected = ppo_rlhf.token_rewards(scores, log_probs - ref_log_probs, mask, 0.1)
    torch.testing.assert_close(found, expected)
    groups, args = torch.randn(5, 6), grpo.Args(group_size=6, kl_coef=0.0)
    expected = grpo.group_advantages(groups.flatten(), torch.zeros(30), args).view(5, 6)
    torch.testing.assert_close(solutions.group_advantages(groups), expected.float())


def test_an_adapted_kl_coefficient_is_that_of_the_paper():
    assert [solutions.adapt_kl_coef(1.0, kl, 0.02) for kl in (0.031, 0.029, 0.014, 0.013)] == [2, 1, 1, 0.5]


def test_the_update_learns_what_ppo_minimal_learns():
    """The same minibatches give the same weights."""
    torch.manual_seed(8)
    agent, copy = ppo_minimal.Agent(3, 4), ppo_minimal.Agent(3, 4)
    copy.load_state_dict(agent.state_dict())
    obs, actions = torch.randn(24, 3), torch.randint(4, (24,))
    batch = obs, actions, torch.randn(24) * 0.2 - 1.4, torch.randn(24), torch.randn(24)
    epochs = [solutions.make_minibatches(24, 3) for _ in range(4)]
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2, eps=1e-5)
    solutions.update(agent, optimizer, batch, epochs, 0.2, 0.5, 0.01, 0.5)
    optimizer = torch.optim.Adam(copy.parameters(), 1e-2, eps=1e-5)
    for rows in itertools.chain(*epochs):
        loss, _ = ppo_minimal.ppo_loss(copy, *(x[rows] for x in batch), ppo_minimal.Args())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(copy.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(weights(agent), weights(copy), rtol=1e-4, atol=1e-5)


# Wrong answers


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", NAMES)
def test_each_typical_wrong_answer_gets_its_own_sentence(name):
    for words, function in graders.EXERCISES[name].wrong.items():
        found = check.grade(name, module(name, function))
        assert (found.passed, found.words) == (False, words)


OTHER_ANSWERS = {  # by what a learner is told
    "has no gradient": ("clipped_loss", lambda *x: solutions.clipped_loss(*x).detach()),
    "its gradient is not": (
        "entropy",
        lambda x: solutions.entropy(x).detach() + x.sum(-1) - x.detach().sum(-1),
    ),
    "Nothing is returned": ("log_prob", lambda *x: None),
    "in place": ("gae", lambda deltas, *others: deltas.mul_(2)),
    "changed in place": ("entropy", lambda logits: solutions.entropy(logits.sub_(1))),
    "torch.bool": ("has_gradient", lambda r, a, e: torch.ones(len(r))),
    "[4, 1]": ("td_errors", lambda *x: solutions.td_errors(*x)[:, :1]),
    "NaN": ("group_advantages", lambda scores: scores * math.nan),
    "3 times": ("td_errors", lambda *x: 3 * solutions.td_errors(*x)),
    "2 of 3 numbers": ("discounted_returns", lambda r, gamma: torch.tensor([7.0, 8.0, 2.0])),
    "not a list": ("gae", lambda *x: list(solutions.gae(*x))),
    "Return 2 results": ("kl_estimates", lambda *x: (*solutions.kl_estimates(*x), 1)),
    "k3": ("kl_estimates", lambda *x: (solutions.kl_estimates(*x)[0], torch.tensor(5.0))),
    "return a number": ("adapt_kl_coef", lambda *x: "much"),
    "returns nothing": ("update", lambda *x: 1),
    "critic's weights are wrong": ("update", lambda *x: double(lambda agent: agent.critic, *x)),
    "actor's weights are wrong": ("update", lambda *x: double(lambda agent: agent.actor, *x)),
    "sign is wrong": (
        "compute_gae",
        lambda *x: (-solutions.compute_gae(*x)[0], solutions.compute_gae(*x)[1]),
    ),
    "no row twice": (
        "make_minibatches",
        lambda size, n: [torch.arange(size).repeat(2)[torch.randperm(2 * size)]],
    ),
    "row numbers from 0": (
        "make_minibatches",
        lambda size, n: [x + 1 for x in solutions.make_minibatches(size, n)],
    ),
    "vectors": ("make_minibatches", lambda size, n: []),
    "Boolean value": ("has_gradient", lambda r, a, e: r > 1 + e and a > 0),
    "SystemExit": ("entropy", lambda logits: sys.exit(0)),
    "anew for each minibatch": ("update", lambda *x: forward_once(*x)),
}


def double(network_of, agent, *others):
    """Update, then double the last parameter of a network, its bias."""
    solutions.update(agent, *others)
    [*network_of(agent).parameters()][-1].data *= 2


def forward_once(agent, optimizer, batch, *others):
    loss = agent.critic(batch[0]).square().mean()
    for _ in range(2):
        loss.backward()


@pytest.mark.parametrize("words", OTHER_ANSWERS)
def test_an_answer_that_is_wrong_in_another_way_is_told_how_it_differs(words):
    found = check.grade(OTHER_ANSWERS[words][0], module(*OTHER_ANSWERS[words]))
    assert not found.passed
    assert words in found.words


def test_named_exercises_are_shown_with_inputs_and_both_results(tmp_path):
    answer = "def normalize_advantages(advantages):\n    return 7 * advantages\n"
    (tmp_path / "mine.py").write_text(answer, encoding="utf-8")
    status, shown = run(tmp_path, "normalize_advantages", "--file", "mine.py")
    assert status == 1
    assert re.search(r"advantages = \[3.0, .*yours: \[21.0, .*right: \[0.", shown, re.DOTALL)


def test_an_answer_with_two_mistakes_is_told_one_of_them():
    def forgets_gamma_and_ends(r, v, n, term, gamma):
        return r + n - v

    found = check.grade("td_errors", module("td_errors", forgets_gamma_and_ends))
    assert found.words.startswith("V(s_{t+1}) is not discounted by γ.")


def test_an_error_in_an_answer_is_shown_where_it_happens(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def entropy(logits):\n    return logits.softmax(-1).lg()\n", encoding="utf-8")
    status, shown = run(tmp_path, "entropy", "--file", path)
    assert status == 1
    assert "'lg'" in shown
    assert "return logits.softmax(-1).lg()" in shown


# exercises.py and the command line


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_has_the_signature_of_its_solution_and_no_code(name):
    exercise, solution = getattr(exercises, name), getattr(solutions, name)
    assert inspect.signature(exercise) == inspect.signature(solution)
    assert re.sub(r'""".*?"""', "", inspect.getsource(exercise), flags=re.DOTALL).count("\n    ") <= 4
    found = check.grade(name, exercises)
    assert (found.passed, found.words) == (False, "not written yet")


def test_grading_prints_a_line_for_each_function_and_a_status(tmp_path):
    status, shown = run(tmp_path)
    assert status == 1
    assert shown.count("not written yet") == len(NAMES)
    status, shown = run(tmp_path, "--file", FOLDER / "solutions.py")
    assert status == 0
    assert shown.count("passed") == len(NAMES) + 1
    status, shown = run(tmp_path, "gae", "nonsense")
    assert status == 1
    assert "nonsense" in shown


def test_help_has_a_text_for_each_argument(tmp_path):
    status, shown = run(tmp_path, "--help")
    assert status == 0
    for words in ("functions to grade", "the line that you think is wrong", "with your functions"):
        assert words in shown


def test_a_function_that_calls_one_that_is_not_written_says_so(tmp_path):
    text = (FOLDER / "exercises.py").read_text(encoding="utf-8")
    start = text.index("def ratio(")
    body = text.index("    raise NotImplementedError", start)
    answer = "    return (log_prob(logits, actions) - old_log_probs).exp()"
    text = text[:body] + answer + text[body + len("    raise NotImplementedError") :]
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert "not written yet: log_prob" in run(tmp_path, "ratio", "--file", "mine.py")[1]


def test_the_readme_lists_the_functions_in_their_order():
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", table, re.MULTILINE)
    listed = [(int(number), name) for number, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert listed == [(exercise.number, name) for name, exercise in graders.EXERCISES.items()]


# Broken copies


NUMBERS = range(1, len(bugs.BUGS) + 1)


def train_briefly(text, folder, name, monkeypatch, iterations):
    """Train with the text of a script. Return the weights, and the curves of what it logs."""
    path = folder / name / "script.py"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(path.parent)
    script = check.load(path)
    learnt = weights(script.train(script.Args("Acrobot-v1", total_timesteps=iterations * 1024)))
    (logged,) = path.parent.glob("runs/*")
    return learnt, curves(logged)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_broken_copy_has_ten_harmless_changes(number):
    """A comparison with the original shows more than the bug. No two copies have the same changes."""
    text, _ = bugs.make(number)
    assert f"__bug_{number}__" in text  # the name of its runs, for which coach.py is called
    original = bugs.ORIGINAL.read_text(encoding="utf-8")
    changed = {*original.splitlines()} - {*text.splitlines()}
    with mock.patch.object(bugs, "rewrite", wraps=bugs.rewrite) as tried:
        bugs.make(number)
    given = [call.args for call in tried.call_args_list]
    assert sum(bugs.rewrite(*words) != words[0] for words in given) == 10
    for other in NUMBERS:
        if other != number:
            assert changed != {*original.splitlines()} - {*bugs.make(other)[0].splitlines()}


@pytest.mark.slow
def test_the_harmless_changes_learn_the_same_weights_and_log_the_same(tmp_path, monkeypatch):
    """All of them at once, on episodes of which a time limit ends some (500 of 512 steps)."""
    original = bugs.ORIGINAL.read_text(encoding="utf-8")
    changed = original
    for old, new in sorted(bugs.REWRITES, key=lambda pair: pair[0].isidentifier()):  # new names are last
        before, changed = changed, bugs.rewrite(changed, old, new)
        assert changed != before, old
    a = train_briefly(original, tmp_path, "original", monkeypatch, 4)
    b = train_briefly(changed, tmp_path, "changed", monkeypatch, 4)
    assert torch.equal(a[0], b[0])
    assert a[1] == b[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_broken_copy_runs_and_learns_other_weights(number, tmp_path, monkeypatch):
    text, _ = bugs.make(number)
    original = bugs.ORIGINAL.read_text(encoding="utf-8")
    a, _ = train_briefly(original, tmp_path, "original", monkeypatch, 4)
    b, _ = train_briefly(text, tmp_path, "copy", monkeypatch, 4)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("number", NUMBERS)
def test_only_lines_of_the_faulty_statement_are_right(number, tmp_path):
    """Also where a learner has added lines. Lines that take part in it are close."""
    bugs.write(number, tmp_path)
    path = tmp_path / f"bug_{number}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    answers = {line: bugs.judge(number, line, tmp_path) for line in range(1, len(lines) + 1)}
    right = [line for line, (passed, _) in answers.items() if passed]
    assert 1 <= len(right) <= 3
    assert len([line for line, (_, words) in answers.items() if "Close" in words]) == 1
    lines = [line + "  # wrong?" for line in lines]
    path.write_text("\n".join(["import os", *lines, "print(1)"]), encoding="utf-8")
    moved = [line for line in range(1, len(lines) + 3) if bugs.judge(number, line, tmp_path)[0]]
    assert moved == [line + 1 for line in right]
    assert not bugs.judge(number, len(lines) + 3, tmp_path)[0]
    path.unlink()
    assert not bugs.judge(number, right[0], tmp_path)[0]  # of which copy?


def test_a_learner_gets_a_copy_and_an_answer(tmp_path):
    status, shown = run(tmp_path, "bug", 4)
    assert status == 0
    assert "bug_4.py" in shown
    assert bugs.BUGS[3].why not in shown
    path = tmp_path / "bug_4.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.strip().startswith("obs[t] ="))
    assert run(tmp_path, "bug", 4, "--line", 1)[0] == 1
    status, shown = run(tmp_path, "bug", 4, "--line", line)
    assert status == 0
    assert "stored after the step" in shown
    path.write_text("# notes\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    run(tmp_path, "bug", 4)
    assert path.read_text(encoding="utf-8").startswith("# notes")  # a learner's changes are kept
    assert run(tmp_path, "bug", 7)[0] == 1


# The page


def test_the_code_of_the_explanation_is_that_of_ppo_minimal():
    page = (ROOT / "docs/ppo_explained.md").read_text(encoding="utf-8")
    script = {line.strip().split("  #")[0] for line in bugs.ORIGINAL.read_text(encoding="utf-8").splitlines()}
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 8
    for line in "".join(blocks).splitlines():
        assert line.strip() in script, line


def test_the_names_in_the_glossary_are_in_their_functions():
    page = (ROOT / "docs/ppo_explained.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| .+ \| (.+) \|$", page.split("## Glossary")[1], re.MULTILINE)[2:]
    assert len(rows) > 20
    for row in rows:
        for function, names in re.findall(r"\[`([\w.]+)`\]\([^)]*\)(?::([^;]*))?", row):
            owner = ppo_minimal
            if function.startswith("Agent."):
                owner, function = ppo_minimal.Agent, function.split(".")[1]
            source = inspect.getsource(getattr(owner, function))
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"\b{name}\b", source), (row, name)
