"""Recorder of a step under fake tensors: when each storage lives, and what each kernel does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, groupby, pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from raypipe.training.parallel import local

#: kernels that read of their first tensor only the values that they return
_LOOKUPS = frozenset(("embedding", "index", "index_select", "gather", "take_along_dim"))
#: kernels that overwrite their first tensor without reading it
_FILLS = frozenset(("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_"))
#: functions without a kernel
_NO_KERNEL = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))


@dataclass(frozen=True)
class Kernel:
    """A kernel: its FLOPs, the bytes that it reads and writes, and those exchanged with others.

    ``dtype`` is that of its matrix products, empty without any. ``waits`` says that the host waits
    for its result, ``repeats`` that it recomputes what the forward pass had computed.
    """

    name: str
    flops: float = 0.0
    bytes: int = 0
    exchanged: float = 0.0
    dtype: str = ""
    waits: bool = False
    repeats: bool = False


@dataclass(eq=False)
class Recording:
    """Storages and kernels of a step, in their order; compared by identity.

    ``events`` has (storage, bytes): a storage that begins, or ends with 0 bytes. ``parts`` names
    the use of a storage, if it is known. ``kernels`` are by section: the ``first`` micro-batch of
    the step, a ``further`` one that accumulates gradients, and the ``update``. ``span`` are the
    events of the last micro-batch.
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    parts: dict[int, str] = field(default_factory=dict)
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)
    span: tuple[int, int] = (0, 0)

    def in_order(self) -> Recording:
        """Return the recording with storages that end together in the order of their beginning.

        Autocast frees its copies of weights in no fixed order.
        """
        bounds = (0, *self.span, len(self.events))
        events: list[tuple[int, int]] = []
        for first, last in pairwise(bounds):
            for begins, group in groupby(self.events[first:last], key=lambda event: event[1] > 0):
                together = list(group)
                events += together if begins else sorted(together)
        return replace(self, events=events)

    @cached_property
    def flops(self) -> float:
        """The model FLOPs of a micro-batch: each operation once, without recomputation."""
        return sum(kernel.flops for kernel in self.kernels["first"] if not kernel.repeats)

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients before the update."""
        held = living(self.events[: self.span[1]]).items()
        return sum(size for number, size in held if self.parts.get(number) == "gradients")

    def in_buckets(self) -> Recording:
        """Return the recording with gradients in DDP's buckets, which are not part of it.

        A gradient ends as soon as it is computed: it is copied to its bucket.
        """
        events: list[tuple[int, int]] = []
        for number, size in self.events:
            if self.parts.get(number) != "gradients":
                events.append((number, size))
            elif size:
                events += [(number, size), (number, 0)]
        return replace(self, events=events, span=(0, 0))


class Recorder(TorchDispatchMode):
    """Mode that records storages and kernels; inside of ``FakeTensorMode``.

    ``section`` is that of what comes next; ``backward`` is whether it belongs to a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.section, self.backward = "first", False
        self._live: dict[int, tuple[int, Any]] = {}  # by the identity of a storage
        self._sizes: dict[int, int] = {}
        self._numbers = count(1)

    def adopt(self, tensors: Iterable[Tensor], part: str) -> None:
        """Record tensors that exist already, such as weights."""
        for tensor in tensors:
            self._see(local(tensor.detach()))
            self.name([tensor], part)

    def name(self, tensors: Iterable[Tensor], part: str) -> None:
        """Name the use of the storages of tensors."""
        for tensor in tensors:
            found = self._live.get(id(local(tensor).untyped_storage()))
            if found is not None:
                self.recording.parts[found[0]] = part

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator and record it; of sharded tensors, what it calls on the local parts."""
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            constant = getattr(args[0], "constant", None)  # a number on the host
            if constant is not None:
                return constant.item()
            self._add(Kernel(name, waits=True))
            return 1.0 if args[0].dtype.is_floating_point else 1  # fake tensors have no values
        result = func(*args, **kwargs)
        outputs, inputs = list(tensors_in(result)), list(tensors_in((args, kwargs)))
        for tensor in outputs:
            self._see(tensor)
        if name in _NO_KERNEL or func.namespace == "prim":
            return result
        if func.namespace in ("c10d", "_c10d_functional"):
            size = max(map(_touched, (*inputs, *outputs)), default=0)
            self._add(Kernel(name, exchanged=size))
            return result
        mutated = list(_mutated(func, args, kwargs))
        known = {id(each.untyped_storage()) for each in inputs}
        fresh = [each for each in outputs if id(each.untyped_storage()) not in known]
        if not fresh and not mutated:
            return result  # a view
        writes = [_touched(each) for each in (*fresh, *mutated)]
        reads = [_touched(each) for each in inputs]
        if name in _LOOKUPS and reads:
            reads[0] = writes[0]
        elif name in _FILLS:
            del reads[:1]
        packet, flops, kind = func._overloadpacket, 0.0, ""
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
            if name.endswith("_attention_backward"):
                flops *= 4 / 5  # it repeats the product of queries and keys
            kind = str(inputs[0].dtype).removeprefix("torch.")
        if scratch := _scratch(name, inputs):
            number = next(self._numbers)
            self._resize(number, scratch)
            self._resize(number, 0)
        # autograd's own kernels run without gradients
        repeats = self.backward and torch.is_grad_enabled()
        self._add(Kernel(name, flops, sum((*reads, *writes)), dtype=kind, repeats=repeats))
        return result

    def _add(self, kernel: Kernel) -> None:
        self.recording.kernels.setdefault(self.section, []).append(kernel)

    def _see(self, tensor: Tensor) -> None:
        """Record a storage at its first appearance."""
        storage = tensor.untyped_storage()
        identity = id(storage)  # torch keeps one object per storage, as long as that lives
        if identity not in self._live:
            number = next(self._numbers)
            self._resize(number, storage.nbytes())

            def gone(_: Any, number: int = number, identity: int = identity) -> None:
                if self._live.get(identity, (0, None))[0] == number:
                    del self._live[identity]
                self._resize(number, 0)

            self._live[identity] = number, weakref.ref(storage, gone)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage."""
        found = self._live.get(id(storage))
        if found is not None:
            self._resize(found[0], 0)
            self._resize(found[0], storage.nbytes())

    def _resize(self, number: int, size: int) -> None:
        """Record that a storage begins with a size, or ends with 0."""
        if size or self._sizes.get(number):
            self.recording.events.append((number, size))
        self._sizes[number] = size


@contextmanager
def recorded_resizes(recorder: Recorder) -> Iterator[None]:
    """Record resizes of storages, with which FSDP frees weights: they are not operators."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        done = original(storage, size)
        recorder.resized(storage)
        return done

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def living(events: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the sizes of the storages that live after some events."""
    return {number: size for number, size in dict(events).items() if size}


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from tensors_in(given)


def _touched(tensor: Tensor) -> int:
    """Return the bytes of a tensor that a kernel touches: expanded ones once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _scratch(name: str, inputs: Sequence[Tensor]) -> int:
    """Return the bytes that a kernel allocates for itself, as torch's source does.

    The logarithm of a sum of exponentials needs a copy of its input. Backward passes of attention
    sum the gradient of the queries in single precision, and keep a number per query.
    """
    if name == "logsumexp":
        return inputs[0].numel() * inputs[0].element_size()
    if name == "_scaled_dot_product_flash_attention_backward":
        batch, heads, length, width = inputs[1].shape
        rounded = -(-length // 128) * 128
        return 4 * batch * heads * rounded * (1 + -(-width // 32) * 32)
    if name == "_scaled_dot_product_efficient_attention_backward":
        batch, heads, length, width = inputs[1].shape
        single = 0 if inputs[1].dtype == torch.float32 else width
        return 4 * batch * heads * length * (1 + single)
    return 0
