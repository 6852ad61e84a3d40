"""Gradient freeze: in some updates the first layers do not train.

The layers are cut into blocks, and groups are nested suffixes of them: group 0
is everything, group i everything but the first `i * stride` blocks. Each
update trains one group, so that its backward pass ends where the group begins.

Source: `GradientFreeze` of MindSpore's `boost`, which names no paper.
"""

import functools
from fractions import Fraction
from typing import Any

import keras
import numpy as np

from tfaccum import keras_private
from tfaccum.batching import check_count

# A variable that does not join the block before it begins a new one where
# that one holds so many: the kernel, gamma and beta of a convolution.
BLOCK = 3
# Layers and names of variables that belong to what stands before them.
NORMALIZATIONS = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
)
FOLLOWERS = ("bias", "gamma", "beta")


@keras.saving.register_keras_serializable("tfaccum")
class GradientFreeze:
    """Which variables train in which update.

    ```
    model.compile(..., gradient_freeze=boost.GradientFreeze(groups=10))
    ```

    The blocks of a model: its trainable variables in the order of
    `model.trainable_variables`. A bias, and the gamma and beta of a
    normalization, join the current block. Any other variable begins a new one
    if the current one holds 3 or more, and joins it otherwise. With
    `stride = blocks // groups`, the first `i * stride` blocks are frozen in
    group i; the last block never is.

    The group of an update is a function of the number of updates made before
    it, the same on every worker:

    * type 0, continuous: `int(p * (groups - 1) / (1 - p))` updates of group 0,
      then 1, 2, ..., groups - 1, and again;
    * type 1, interval: group 0, then a frozen group wherever fewer than
      `1 - p` of the updates so far had one; which, is drawn: group j with
      probability `(groups - j) / (1 + 2 + ... + (groups - 1))`;

    where p is `full_step_fraction`, taken as the decimal number that was
    written. The sequence has `int(1.01 * total_updates)` entries (type 0: as
    many whole periods as that takes) and then begins anew.

    Args:
        groups: at least 2. The model needs as many blocks.
        freeze_type: 0 or 1.
        full_step_fraction: of the updates, in which everything trains; in
            [0, 1). Default 0.7: 30 % of the updates freeze something.
        total_updates: of the run, at least 1.
        seed: of type 1's draws, at least 0.
        freeze_p: MindSpore's name for `full_step_fraction`. It is documented
            there as the probability of freezing, and is its opposite.

    Raises:
        TypeError: if a count is not an int, or the fraction not a number.
        ValueError: if a value is out of its range, or both names of the
            fraction are given.

    Source: `GradientFreeze` of MindSpore's `boost`. There p = 0.7 and 10
    groups give type 0 20 updates of group 0, and here 21, because 0.7 * 9 is
    less than 6.3 in floating point; and type 1 freezes the update after 7 of
    10 that were full, because 1 - 0.7 is more than 0.3. There each worker
    draws a sequence of its own.
    """

    def __init__(
        self,
        groups: int = 10,
        freeze_type: int = 1,
        full_step_fraction: float | None = None,
        total_updates: int = 65536,
        seed: int = 0,
        *,
        freeze_p: float | None = None,
    ):
        if full_step_fraction is not None and freeze_p is not None:
            raise ValueError(
                "`full_step_fraction` and `freeze_p` must not be given both: "
                "they are two names of the fraction of updates in which "
                "everything trains. Received: full_step_fraction="
                f"{full_step_fraction}, freeze_p={freeze_p}."
            )
        given = full_step_fraction if freeze_p is None else freeze_p
        self.groups = check_count("groups", groups)
        self.freeze_type = freeze_type
        self.full_step_fraction = 0.7 if given is None else given
        self.total_updates = check_count("total_updates", total_updates)
        self.seed = seed
        self._check()

    def _check(self) -> None:
        fraction = self.full_step_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise TypeError(
                "`full_step_fraction` must be a number. Received: "
                f"full_step_fraction={fraction!r} of type "
                f"{type(fraction).__name__}."
            )
        if not 0 <= fraction < 1:
            raise ValueError(
                "`full_step_fraction` (`freeze_p`) must be at least 0 and less "
                f"than 1. Received: full_step_fraction={fraction}. Leave "
                "`gradient_freeze` out to train everything in every update."
            )
        if self.groups < 2:
            raise ValueError(
                "`groups` must be at least 2, or nothing is ever frozen. "
                f"Received: groups={self.groups}."
            )
        if self.freeze_type not in (0, 1):
            raise ValueError(
                "`freeze_type` must be 0 (continuous) or 1 (interval). "
                f"Received: freeze_type={self.freeze_type!r}."
            )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(
                f"`seed` must be an int of at least 0. Received: seed="
                f"{self.seed!r}."
            )

    @property
    def num_groups(self) -> int:
        """Of which each has a backward pass of its own."""
        return self.groups

    def group_at(self, update: int) -> int:
        """The group that trains in the update after so many updates.

        Args:
            update: number of updates made so far, >= 0.

        Returns:
            0 where everything trains, up to `num_groups` - 1.
        """
        return int(self._sequence[update % len(self._sequence)])

    def frozen(self, model: keras.Model, group: int) -> list[keras.Variable]:
        """The variables that do not train in a group.

        Args:
            model: built.
            group: 0 to `num_groups` - 1.

        Returns:
            A beginning of `model.trainable_variables`; empty for group 0.

        Raises:
            ValueError: if the model has fewer blocks than there are groups.
        """
        found = blocks(model)
        if len(found) < self.groups:
            raise ValueError(
                "`groups` must be at most the number of the model's blocks. "
                f"Received: groups={self.groups} for {len(found)} blocks of "
                f"{model.name}, which has {len(model.trainable_variables)} "
                f"trainable variables. Write groups={max(len(found), 2)} or "
                "less."
                if len(found) > 1
                else "`model` must have at least 2 blocks of variables. "
                f"Received: model={model.name} with {len(found)}. Build it "
                "first, or leave `gradient_freeze` out."
            )
        stride = len(found) // self.groups
        return [v for block in found[: group * stride] for v in block]

    @functools.cached_property
    def _sequence(self) -> np.ndarray:
        """The group of each update, until it begins anew."""
        length = self.total_updates * 101 // 100
        full = Fraction(str(float(self.full_step_fraction)))
        if self.freeze_type == 0:
            return _continuous(self.groups, full, length)
        return _interval(self.groups, full, length, self.seed)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "groups": self.groups,
            "freeze_type": self.freeze_type,
            "full_step_fraction": self.full_step_fraction,
            "total_updates": self.total_updates,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GradientFreeze":
        """As in Keras."""
        return cls(**config)

    def __str__(self) -> str:
        """All settings in one line."""
        settings = ", ".join(f"{k}={v}" for k, v in self.get_config().items())
        return f"GradientFreeze({settings})"

    __repr__ = __str__


def blocks(model: keras.Model) -> list[list[keras.Variable]]:
    """The trainable variables of a model, cut into blocks.

    Args:
        model: built.

    Returns:
        One list of variables per block, in the order of
        `model.trainable_variables`.
    """
    # Of a layer and the one that it is in, the inner one comes last.
    normalizes = {
        id(variable): isinstance(layer, NORMALIZATIONS)
        for layer in keras_private.all_layers(model)
        for variable in layer.trainable_variables
    }
    found: list[list[keras.Variable]] = []
    for variable in model.trainable_variables:
        follows = normalizes.get(id(variable)) or variable.name in FOLLOWERS
        if not found or (len(found[-1]) >= BLOCK and not follows):
            found.append([])
        found[-1].append(variable)
    return found


def _continuous(groups: int, full: Fraction, length: int) -> np.ndarray:
    """Whole periods of zeros and then each group once."""
    zeros = int(full * (groups - 1) / (1 - full))
    period = np.concatenate([np.zeros(zeros, int), np.arange(1, groups)])
    return np.tile(period, -(-length // len(period)))


def _interval(
    groups: int, full: Fraction, length: int, seed: int
) -> np.ndarray:
    """A drawn group wherever too few updates have frozen anything."""
    frozen = np.zeros(max(length, 1), bool)
    numerator, denominator = (1 - full).as_integer_ratio()
    number = 0
    for update in range(1, length):
        frozen[update] = number * denominator < numerator * update
        number += int(frozen[update])
    # Group j stands groups - j times among what is drawn from.
    urn = np.repeat(np.arange(1, groups), np.arange(groups - 1, 0, -1))
    sequence = np.zeros(len(frozen), int)
    sequence[frozen] = np.random.default_rng(seed).choice(urn, number)
    return sequence
