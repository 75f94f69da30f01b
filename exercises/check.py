"""Grade the exercises, and what you found in a broken copy of ppo_minimal.py.

    python exercises/check.py                       # all functions of exercises.py
    python exercises/check.py compute_gae ratio     # these, with the numbers that differ
    python exercises/check.py bug 3                 # write bug_3.py, a broken copy of ppo_minimal.py
    python exercises/check.py bug 3 --line 120      # is this line wrong?

Exit status: 0 if all that was graded is right, 1 if something is wrong or not written yet.
"""

import copy
import functools
import importlib.util
import inspect
import math
import sys
import textwrap
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import bugs
import solutions
import torch
import tyro
from graders import (
    ACTOR,
    EXERCISES,
    IN_PLACE,
    PROPERTIES,
    Exercise,
    Wrong,
    properties,
    weights_after,
    with_gradient,
)
from torch import Tensor

HERE = Path(__file__).resolve().parent
NAMES = ", ".join(EXERCISES)
NUMBERS = Tensor | int | float


@dataclass
class Args:
    names: tyro.conf.Positional[tuple[str, ...]] = ()  # functions to grade, else all; or: bug N
    line: int | None = None  # of a broken copy: the line that you think is wrong
    file: Path = HERE / "exercises.py"  # with your functions


@dataclass(frozen=True)
class Grade:
    """Whether a function is right, and what is wrong."""

    passed: bool
    words: str = ""
    details: str = ""


def grade(name: str, module: ModuleType) -> Grade:
    """Try a function on all cases of its exercise. A wrong one is compared with typical wrong answers."""
    exercise, function = EXERCISES[name], getattr(module, name, None)
    if function is None:
        return Grade(False, "not in the file")
    outputs = {}
    for case, inputs in exercise.cases.items():
        given = copy.deepcopy(inputs)
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is wrong is said below
                outputs[case] = exercise.observe(function, given)
        except Wrong as wrong:
            return Grade(False, str(wrong))
        except (Exception, SystemExit) as error:
            return explain(error, name, case, module)
        if not same(given, inputs):
            return Grade(False, IN_PLACE)
    return judge(name, outputs)


def explain(error: BaseException, name: str, case: str, module: ModuleType) -> Grade:
    """What an error in a learner's function says, with the lines of the learner's file that led to it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, NotImplementedError) and last.filename == module.__file__:
        calls = f": {last.name}, which it calls" if last.name != name else ""
        return Grade(False, f"not written yet{calls}")
    trace = error.__traceback__
    while trace.tb_next and trace.tb_frame.f_code.co_filename != module.__file__:
        trace = trace.tb_next
    details = "".join(traceback.format_exception(type(error), error, trace))
    if "backward through the graph a second time" in str(error):
        advice = "Compute logits and values anew for each minibatch, as the weights have changed."
        return Grade(False, advice, details)
    return Grade(False, f"{type(error).__name__} in the case '{case}': {error}", details)


def judge(name: str, outputs: dict[str, Any]) -> Grade:
    """Compare the outputs of all cases with the right ones, else with those of typical wrong answers."""
    exercise = EXERCISES[name]
    right = in_parts(exercise, answers(exercise, getattr(solutions, name)))
    given = in_parts(exercise, outputs)
    differing = [key for key in right if not same(given.get(key), right[key])]
    if not differing and len(given) == len(right):
        return Grade(True)
    first = differing[0] if differing else next(iter(right))
    case, _ = first
    details = show(name, case, outputs[case], {key: x for key, x in right.items() if key[0] == case})
    closest, agreeing = "", 0
    for sentence, wrong_outputs in typical_answers(name).items():
        others = in_parts(exercise, wrong_outputs)
        equal = sum(same(given.get(key), others.get(key)) for key in right)
        if equal == len(right) and len(given) == len(others):
            return Grade(False, sentence, details)
        # Else a wrong answer may explain a part: it equals the first differing result, and all right ones.
        breaks = any(not same(others.get(key), right[key]) for key in right if key not in differing)
        explains = tells_something(given.get(first)) and same(given[first], others.get(first))
        if explains and not breaks and equal > agreeing:
            closest, agreeing = sentence, equal
    if closest:
        return Grade(False, f"{closest} (In the case '{case}'.)", details)
    return Grade(False, difference(exercise, first, outputs[case], given.get(first), right[first]), details)


def tells_something(part: Any) -> bool:
    """Whether a result hints at its reason: zeros, NaN and inf have many."""
    if not isinstance(part, NUMBERS):
        return False
    x = torch.as_tensor(part)
    return x.dtype == torch.bool or bool(x.isfinite().all() and (x.abs() > 1e-5).any())


def in_parts(exercise: Exercise, outputs: dict[str, Any]) -> dict[tuple[str, int], Any]:
    """The outputs by case and position, where a function returns several."""
    parts = {}
    for case, output in outputs.items():
        results = output if isinstance(output, tuple) else (output,)
        parts |= {(case, index): part for index, part in enumerate(results)}
    return parts


@functools.cache
def typical_answers(name: str) -> dict[str, dict[str, Any]]:
    """The outputs of all typical wrong answers, by what is wrong with them."""
    exercise = EXERCISES[name]
    return {sentence: answers(exercise, function) for sentence, function in exercise.wrong.items()}


def answers(exercise: Exercise, function: Any) -> dict[str, Any]:
    """What a function gives in each case."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrong answers divide by 0
        for case, inputs in exercise.cases.items():
            torch.manual_seed(0)
            found[case] = exercise.observe(function, copy.deepcopy(inputs))
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal, up to rounding: numbers, tensors, or tuples of them."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, NUMBERS) or not isinstance(b, NUMBERS):
        return a is b
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def difference(exercise: Exercise, key: tuple[str, int], output: Any, part: Any, right: Any) -> str:
    """What distinguishes a part of an output from the right one, in words."""
    case, index = key
    where = f"In the case '{case}'"
    if exercise.observe is properties:
        missing = [name for name, has in zip(PROPERTIES, output, strict=True) if not has]
        return f"{where}, this is missing: {', '.join(missing)}."
    if exercise.observe is weights_after:
        if same(part[:ACTOR], right[:ACTOR]):
            return f"{where}, the critic's weights are wrong, the actor's are right."
        if same(part[ACTOR:], right[ACTOR:]):
            return f"{where}, the actor's weights are wrong, the critic's are right."
        return f"{where}, the weights of both networks are wrong."
    if exercise.observe is with_gradient and index == 1:
        if not part.any():
            return f"{where}, the result is right, but has no gradient: is it detached from the input?"
        return f"{where}, the result is right, but its gradient is not."
    if output is None or (part is None and not exercise.parts):
        return "Nothing is returned."
    if exercise.parts:
        if not isinstance(output, tuple | list) or len(output) != len(exercise.parts):
            return f"Return {len(exercise.parts)} results: {', '.join(exercise.parts)}."
        where = f"{where}, {exercise.parts[index]}"
    if isinstance(right, float) and (not isinstance(part, NUMBERS) or torch.as_tensor(part).numel() != 1):
        return f"{where}: return a number."
    if not isinstance(part, NUMBERS):
        return f"{where}: the type is {type(part).__name__}. Return a tensor."
    part, right = torch.as_tensor(part), torch.as_tensor(right)
    if part.shape != right.shape:
        return f"{where}: the shape is {list(part.shape)}, where {list(right.shape)} is expected."
    if (part.dtype == torch.bool) != (right.dtype == torch.bool):
        return f"{where}: the dtype is {part.dtype}, where {right.dtype} is expected."
    if right.dtype == torch.bool:
        return f"{where}: {words(part)} instead of {words(right)}."
    if part.isnan().any():
        return f"{where}: the result contains NaN."
    if same(part, -right):
        return f"{where}: the sign is wrong."
    if right.dim() == 0:
        return f"{where}: {words(part.item())} instead of {words(right.item())}."
    largest = right.abs().argmax()
    factor = (part.flatten()[largest] / right.flatten()[largest]).item()
    if math.isfinite(factor) and abs(factor - 1) > 1e-3 and same(part, factor * right):
        return f"{where}: the result is {factor:.4g} times the right one."
    wrong = (part - right).abs() > 1e-5 + 1e-4 * right.abs()
    return f"{where}: {int(wrong.sum())} of {right.numel()} numbers are wrong."


def show(name: str, case: str, output: Any, right: dict[tuple[str, int], Any]) -> str:
    """The inputs of a case, and both outputs."""
    exercise = EXERCISES[name]
    if exercise.observe in (properties, weights_after):
        return ""
    parameters = inspect.signature(getattr(solutions, name)).parameters
    inputs = [f"{p} = {words(x)}" for p, x in zip(parameters, exercise.cases[case], strict=True)]
    expected: Any = tuple(right.values())
    if exercise.observe is with_gradient:
        if same(output[0], expected[0]) or expected[0].dim() == 0:
            output, expected = (f"{words(x[0])}, with the gradient {words(x[1])}" for x in (output, expected))
        else:
            output, expected = output[0], expected[0]
    return "\n".join([*inputs, f"yours: {words(output)}", f"right: {words(expected)}"])


def words(x: Any) -> str:
    """A number, or a tensor as a list of rounded numbers."""
    if isinstance(x, tuple | list):
        return ", ".join(words(part) for part in x)
    if isinstance(x, Tensor):
        if x.is_floating_point():
            x = (x.detach().double() * 1e4).round() / 1e4
        return str(x.tolist())
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def load(path: Path) -> ModuleType:
    """Import a learner's file as a module. It may import others beside it."""
    if path.suffix != ".py" or not path.is_file():
        sys.exit(f"{path} is not a Python file")
    spec = importlib.util.spec_from_file_location("learner", path.resolve())
    assert spec
    assert spec.loader
    module = sys.modules["learner"] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def grade_functions(names: tuple[str, ...], path: Path) -> bool:
    """Print a line for each function, and details if some were named. Return whether all are right."""
    module, passed = load(path), 0
    for name in names or EXERCISES:
        found = grade(name, module)
        passed += found.passed
        print(f"{EXERCISES[name].number:>2}  {name:<21} {'passed' if found.passed else found.words}")
        if names and found.details:
            print("\n" + textwrap.indent(found.details.rstrip(), "    ") + "\n")
    if not names:
        print(f"\n{passed} of {len(EXERCISES)} passed")
    return passed == len(names or EXERCISES)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.names[:1] == ("bug",):
        numbers = [str(number) for number in range(1, len(bugs.BUGS) + 1)]
        if len(args.names) != 2 or args.names[1] not in numbers:
            sys.exit(f"write `bug` and a number from 1 to {len(numbers)}")
        number = int(args.names[1])
        if args.line is None:
            print(bugs.write(number, Path()))
            return
        passed, answer = bugs.judge(number, args.line, Path())
        print(answer)
        sys.exit(not passed)
    if args.line is not None:
        sys.exit("--line is for `bug N`")
    unknown = [name for name in args.names if name not in EXERCISES]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}. There are: {NAMES}, and bug 1 to bug {len(bugs.BUGS)}")
    sys.exit(not grade_functions(args.names, args.file))


if __name__ == "__main__":
    main()
