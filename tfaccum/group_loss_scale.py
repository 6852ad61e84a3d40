"""A dynamic loss scale for each group of layers.

One scale for a whole model has to suit the layer with the largest gradients
and lets the smallest underflow. Here each group of layers has its own.

Source: `GroupLossScaleManager` of MindSpore's `boost`, but for one thing: there
gradients are divided by the scale after it has moved, 0.07 % off; here by the
scale that they carry.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import reduction
from tfaccum.reduction import Gradient
from tfaccum.update import is_overwritten

SHRINK = 2.0**-0.5
GROWTH = 2.0 ** (1 / 1000)
# Infinity would never shrink again, nor must the ratio of two be infinite.
LARGEST = 2.0**100


@keras.saving.register_keras_serializable("tfaccum")
class GroupLossScale(keras.layers.Layer):
    """A shared layer that stands at the borders between groups of layers.

        scale = tfaccum.GroupLossScale([["conv"], ["dense", "logits"]])
        x = keras.layers.Conv2D(8, 3, name="conv")(inputs)
        x = scale(x, leaves=1, enters=2)
        x = keras.layers.Dense(32, name="dense")(x)
        x = keras.layers.Dense(10, name="logits")(x)
        outputs = scale(x, leaves=2, enters=3)  # the loss has scale 1
        model = tfaccum.Model(inputs, outputs)
        model.compile(..., loss_scale=scale)

    Groups count from 1; 0 (before the first) and L + 1 (after the last of L)
    have scale 1. In the forward pass nothing happens; in the backward pass the
    gradient that crosses a border is multiplied by s_leaves / s_enters.

    After each window a group with a non-finite gradient has its scale
    multiplied by 2**-0.5, any other by 2**(1/1000). If any group was bad no
    update is made.

    Args:
        groups: names of the layers with variables, group by group from the
            inputs to the loss. A layer in no group has scale 1.
        initial: first scale, > 0: a number, or one for each group.
        floor: least scale, > 0.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        ValueError: if there is no group, a name stands twice, or there is not
            one initial scale per group.
    """

    # The scales move once per window, not in the forward pass.
    has_forward_state = False

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        initial: float | Sequence[float] = 2.0**15,
        floor: float = 2.0**-14,
        **kwargs: Any,
    ):
        super().__init__(**{"dtype": "float32", "trainable": False, **kwargs})
        self.groups = [list(names) for names in groups]
        self.floor = floor
        self.initial = (
            [float(initial)] * len(self.groups)
            if isinstance(initial, int | float)
            else list(initial)
        )
        names = [name for group in self.groups for name in group]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                "`groups` must name layers, each once. Received: "
                f"groups={self.groups}."
            )
        if len(self.initial) != len(self.groups) or min(self.initial) <= 0:
            raise ValueError(
                "`initial` must be positive, one number or one per group. "
                f"Received: initial={self.initial} for {len(self.groups)} "
                "groups."
            )
        self.scales = self.add_weight(
            shape=(len(self.groups),),
            initializer=lambda shape, dtype: tf.constant(self.initial, dtype),
            trainable=False,
            autocast=False,
            name="scales",
        )
        self.built = True

    def call(self, inputs: tf.Tensor, leaves: int, enters: int) -> tf.Tensor:
        """Passes `inputs` on; scales what comes back.

        Args:
            inputs: activations of any float dtype and shape.
            leaves: group that ends here, 0 for what is before the first.
            enters: group that begins here, L + 1 for the loss.
        """
        ratio = self._scale_of(leaves) / self._scale_of(enters)

        @tf.custom_gradient
        def cross(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                scaled = tf.cast(upstream, tf.float32) * ratio
                return tf.cast(scaled, upstream.dtype)

            return tf.identity(x), backward

        return cross(tf.convert_to_tensor(inputs))

    def compute_output_spec(
        self, inputs: Any, leaves: int, enters: int
    ) -> keras.KerasTensor:
        """The same shape and dtype."""
        for group in (leaves, enters):
            if not 0 <= group <= len(self.groups) + 1:
                raise ValueError(
                    f"A group must be from 0 to {len(self.groups) + 1}. "
                    f"Received: leaves={leaves}, enters={enters}."
                )
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def unscaled(
        self, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> list[Gradient]:
        """Gradients divided by the scale that they carry."""
        return [
            g
            if is_overwritten(v)
            else reduction.divided(g, self._scale_of(self._group_of(v)))
            for g, v in zip(gradients, variables, strict=True)
        ]

    def verdicts(
        self, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> tf.Tensor:
        """Which groups have only finite gradients, bool [groups].

        What a group without variables has made infinite reaches the nearest
        one before it, whose verdict is its own too.
        """
        finite = reduction.each_finite(gradients)
        groups = [self._group_of(v) for v in variables]
        nearest = [
            max((g for g in groups if g <= number), default=number)
            for number in range(1, len(self.groups) + 1)
        ]
        return tf.stack(
            [
                tf.reduce_all(finite | (tf.constant(groups) != number))
                for number in nearest
            ]
        )

    def move(self, finite: tf.Tensor) -> None:
        """Moves every scale once. Cross-replica.

        Args:
            finite: bool [groups], the same on every replica and worker.
        """
        scales = tf.convert_to_tensor(self.scales)
        moved = scales * tf.where(finite, GROWTH, SHRINK)
        self.scales.assign(tf.clip_by_value(moved, self.floor, LARGEST))

    def get_config(self) -> dict[str, Any]:
        """As in Keras."""
        config = super().get_config()
        for name in ("groups", "initial", "floor"):
            config[name] = getattr(self, name)
        return config

    def _scale_of(self, group: int) -> tf.Tensor:
        if 1 <= group <= len(self.groups):
            return tf.convert_to_tensor(self.scales)[group - 1]
        return tf.constant(1.0)

    def _group_of(self, variable: Any) -> int:
        parts = variable.path.split("/")
        for number, names in enumerate(self.groups, start=1):
            if any(name in parts for name in names):
                return number
        return 0
