"""Python objects that own an object of the library."""
from typing import Any, NoReturn


class Owner:
    """Refuses copies and pickles: a copy would free the same object again, and other processes do not have it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a crossdock {type(self).__name__} belongs to its process and cannot be copied or pickled: make one where it "
            "is needed; of a model, save the state_dict"
        )


class Shared(Owner):
    """Copies share the object, as when a model that holds it is copied. Refuses pickles."""

    __slots__ = ()

    def __copy__(self) -> "Shared":
        return self

    def __deepcopy__(self, memo: dict) -> "Shared":
        return self
