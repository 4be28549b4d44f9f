"""Calls in two halves, which overlap with computation on a GPU."""
from typing import Any, Callable, Iterator, Tuple

from . import calls


class Pending:
    """A call that has begun, of `Dispatcher.begin_combine` or begin_dispatch. Keeps its tensors. If it is dropped or closed,
    the call ends without results."""

    def __init__(self, call: Any, results: Callable[[], Any]):
        self._call: Any = call
        self._results: Any = results

    def finish(self) -> Any:
        """The results, with their gradients. On a GPU, torch's current stream waits for the call; the host does not."""
        if self._call is None:
            raise ValueError("the call has been finished already")
        calls.finish(self._call)
        results, self._call, self._results = self._results, None, None
        return results()

    def close(self) -> None:
        """Ends the call without results, as dropping it does. Does nothing after finish."""
        call, self._call, self._results = self._call, None, None
        if call is not None:
            calls.drop(call)

    def __enter__(self) -> "Pending":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class PendingDispatch(Pending):
    """A dispatch that has begun."""

    def __init__(self, call: Any, results: Callable[[], Any], arriving: Any):
        super().__init__(call, results)
        self._arriving = arriving

    def chunks(self) -> Iterator[Tuple[Any, int, int]]:
        """Yields (arrived, first_expert, last_expert) for every chunk of local experts, in order: in `arrived`, the rows and
        weights of these experts are complete. On a GPU, torch's current stream waits for them; the host does not. The rows of
        later chunks must not be used yet. They have no gradients before `finish`. On the CPU there is one chunk."""
        while self._call is not None:
            chunk = calls.next_chunk(self._call)
            if chunk is None:
                return
            yield (self._arriving, *chunk)
