"""Make scripts, benchmarks and helper modules importable; one thread, as the scripts have by default."""

import pathlib
import sys

import torch

tests = pathlib.Path(__file__).parent
sys.path[:0] = [str(tests), str(tests.parent), str(tests.parent / "benchmarks")]
torch.set_num_threads(1)
