"""Python objects that own an object of the library."""
import functools
from typing import Any, NoReturn


class Owner:
    """Frees its object of the library when the last reference is gone.

    Refuses copies and pickles: a copy would free the same object again, and other processes do not have it.

    `__del__` is a slot that holds a function, not a method: Python code in a finalizer would also run signal handlers,
    and Python discards the exception of a finalizer, so Ctrl-C would be lost. All of this function is C.
    """

    __slots__ = ("__del__",)

    def _own(self, destroy: Any, *args: Any) -> None:
        """The finalizer: destroy(*args). `destroy` is a function of the library."""
        self.__del__ = functools.partial(destroy, *args)

    def _disown(self) -> None:
        """There is nothing to free any more."""
        try:
            del self.__del__
        except AttributeError:
            pass

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
