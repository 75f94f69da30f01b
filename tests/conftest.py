"""Make the scripts and the helper modules importable; one thread, as the scripts have by default."""

import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent.parent)]
torch.set_num_threads(1)
