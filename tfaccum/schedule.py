"""K by update: windows may grow while training goes on."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Union

from tfaccum.batching import check_count

_NAME = "gradient_accumulation_steps"

Steps: TypeAlias = Union[int, Sequence[tuple[int, int]], Callable[[int], int]]


class AccumulationSchedule:
    """How many dataset batches make the next update.

    Args:
        steps: K; or pairs (update, K), from which update on which K holds, the
            first from 0; or a function from the number of updates made to K.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if K is less than 1, or the pairs do not begin at update 0
            and rise.
    """

    def __init__(self, steps: Steps):
        self._function = steps if callable(steps) else None
        pairs = [(0, steps)] if isinstance(steps, int) else steps
        self._pairs: list[tuple[int, int]] = []
        if self._function is not None:
            return
        try:
            self._pairs = [(update, k) for update, k in pairs]  # type: ignore[union-attr]
        except (TypeError, ValueError):
            raise TypeError(
                "`gradient_accumulation_steps` must be an int, a list of "
                "(update, K), or a function. Received: "
                f"gradient_accumulation_steps={steps!r} of type "
                f"{type(steps).__name__}."
            ) from None
        for _, k in self._pairs:
            check_count(_NAME, k)
        updates = [update for update, _ in self._pairs]
        if updates[:1] != [0] or any(
            not isinstance(later, int) or later <= earlier
            for earlier, later in zip(updates, updates[1:], strict=False)
        ):
            raise ValueError(
                "`gradient_accumulation_steps` must begin at update 0 and "
                "rise. Received: gradient_accumulation_steps="
                f"{self._pairs}. Write for instance [(0, 2), (1000, 8)]."
            )

    def at(self, update: int) -> int:
        """K of the window after so many updates."""
        if self._function is not None:
            return check_count(_NAME, self._function(update))
        return [k for start, k in self._pairs if start <= update][-1]

    @property
    def largest(self) -> int | None:
        """The largest K; None where a function tells."""
        return max((k for _, k in self._pairs), default=None)

    @property
    def is_constant(self) -> bool:
        """Whether every update has the same K."""
        return len(self._pairs) == 1

    @property
    def is_always_one(self) -> bool:
        """Whether no window ever has a second batch."""
        return self._function is None and {k for _, k in self._pairs} == {1}

    def __str__(self) -> str:
        """`8`; or `2, 8 from update 1000`; or the name of the function."""
        if self._function is not None:
            return getattr(
                self._function, "__qualname__", type(self._function).__name__
            )
        first, *others = self._pairs
        return ", ".join(
            [str(first[1]), *(f"{k} from update {u}" for u, k in others)]
        )


def updates_alike(of: Callable[[int], Any], update: int, most: int) -> int:
    """Updates from here on for which `of` says the same, up to `most`."""
    number = 1
    while number < most and of(update + number) == of(update):
        number += 1
    return number
