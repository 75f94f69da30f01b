"""This emulates CUDA graphs on a CPU, in the place of torch.cuda's `CUDAGraph` and `graph`.

Capture: Python runs once, without an effect. Each operation is kept with the memory that it reads and writes
(storage, offset, shape and strides), not with tensors. Memory that was allocated before is held by weak
references, as a GPU holds an address. Memory allocated during capture is the graph's own, and is garbage
until the first replay.

Replay: the same operations on the same memory; Python does not run. `FreedError` is raised where a replay
would touch memory that has been freed since, and `CaptureError` where a real capture would fail: at
operations that wait for the device, whose result's shape depends on data, or that make a tensor of Python's
numbers. It cannot see a copy between devices: here there is one.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FORBIDDEN = {
    "_local_scalar_dense", "_pin_memory", "_unique2", "allclose", "argwhere", "bincount", "equal",
    "is_nonzero", "lift_fresh", "masked_select", "nonzero", "nonzero_numpy", "repeat_interleave",
    "unique_consecutive", "unique_dim",
}  # fmt: skip


class CaptureError(RuntimeError):
    """A CUDA graph cannot have this operation."""


class FreedError(RuntimeError):
    """A replay would use memory that has been freed."""


def tensors_in(tree):
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def storage_of(x):
    return x.untyped_storage()


class Address:
    """The place of a tensor in memory."""

    def __init__(self, x, user):
        self.storage, self.dtype, self.user = StorageWeakRef(storage_of(x)), x.dtype, user
        self.geometry = x.storage_offset(), x.shape, x.stride()

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            shape = [*self.geometry[1]]
            raise FreedError(f"{self.user}: its {self.dtype} {shape} was freed after the capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.geometry)


class CUDAGraph(TorchDispatchMode):
    """Operations that can be repeated, as `torch.cuda.CUDAGraph` does."""

    def __init__(self):
        super().__init__()
        self.calls, self.own, self.before = [], {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.refuse(function, args, kwargs)
        self.keep_what_is_overwritten(function, args, kwargs)
        addresses = tree_map(
            lambda x: Address(x, function) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        used = {storage_of(x)._cdata for x in tensors_in((args, kwargs))}
        results, made = function(*args, **kwargs), []
        for x in tree_flatten(results)[0]:
            is_new = isinstance(x, torch.Tensor) and storage_of(x)._cdata not in used
            if is_new:
                self.own[storage_of(x)._cdata] = storage_of(x)
            made.append(Address(x, function) if is_new else None)
        self.calls.append((function, addresses, made))
        return results

    def refuse(self, function, args, kwargs):
        """Raise `CaptureError` for operations that no graph can have."""
        name = function._schema.name.split("::")[1]
        by_mask = name.lstrip("_").startswith("index") and any(
            x.dtype is torch.bool for x in tensors_in(args[1:2])
        )
        generator = any(isinstance(x, torch.Generator) for x in tree_flatten((args, kwargs))[0])
        if name in FORBIDDEN or by_mask or generator:
            raise CaptureError(f"{function} cannot be part of a CUDA graph")

    def keep_what_is_overwritten(self, function, args, kwargs):
        """Keep the content of memory from before the capture that this operation writes to."""
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tensors_in(args[i] if i < len(args) else kwargs.get(argument.name)):
                    key = storage_of(x)._cdata
                    if key not in self.own and key not in self.before:
                        self.before[key] = storage_of(x), storage_of(x).clone()

    def finish(self):
        """Undo all effects of the capture."""
        for storage, old in self.before.values():
            storage.copy_(old)
        self.before = {}
        for storage in self.own.values():
            storage.fill_(255)  # NaN, -1 or True

    @torch.no_grad()
    def replay(self):
        """Repeat the operations on the same memory."""
        for function, addresses, made in self.calls:
            args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Address) else x, addresses)
            results = tree_flatten(function(*args, **kwargs))[0]
            for address, x in zip(made, results, strict=True):
                if address is not None:
                    address.tensor().copy_(x)


class graph:
    """A context that captures the operations in its block, as `torch.cuda.graph` does."""

    def __init__(self, cuda_graph, **kwargs):
        self.graph = cuda_graph

    def __enter__(self):
        self.random = torch.get_rng_state()
        self.graph.__enter__()

    def __exit__(self, *error):
        self.graph.__exit__(*error)
        torch.set_rng_state(self.random)
        self.graph.finish()
