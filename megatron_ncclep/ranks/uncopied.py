"""Objects that a module may hold, but that exist once in a process."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_ncclep.errors import UnsupportedError


class Uncopied:
    """Copies of a module (`copy.deepcopy`, EMA) use the same object; it cannot be saved.

    It stands for a communicator, memory that other ranks write to, and process groups: a copy could
    have none of them.  Once one of the modules closes it, it is closed for all.
    """

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} cannot be pickled, because it belongs to this process and its "
            "group of ranks: save model.state_dict() in place of the model, and build the model "
            "again before you load it"
        )
