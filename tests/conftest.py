"""Make scripts, benchmarks and helper modules importable; one thread, as the scripts have by default."""

import pathlib
import sys
from types import SimpleNamespace

import pytest
import torch

tests = pathlib.Path(__file__).parent
sys.path[:0] = [str(tests), str(tests.parent), str(tests.parent / "benchmarks")]
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """`trained(case)` is a short run of a script, for all tests that only look at it or copy it."""
    import helpers

    runs = {}

    def get(case):
        if case not in runs:
            folder = tmp_path_factory.mktemp(repr(case))
            printed, path = helpers.run(case, folder).out, helpers.checkpoint_in(folder)
            seeds = helpers.user_envs.LOG["seeds"][:4]
            runs[case] = SimpleNamespace(folder=folder, checkpoint=path, printed=printed, seeds=seeds)
        return runs[case]

    return get
