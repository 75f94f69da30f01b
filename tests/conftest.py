"""Make scripts, benchmarks and helper modules importable. Use one thread, as the scripts do by default."""

import pathlib
import sys
from types import SimpleNamespace

import pytest
import torch

tests = pathlib.Path(__file__).parent
sys.path[:0] = [str(tests), str(tests.parent), str(tests.parent / "benchmarks")]
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked `nightly`, too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """`trained(case)` is a short run of a script, which tests look at or copy, but do not change."""
    import helpers

    runs = {}

    def get(case):
        if case not in runs:
            folder = tmp_path_factory.mktemp(repr(case))
            printed, path = helpers.run(case, folder).out, helpers.checkpoint_in(folder)
            seeds = helpers.user_envs.LOG["seeds"][1:5]
            runs[case] = SimpleNamespace(folder=folder, checkpoint=path, printed=printed, seeds=seeds)
        return runs[case]

    return get
