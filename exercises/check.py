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
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import bugs
import solutions
import torch
import tyro
from graders import ACTOR, EXERCISES, PROPERTIES, Exercise, Wrong, properties, weights_after, with_gradient
from torch import Tensor

HERE = Path(__file__).resolve().parent
NAMES = ", ".join(EXERCISES)


@dataclass
class Args:
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional
    ] = ()  # functions to grade (default: all), or: bug N
    line: int | None = None  # of a broken copy: the line that you take for wrong
    file: Path = HERE / "exercises.py"  # with your functions


@dataclass(frozen=True)
class Grade:
    """Whether a function is right, and what is wrong."""

    passed: bool
    words: str = ""
    details: str = ""


def grade(name: str, module: ModuleType) -> Grade:
    """Try a function on all cases of its exercise. A wrong one is compared with typical wrong answers."""
    exercise, function = EXERCISES[name], getattr(module, name)
    outputs = {}
    for case, inputs in exercise.cases.items():
        given = copy.deepcopy(inputs)
        torch.manual_seed(0)
        try:
            outputs[case] = exercise.observe(function, given)
        except NotImplementedError:
            missing = traceback.extract_tb(sys.exc_info()[2])[-1].name
            return Grade(False, "not written yet" + f": {missing}, which it calls" * (missing != name))
        except Wrong as wrong:
            return Grade(False, str(wrong))
        except Exception as error:
            trace = error.__traceback__
            while trace and Path(trace.tb_frame.f_code.co_filename).parent == HERE and trace.tb_next:
                if trace.tb_frame.f_code.co_filename == module.__file__:
                    break
                trace = trace.tb_next
            details = "".join(traceback.format_exception(type(error), error, trace))
            return Grade(False, f"{type(error).__name__} in the case '{case}': {error}", details)
        if not same(given, inputs):
            return Grade(False, "An argument is changed in place, which the caller still needs.")
    return judge(name, outputs)


def judge(name: str, outputs: dict[str, Any]) -> Grade:
    """Compare the outputs of all cases with the right ones, else with those of typical wrong answers."""
    exercise = EXERCISES[name]
    right = answers(exercise, getattr(solutions, name))
    differing = [case for case in outputs if not same(outputs[case], right[case])]
    if not differing:
        return Grade(True)
    case = differing[0]
    details = show(exercise, case, outputs[case], right[case])
    closest, most = "", 0
    for sentence, others in typical_answers(name).items():
        equal = sum(same(outputs[name], others[name]) for name in outputs)
        if equal == len(outputs):
            return Grade(False, sentence, details)
        if same(outputs[case], others[case]) and equal > most:
            closest, most = sentence, equal
    if closest:  # something else is wrong, too, as other cases differ
        return Grade(False, f"In the case '{case}': {closest}", details)
    return Grade(False, difference(exercise, case, outputs[case], right[case]), details)


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
    """Whether two outputs are equal, up to rounding: numbers, tensors or tuples of them."""
    if isinstance(a, tuple | list) or isinstance(b, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def difference(exercise: Exercise, case: str, output: Any, right: Any) -> str:
    """What distinguishes an output from the right one, in words."""
    where = f"In the case '{case}'"
    if exercise.observe is properties:
        missing = [name for name, a, b in zip(PROPERTIES, output, right, strict=True) if a != b]
        return f"{where}, this is not so: {', '.join(missing)}."
    if exercise.observe is weights_after:
        if same(output[:ACTOR], right[:ACTOR]):
            return f"{where}, the critic's weights are wrong, the actor's are right."
        if same(output[ACTOR:], right[ACTOR:]):
            return f"{where}, the actor's weights are wrong, the critic's are right."
        return f"{where}, the weights of both networks are wrong."
    if exercise.observe is with_gradient:
        if same(output[0], right[0]):
            return f"{where}, the loss is right, but its gradient is not."
        output, right = output[0], right[0]
    if output is None:
        return "Nothing is returned."
    if isinstance(right, tuple):
        if not isinstance(output, tuple) or len(output) != len(right):
            return f"Return a tuple of {len(right)}."
        index = next(i for i, (a, b) in enumerate(zip(output, right, strict=True)) if not same(a, b))
        where = f"{where}, of number {index + 1} of the tuple"
        output, right = output[index], right[index]
    if not isinstance(output, Tensor | int | float):
        return f"{where}, the type is {type(output).__name__}: return a tensor."
    output, right = torch.as_tensor(output), torch.as_tensor(right)
    if output.shape != right.shape:
        return f"{where}, the shape is {list(output.shape)}, where {list(right.shape)} is asked."
    if (output.dtype == torch.bool) != (right.dtype == torch.bool):
        return f"{where}, the dtype is {output.dtype}, where {right.dtype} is asked."
    if right.dtype == torch.bool:
        return f"{where}, {int((output != right).sum())} of {right.numel()} are wrong."
    if output.isnan().any():
        return f"{where}, there is NaN."
    if same(output, -right):
        return "The sign."
    factors = (output / right)[right != 0]
    if len(factors) > 1 and same(factors, factors[0].expand_as(factors)):
        return f"{where}, the result is {factors[0]:.4g} times the right one."
    wrong = (output - right).abs() > 1e-5 + 1e-4 * right.abs()
    return f"{where}, {int(wrong.sum())} of {right.numel()} numbers are wrong."


def show(exercise: Exercise, case: str, output: Any, right: Any) -> str:
    """The inputs of a case, and both outputs."""
    if exercise.observe not in (Exercise.observe, with_gradient):
        return ""
    inputs = ", ".join(words(x) for x in exercise.cases[case])
    if exercise.observe is with_gradient:
        output, right = (f"{words(x[0])}, with the gradient {words(x[1])}" for x in (output, right))
    else:
        output, right = words(output), words(right)
    return f"case:   {case}\ninputs: {inputs}\nyours:  {output}\nright:  {right}"


def words(x: Any) -> str:
    """A number, or a tensor as a list of rounded numbers."""
    if isinstance(x, tuple):
        return ", ".join(words(part) for part in x)
    if isinstance(x, Tensor):
        if x.is_floating_point():
            x = (x.detach().double() * 1e4).round() / 1e4
        return str(x.tolist())
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def load(path: Path) -> ModuleType:
    """Import a file as a module."""
    spec = importlib.util.spec_from_file_location("learner", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
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
            print(f"\n{found.details}\n")
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
        passed, answer = bugs.judge(number, args.line)
        print(answer)
        sys.exit(not passed)
    unknown = [name for name in args.names if name not in EXERCISES]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}. There are: {NAMES}, and bug 1 to bug {len(bugs.BUGS)}")
    sys.exit(not grade_functions(args.names, args.file))


if __name__ == "__main__":
    main()
