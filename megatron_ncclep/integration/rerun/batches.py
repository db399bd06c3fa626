"""The micro-batches of one step, remembered so that they can be handed out again."""

from __future__ import annotations

from typing import Any

import torch


class Batches:
    """What a step's data iterators have handed out.

    A forward step takes its micro-batches with `next`, from Megatron's loaders, from its
    RerunDataIterator or from any other iterator.  They are kept until the step ends: no loader has
    to be rewound, and each has moved on by one step whether or not the step was run again.

    Containers are copied, because forward steps move their tensors to the GPU inside them.  Tensors
    are not: whoever changes one in place is noticed by its version.
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

    def problem(self, is_reader: list[bool]) -> str | None:
        """Say why the step could not be run again with the same data, if it could not.

        Args:
            is_reader: for each part of the model, whether its forward step needs data that this
                rank has to get.
        """
        for needs_data, taken in zip(is_reader, self._taken, strict=False):
            if taken is not None and taken.has_changed():
                return (
                    "a tensor of a micro-batch was changed in place after the data iterator had "
                    "handed it out (by the forward step, or by a loader that uses its buffers "
                    "again within a step)"
                )
            if needs_data and (taken is None or not taken.items):
                how = "has no data iterator" if taken is None else "does not use its data iterator"
                return f"the forward step {how}, and where else its data comes from is unknown"
        return None

    def _like_the_argument(self, iterators: list[Any]) -> Any:
        return iterators if self._is_list else iterators[0]


class _Taken:
    """An iterator that remembers what it hands out.

    Attributes:
        items: the micro-batches handed out so far.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.items: list[Any] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self.items.append(_copied(item))
        self._versions += [(t, t._version) for t in _tensors(item) if not t.is_inference()]
        return item

    def again(self) -> Any:
        return iter([_copied(item) for item in self.items])

    def has_changed(self) -> bool:
        """Whether a tensor has been changed in place since it was handed out."""
        return any(tensor._version != version for tensor, version in self._versions)


def _copied(item: Any) -> Any:
    """The item with its own containers and the same tensors."""
    if isinstance(item, dict):
        return {key: _copied(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_copied(value) for value in item)
    return item


def _tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    values: Any = ()
    if isinstance(item, dict):
        values = item.values()
    elif isinstance(item, list | tuple):
        values = item
    return [tensor for value in values for tensor in _tensors(value)]
