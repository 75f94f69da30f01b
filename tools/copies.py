"""Keep what the scripts have in common the same text in each.

    python tools/copies.py          # list what has drifted from its original; exit status 1 if anything has
    python tools/copies.py --fix    # write the original's version into the copies

A unit is a function, a method, the rest of a class, or an assignment, at the top level of a script. Those of
a script's original must stand in it word for word, except those in `DIFFERENT`, which differ on purpose or
have no place there. Of the originals in `SHARED`, only the units named there are compared. Fields of settings
are compared one by one, by name and type; their defaults and texts may differ. What a copied unit needs is
imported, one name per line, which `ruff check --fix` joins to the other imports.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = "Args"
ORIGINALS = {
    "ppo_continuous.py": "ppo.py",
    "ppo_atari.py": "ppo.py",
    "ppo_gpu.py": "ppo_continuous.py",
    "ppo_lstm.py": "ppo.py",
    "grpo.py": "ppo_rlhf.py",
}
SHARED = {"ppo_rlhf.py": ("ppo.py", "STOP Refused")}  # script: another original, and its units
DIFFERENT = {  # script: units of its original that differ there on purpose, or are absent
    "ppo_continuous.py": "BOUNDS mlp Agent.__init__ Agent.policy sample most_likely log_prob entropy "
    "kl_divergence Batch collect_rollout update batch_metrics train check_settings check_actions load_start "
    "load_policy",
    "ppo_atari.py": "BOUNDS mlp RunningMoments RunningMoments.__init__ RunningMoments.update Agent "
    "Agent.__init__ Agent.normalize Agent.policy Agent.value Batch State ppo_loss Rollout Rollout.__init__ "
    "collect_rollout normalize_rollout make_batch mean_kl compute_gradients update batch_metrics "
    "adjust_coefficients adapted train seed_spaces compiled check_settings make_env Flat Flat.__init__ "
    "Flat.reset Flat.step flatten make_envs find_binary_obs check_actions make_eval_env check_numbers "
    "Run.log load_weights load_start load_policy evaluate parse_args main",
    "ppo_gpu.py": "--desired_kl --activation BOUNDS mlp RunningMoments.update Agent.__init__ Agent.normalize "
    "Agent.policy State ppo_loss Rollout Rollout.__init__ collect_rollout normalize_rollout make_batch "
    "mean_kl compute_gradients update batch_metrics adjust_coefficients adapted train seed_spaces compiled "
    "check_settings make_env Flat Flat.__init__ Flat.reset Flat.step flatten make_envs find_binary_obs "
    "check_actions make_eval_env check_numbers rescaler Run.log load_weights load_start load_policy evaluate "
    "close parse_args print_commands main",
    "ppo_lstm.py": "BOUNDS mlp Agent Agent.__init__ Agent.policy Agent.value Batch State ppo_loss Rollout "
    "Rollout.__init__ collect_rollout make_batch mean_kl compute_gradients update "
    "batch_metrics adjust_coefficients adapted train compiled check_settings load_policy evaluate",
    "grpo.py": "BOUNDS PRETRAINED SHOWN ScalarModel ScalarModel.__init__ ScalarModel.forward Models "
    "Models.__init__ Task TokenLogProbs TokenLogProbs.forward TokenLogProbs.backward "
    "log_probs_and_entropy token_log_probs last_output in_micro_batches all_log_probs score whiten "
    "token_rewards compute_gae Batch ppo_loss collect update adapted_kl_coef train evaluate PRODUCTS "
    "(TONES,GOOD,BAD) WORDS make_reviews write_review human tastes learn_to_write compare_responses "
    "learn_from_comparisons update_reward_model fit check_task load_pretrained check_critic Run.save restore "
    "check",
}


def units(text: str) -> dict[str, tuple[int, int]]:
    """The first and last line (from 0, exclusive) of each unit, by name; decorators and comments included."""
    lines, found = text.splitlines(), {}

    def add(name: str, node: ast.AST, end: int | None = None) -> None:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while lines[first - 1].lstrip().startswith("#") and not lines[first - 1].startswith("# -"):
            first -= 1
        found[name] = (first, node.end_lineno if end is None else end)

    for node in ast.parse(text).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            add(ast.unparse(target).replace(" ", ""), node)
        elif isinstance(node, ast.FunctionDef):
            add(node.name, node)
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            head = methods[0].lineno - 1 - len(methods[0].decorator_list) if methods else node.end_lineno
            if node.name != SETTINGS:
                add(node.name, node, head)
            for method in methods:
                add(f"{node.name}.{method.name}", method)
    return found


def fields(text: str) -> dict[str, str]:
    """Types of the settings, by name."""
    (args,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == SETTINGS)
    parts = [part for part in args.body if isinstance(part, ast.AnnAssign)]
    return {ast.unparse(part.target): ast.unparse(part.annotation) for part in parts}


def imports(text: str) -> dict[str, str]:
    """The statement that imports each name, at the top level of a script."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
            for alias in node.names:
                found[(alias.asname or alias.name).split(".")[0]] = source + ast.unparse(alias)
    return found


def cut(text: str, span: tuple[int, int]) -> str:
    """The lines of a span, without blank ones at its end."""
    return "\n".join(text.splitlines()[slice(*span)]).rstrip()


def drifted(original: str, copy: str, different: set[str]) -> list[str]:
    """What of the original the copy lacks, or has in other words."""
    ours, theirs = units(original), units(copy)
    names = [name for name in ours if name not in different]
    same = {name for name in names if name in theirs and cut(original, ours[name]) == cut(copy, theirs[name])}
    wrong = [name for name in names if name not in same]
    types, other_types = fields(original), fields(copy)
    flags = [f"--{name}" for name in types.keys() & other_types if types[name] != other_types[name]]
    return wrong + [flag for flag in flags if flag not in different]


def fixed(original: str, copy: str, different: set[str]) -> str:
    """The copy with the original's version of every unit that drifted, and what those units import.

    A missing unit is inserted after the one that it follows in the original.
    """
    previous, written = "", ""
    for name, span in units(original).items():
        places = units(copy)  # anew: every replacement moves the lines below it
        lines, new = copy.splitlines(), cut(original, span)
        is_right = name in places and cut(copy, places[name]) == new
        if name not in different and not is_right:
            written += new
            if name in places:
                first, end = places[name]
                blank = end - first - len(cut(copy, places[name]).splitlines())
                lines[first:end] = new.splitlines() + [""] * blank
            elif previous:
                gap = [""] if "." in name else ["", ""]
                lines[places[previous][1] : places[previous][1]] = [*gap, *new.splitlines()]
        copy = "\n".join(lines) + "\n"
        previous = name if name in units(copy) else previous
    words, known = set(re.findall(r"\w+", written)), imports(copy)
    lacking = [line for name, line in imports(original).items() if name in words and name not in known]
    lines = copy.splitlines()
    body = ast.parse(copy).body
    first = min(node.lineno for node in body if isinstance(node, ast.Import))
    lines[first - 1 : first - 1] = lacking
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    drift = False
    pairs = []
    for script, source in ORIGINALS.items():
        pairs.append((script, source, set(DIFFERENT[script].split())))
    for script, (source, names) in SHARED.items():
        others = units((ROOT / source).read_text()).keys() - set(names.split())
        flags = {f"--{name}" for name in fields((ROOT / source).read_text())}
        pairs.append((script, source, others | flags))
    for script, source, different in pairs:
        original, path = (ROOT / source).read_text(), ROOT / script
        copy, names = path.read_text(), units(original).keys()
        if "--fix" in sys.argv:
            copy = fixed(original, copy, different)
            path.write_text(copy)
        for name in drifted(original, copy, different):
            drift = True
            print(f"{script}: {name} is not as in {source}")
        for name in sorted(name for name in different - names if not name.startswith("--")):
            drift = True
            print(f"tools/copies.py: {source} has no {name}")
        ours, theirs = units(original), units(copy)
        for name in sorted(different & ours.keys() & theirs.keys()) if script in ORIGINALS else []:
            if cut(original, ours[name]) == cut(copy, theirs[name]):
                drift = True
                print(f"tools/copies.py: {name} of {script} is as in {source}: remove it from the list")
    sys.exit(drift)


if __name__ == "__main__":
    main()
