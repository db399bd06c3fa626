"""The micro-batches of one step, remembered so that they can be handed out again."""

from __future__ import annotations

import copy
import copyreg
import enum
import types
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

# Nobody can change what is in these.
_FIXED = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    range,
    enum.Enum,
    type,
    types.FunctionType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
    dist.ProcessGroup,
)


class Batches:
    """What a step's data iterators have handed out.

    A forward step takes its micro-batches with `next`, from Megatron's loaders, from its
    RerunDataIterator or from any other iterator.  They are kept until the step ends: no loader has
    to be rewound, and each has moved on by one step whether or not the step was run again.

    Containers and objects are copied, because forward steps move their tensors to the GPU inside
    them, and so are arrays.  Tensors are not: whoever changes one in place is noticed by its
    version.
    """

    def __init__(self, data_iterator: Any) -> None:
        """`data_iterator`: the schedule's argument, an iterator, None, or a list of them."""
        self._is_list = isinstance(data_iterator, list)
        sources = data_iterator if self._is_list else [data_iterator]
        self._taken = [None if source is None else _Taken(source) for source in sources]

    def first(self) -> Any:
        """The argument for the first run."""
        return self._like_the_argument(self._taken)

    def again(self) -> Any:
        """The argument for a run with the same micro-batches, in the same order."""
        return self._like_the_argument(
            [None if taken is None else taken.again() for taken in self._taken]
        )

    def problem(self, is_reader: list[bool], num_microbatches: int) -> str | None:
        """Say why the step could not be run again with the same data, if it could not, and what
        would help.

        Args:
            is_reader: for each part of the model, whether its forward step needs data that this
                rank has to get.
            num_microbatches: of the step.
        """
        for needs_data, taken in zip(is_reader, self._taken, strict=False):
            if needs_data and (taken is None or not taken.items):
                how = "has no data iterator" if taken is None else "does not use its data iterator"
                return (
                    f"the forward step {how}, and where else its data comes from is unknown: give "
                    "the schedule a data iterator, which hands out each micro-batch with next()"
                )
            if taken is not None and (problem := taken.problem(num_microbatches)):
                return problem
        return None

    def _like_the_argument(self, iterators: list[Any]) -> Any:
        return iterators if self._is_list else iterators[0]


class _Taken:
    """An iterator that remembers what it hands out.

    Attributes:
        items: copies of the micro-batches handed out so far: containers and objects of their own,
            the same tensors.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.items: list[Any] = []
        self._unknown: str | None = None  # the type of an object that could not be copied
        # Of each tensor when it was copied: whoever changes one in place raises it.
        self._versions: list[tuple[torch.Tensor, int]] = []

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self.items.append(self._copied(item, {}))
        return item

    def again(self) -> Any:
        return (self._copied(item, {}) for item in self.items)

    def problem(self, num_microbatches: int) -> str | None:
        """See `Batches.problem`."""
        taken = len(self.items)
        if taken not in (0, num_microbatches):
            return (
                f"the forward step took {taken} micro-batches from its data iterator in a step of "
                f"{num_microbatches}, so it uses some in another step than the one that takes "
                "them: let each forward step use the micro-batch that it takes; an iterator that "
                "fetches ahead belongs around the loader, and into the schedule's data_iterator"
            )
        if self._unknown is not None:
            return (
                f"a micro-batch holds an object of type {self._unknown}, and whether a step "
                "changes what is in it is unknown: hand out tensors, arrays, numbers and strings, "
                "in dicts, lists, tuples, dataclasses or objects with attributes"
            )
        if any(tensor._version != version for tensor, version in self._versions):
            return (
                "a tensor of a micro-batch was changed in place after the data iterator had "
                "handed it out (by the forward step, or by a loader that uses its buffers "
                "again within a step): let it change a copy"
            )
        return None

    def _copied(self, item: Any, done: dict[int, Any]) -> Any:
        """A copy of a micro-batch; `done`: the copies so far by the `id` of what they are of."""
        if isinstance(item, _FIXED):
            return item
        if id(item) in done:
            return done[id(item)]
        if isinstance(item, torch.Tensor):
            if item.is_inference():  # such a tensor has no version
                with torch.inference_mode():
                    return item.clone()
            if item.layout is torch.strided and not item.untyped_storage().resizable():
                # Somebody else's memory, such as an array's, whose changes are not seen.
                return item.clone()
            self._versions.append((item, item._version))
            return item
        if type(item) in (set, frozenset) or type(item).__new__ is tuple.__new__:
            new = type(item)(self._copied(value, done) for value in item)
        elif isinstance(item, tuple) and hasattr(item, "_make"):
            new = item._make(self._copied(value, done) for value in item)
        else:
            new = self._copied_object(item, done)
        done[id(item)] = new
        return new

    def _copied_object(self, item: Any, done: dict[int, Any]) -> Any:
        """A copy of an array, a dict, a list or an object with attributes."""
        dtype = getattr(item, "dtype", None)
        is_array = type(item).__module__ == "numpy" and not getattr(dtype, "hasobject", True)
        names = copyreg._slotnames(type(item))  # type: ignore[attr-defined]
        has_attributes = hasattr(item, "__dict__") or names
        is_hashed = type(item).__hash__ not in (None, object.__hash__)
        if is_hashed and not has_attributes and not isinstance(item, Collection):
            return item  # a value, such as a date
        try:
            new = copy.copy(item)
        except Exception:  # whatever a class raises whose objects have no copies
            new = item
        if is_array:
            return new
        if new is item or not (has_attributes or isinstance(item, dict | list)):
            self._unknown = f"{type(item).__module__}.{type(item).__qualname__}"
            return item
        done[id(item)] = new  # its attributes may lead back to it
        if isinstance(item, dict):
            for key, value in item.items():
                dict.__setitem__(new, key, self._copied(value, done))
        elif isinstance(item, list):
            new[:] = [self._copied(value, done) for value in item]
        for name, value in getattr(item, "__dict__", {}).items():
            vars(new)[name] = self._copied(value, done)
        for name in names:
            if hasattr(item, name):
                object.__setattr__(new, name, self._copied(getattr(item, name), done))
        return new
