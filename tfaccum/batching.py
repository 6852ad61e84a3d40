"""The arithmetic of one update: global = micro x replicas x K.

This module knows integers and nothing else. It imports only the standard
library, so that a launcher can refuse an impossible plan before TensorFlow
has started.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping

_GLOBAL = "global_batch_size"
_MICRO = "micro_batch_size"
_REPLICAS = "num_replicas"
_STEPS = "gradient_accumulation_steps"
_FACTORS = (_MICRO, _REPLICAS, _STEPS)
_NAMES = (_GLOBAL, *_FACTORS)
_LAW = f"{_MICRO} x {_REPLICAS} x {_STEPS}"


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How many examples stand behind one update, and how they are cut.

    The four numbers always satisfy

    ```
    global_batch_size
        == micro_batch_size * num_replicas * gradient_accumulation_steps
    ```

    and a plan that does not is refused when it is made. Make one with
    `BatchPlan.derive`, which needs the number of replicas and any two of the
    other three:

    ```
    plan = BatchPlan.derive(
        num_replicas=4, global_batch_size=512, micro_batch_size=16
    )
    plan.gradient_accumulation_steps  # 8
    plan.dataset_batch_size           # 64
    print(plan.describe())
    ```

    Attributes:
        global_batch_size: Examples behind one update, all replicas and
            micro-steps together. At least 1.
        micro_batch_size: Examples that one replica sees in one
            forward-backward pass. At least 1.
        num_replicas: Model copies, over all workers. At least 1.
        gradient_accumulation_steps: Micro-steps behind one update, K. At
            least 1.
        sources: Where each number came from, by its name, for example
            `{"global_batch_size": "--global_batch"}`. Quoted in errors; takes
            no part in comparison. Default empty.
    """

    global_batch_size: int
    micro_batch_size: int
    num_replicas: int
    gradient_accumulation_steps: int
    sources: Mapping[str, str] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Checks all four numbers and that they belong together.

        Raises:
            TypeError: If a number is not an int.
            TypeError: If `sources` is not a mapping from str to str.
            ValueError: If a number is less than 1.
            ValueError: If `sources` names something that is not a number of
                the plan.
            ValueError: If the global batch is not the product of the others.
        """
        sources = _checked_sources(self.sources)
        values = {
            name: _checked_int(name, getattr(self, name), sources)
            for name in _NAMES
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "sources", sources)
        product = _product(values, _FACTORS)
        if values[_GLOBAL] != product:
            micro, replicas, steps = (values[name] for name in _FACTORS)
            raise ValueError(
                f"`{_GLOBAL}` must equal {_LAW}, but {values[_GLOBAL]} != "
                f"{micro} x {replicas} x {steps} (= {product}). "
                f"Received: {_quote(values, _origins(sources))}. "
                f"{_advice(values, derived=None)}"
            )

    @classmethod
    def derive(
        cls,
        *,
        num_replicas: int,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        gradient_accumulation_steps: int | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> "BatchPlan":
        """Makes the plan from the number of replicas and two of the others.

        All three may be given too; then they have to agree.

        Args:
            num_replicas: Model copies over all workers, at least 1. Take it
                from the strategy (`strategy.num_replicas_in_sync`) after the
                strategy exists.
            global_batch_size: Examples behind one update, at least 1, or
                None to derive it. Default None.
            micro_batch_size: Examples that one replica sees in one
                forward-backward pass, at least 1, or None to derive it.
                Default None.
            gradient_accumulation_steps: Micro-steps behind one update, at
                least 1, or None to derive it. Default None.
            sources: Where each given number came from, by the name of the
                argument. Quoted in errors. Default None.

        Returns:
            The plan with all four numbers.

        Raises:
            TypeError: If a number is not an int.
            TypeError: If `sources` is not a mapping from str to str.
            ValueError: If a number is less than 1.
            ValueError: If `sources` names something that is not a number of
                the plan.
            ValueError: If fewer than two of the three sizes are given.
            ValueError: If the missing number would not be whole.
            ValueError: If all are given and do not agree.
        """
        named = _checked_sources({} if sources is None else sources)
        received = {
            _GLOBAL: global_batch_size,
            _MICRO: micro_batch_size,
            _REPLICAS: num_replicas,
            _STEPS: gradient_accumulation_steps,
        }
        given = {
            name: _checked_int(name, value, named)
            for name, value in received.items()
            if value is not None or name == _REPLICAS
        }
        missing = [name for name in _NAMES if name not in given]
        if len(missing) > 1:
            raise ValueError(
                f"Two of `{_GLOBAL}`, `{_MICRO}` and `{_STEPS}` must be given, "
                f"so that {_GLOBAL} = {_LAW} has one solution. "
                f"Received: {_quote(received, _origins(named))}. "
                f"{_what_to_give(missing)}"
            )
        if missing == [_GLOBAL]:
            given[_GLOBAL] = _product(given, _FACTORS)
        elif missing:
            given[missing[0]] = _whole_quotient(missing[0], given, named)
        return cls(**given, sources=named)

    @property
    def dataset_batch_size(self) -> int:
        """Examples in one element of the dataset: micro-batch x replicas.

        This is what the dataset yields when K of its batches make one update
        (`gradient_accumulation_steps=K`).
        """
        return self.micro_batch_size * self.num_replicas

    def batches_per_epoch(self, num_examples: int) -> int:
        """Counts the dataset batches of an epoch, a short last one included.

        Args:
            num_examples: Examples in one epoch, over all workers, at least 0.

        Returns:
            `ceil(num_examples / dataset_batch_size)`.

        Raises:
            TypeError: If `num_examples` is not an int.
            ValueError: If `num_examples` is negative.
        """
        count = _checked_int("num_examples", num_examples, {}, minimum=0)
        return _ceil_div(count, self.dataset_batch_size)

    def updates_per_epoch(self, num_examples: int) -> int:
        """Counts the updates of an epoch, a short last window included.

        The length of a learning-rate schedule over `epochs` epochs is
        `epochs * plan.updates_per_epoch(num_examples)`.

        Args:
            num_examples: Examples in one epoch, over all workers, at least 0.

        Returns:
            `ceil(num_examples / global_batch_size)`.

        Raises:
            TypeError: If `num_examples` is not an int.
            ValueError: If `num_examples` is negative.
        """
        count = _checked_int("num_examples", num_examples, {}, minimum=0)
        return _ceil_div(count, self.global_batch_size)

    def windows(self, num_batches: int) -> int:
        """Counts the windows that a number of dataset batches makes.

        Each window makes one update, the short last one too.

        Args:
            num_batches: Dataset batches of one epoch, at least 0.

        Returns:
            `ceil(num_batches / gradient_accumulation_steps)`.

        Raises:
            TypeError: If `num_batches` is not an int.
            ValueError: If `num_batches` is negative.
        """
        count = _checked_int("num_batches", num_batches, {}, minimum=0)
        return _ceil_div(count, self.gradient_accumulation_steps)

    def describe(self) -> str:
        """Says the plan in one line, for the start of a run.

        Returns:
            For example "global batch 512 = 16 micro-batch x 4 replicas x 8
            micro-steps (8 dataset batches of 64)".
        """
        replicas = _count(self.num_replicas, "replica", "replicas")
        steps = self.gradient_accumulation_steps
        micro_steps = _count(steps, "micro-step", "micro-steps")
        batches = _count(steps, "dataset batch", "dataset batches")
        return (
            f"global batch {self.global_batch_size} = "
            f"{self.micro_batch_size} micro-batch x {replicas} x "
            f"{micro_steps} ({batches} of {self.dataset_batch_size})"
        )


def check_count(name: str, value: object) -> int:
    """Returns `value`, which has to be an int of at least 1.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"`{name}` must be an int. Received: {name}={value!r} of type "
            f"{type(value).__name__}."
        )
    if value < 1:
        raise ValueError(
            f"`{name}` must be at least 1. Received: {name}={value}."
        )
    return value


def _checked_int(
    name: str, value: object, sources: Mapping[str, str], minimum: int = 1
) -> int:
    """Returns `value` as an int of at least `minimum`, or says what is wrong.

    NumPy's integers are taken too; bool and whole floats are not.
    """
    origin = f" (from {sources[name]})" if name in sources else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"`{name}` must be an int. Received: {name}={value!r} of type "
            f"{type(value).__name__}{origin}. Give a whole number without a "
            "decimal point."
        )
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum}. "
            f"Received: {name}={value}{origin}. "
            f"Give a whole number from {minimum} up."
        )
    return int(value)


def _checked_sources(sources: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of `sources` after looking at its names and values."""
    if not isinstance(sources, Mapping):
        raise TypeError(
            "`sources` must be a mapping from the name of a number to where "
            f"it came from. Received: sources={sources!r}. "
            f'Give for example {{"{_GLOBAL}": "--global_batch"}}.'
        )
    for name, origin in sources.items():
        if name not in _NAMES:
            raise ValueError(
                f"`sources` must name only {', '.join(_NAMES)}. "
                f"Received: sources={dict(sources)!r}. Leave {name!r} out."
            )
        if not isinstance(origin, str):
            raise TypeError(
                "`sources` must hold a str for each number. "
                f"Received: sources={dict(sources)!r}. "
                f"Say in words where {name} came from."
            )
    return dict(sources)


def _whole_quotient(
    name: str, given: Mapping[str, int], sources: Mapping[str, str]
) -> int:
    """Returns the factor `name` that is missing, if it is a whole number."""
    others = [factor for factor in _FACTORS if factor != name]
    divisor = _product(given, others)
    quotient, rest = divmod(given[_GLOBAL], divisor)
    if not rest:
        return quotient
    share = given[_GLOBAL] / divisor
    exact = f"{share:.3f}" if quotient else f"{share:.3g}"
    product = " x ".join(str(given.get(factor, exact)) for factor in _FACTORS)
    values = {key: given.get(key, exact) for key in _NAMES}
    derivation = f"derived, {given[_GLOBAL]} / {divisor}, not whole"
    origins = {**_origins(sources), name: derivation}
    raise ValueError(
        f"`{_GLOBAL}` must be divisible by {' x '.join(others)} (= {divisor}), "
        f"but {given[_GLOBAL]} = {product} ({_LAW}) leaves a rest of {rest}. "
        f"Received: {_quote(values, origins)}. "
        f"{_advice(given, derived=name)}"
    )


def _advice(values: Mapping[str, int], derived: str | None) -> str:
    """Lists, for each given number, the nearest values that would be valid.

    One number is changed at a time and the other given ones stay.

    Args:
        values: The given numbers; without `derived`.
        derived: The name of the number to be derived, or None if all four
            were given and the change must make them agree.

    Returns:
        One sentence, for example "Change global_batch_size to 192 or 288; or
        micro_batch_size to 16 or 32.".
    """
    ways = []
    for name in _NAMES:
        if name == derived:
            continue
        nearest = _nearest_valid(name, values, derived)
        if nearest:
            ways.append(f"{name} to {' or '.join(map(str, nearest))}")
    return f"Change {'; or '.join(ways)}."


def _nearest_valid(
    name: str, values: Mapping[str, int], derived: str | None
) -> list[int]:
    """Returns up to two values of `name` that are valid, nearest around it."""
    fixed = [key for key in _FACTORS if key not in (name, derived)]
    divisor = _product(values, fixed)
    if name == _GLOBAL:
        if derived is None:
            return [divisor]
        below = values[_GLOBAL] // divisor * divisor
        return [size for size in (below, below + divisor) if size]
    quotient, rest = divmod(values[_GLOBAL], divisor)
    if rest:
        return []
    if derived is None:
        return [quotient]
    return _nearest_divisors(quotient, values[name])


def _nearest_divisors(number: int, around: int) -> list[int]:
    """Returns the divisors of `number` next below and next above `around`."""
    small = [
        value
        for value in range(1, math.isqrt(number) + 1)
        if number % value == 0
    ]
    divisors = {*small, *(number // value for value in small)}
    below = [max(value for value in divisors if value <= around)]
    above = [value for value in divisors if value > around]
    return below + ([min(above)] if above else [])


def _origins(sources: Mapping[str, str]) -> dict[str, str]:
    """Words where each number came from, as errors say it."""
    return {name: f"from {origin}" for name, origin in sources.items()}


def _quote(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    """Writes every number with its value and where it came from."""
    return ", ".join(
        f"{name}=None (not given)"
        if value is None
        else f"{name}={value} ({origins.get(name, 'given')})"
        for name, value in values.items()
    )


def _what_to_give(missing: list[str]) -> str:
    """Says which of the missing numbers to give."""
    sizes = [f"`{name}`" for name in missing]
    if len(sizes) == 2:
        return f"Give {sizes[0]} or {sizes[1]} as well."
    return f"Give two of {', '.join(sizes)}."


def _product(values: Mapping[str, int], names: Iterable[str]) -> int:
    """Multiplies the named values."""
    return math.prod(values[name] for name in names)


def _ceil_div(number: int, divisor: int) -> int:
    """Divides and rounds up, exactly for integers of any size."""
    return -(-number // divisor)


def _count(number: int, one: str, many: str) -> str:
    """Writes a number with its noun."""
    return f"{number} {one if number == 1 else many}"
