"""AdamA: Adam whose moments take each micro-batch's gradient at once.

    m <- beta_1 m + (1 - beta_1) sum_i s_i g_i
    v <- beta_2 v + (1 - beta_2) sum_i (s_i g_i)^2

over the micro-batches i of a window, on all replicas, with s_i the share of
the window's examples that is in micro-batch i. So no gradients are added up.
`m` is Adam's; `v` is not, which has the square of the sum.

Source: Zhang et al., Adam Accumulation to Reduce Memory Footprints of both
Activations and Gradients for Large-scale DNN Training (2023),
arXiv:2305.19982.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfaccum import keras_private, loss_scale, reduction
from tfaccum import strategy as strategies
from tfaccum.group_loss_scale import GroupLossScale
from tfaccum.update import absorbs


@keras.saving.register_keras_serializable("tfaccum")
class AdamA(keras.optimizers.Adam):
    """Adam that keeps no gradient sums in a `tfaccum.Model` that cuts batches.

        model.compile(
            tfaccum.AdamA(1e-3), loss, micro_batch_size=16, on_nonfinite="raise"
        )

    The update depends on which micro-batches there are, and not on how they
    lie on replicas and micro-steps; with a single one it is Adam's. Everywhere
    else (plain Keras, `GradientAccumulator.apply`) it is Adam.

    Args:
        learning_rate: as in `keras.optimizers.Adam`, like all that follow.
        beta_1: above 0 and below 1.
        beta_2: above 0 and below 1.
        epsilon: >= 0.
        amsgrad: whether `v` never falls.
        **kwargs: of `keras.optimizers.Adam`. With `weight_decay` it is AdamW.

    Raises:
        ValueError: if `beta_1` or `beta_2` is out of its range.

    State: two variables for each that is trained, in its shape and dtype.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **kwargs: Any,
    ):
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 < beta < 1:
                raise ValueError(
                    f"`{name}` must be above 0 and below 1. Received: "
                    f"{name}={beta}."
                )
        super().__init__(
            learning_rate, beta_1, beta_2, epsilon, amsgrad, **kwargs
        )

    def absorb(
        self,
        parts: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Adds to this replica's moments; see `update.AbsorbingOptimizer`.

        Adam's own step, with a gradient of zero, ends the window: it multiplies
        both moments by their beta, which is divided out of what is added here.
        `settle` takes the mean over the replicas.
        """
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync
        for part, variable in zip(parts, variables, strict=True):
            m, v = keras_private.adam_moments(self, variable)
            self.assign_add(m, part * self._factor(self.beta_1, replicas))
            self.assign_add(
                v, tf.square(part) * self._factor(self.beta_2, replicas)
            )

    def settle(self, variables: Sequence[keras.Variable]) -> None:
        """Gives all replicas the mean of their moments, in one all-reduce."""
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync
        if replicas == 1:
            return
        moments = [
            moment
            for variable in variables
            for moment in keras_private.adam_moments(self, variable)
        ]
        totals = reduction.all_reduce_sum([m.value for m in moments])
        for moment, total in zip(moments, totals, strict=True):
            self.assign(moment, total / replicas)

    def _factor(self, beta: float, replicas: int) -> float:
        return replicas * (1 - beta) / beta


def check(optimizer: keras.optimizers.Optimizer, model: Any) -> None:
    """Refuses what has no meaning for an optimizer that absorbs gradients.

    It has to know all examples of a window before the first micro-step, and
    cannot take back what it has absorbed.

    Args:
        optimizer: any; of others nothing is asked.
        model: a `tfaccum.Model` whose arguments of `compile` are set.

    Raises:
        ValueError: if an argument of `compile` excludes it.
    """
    if not absorbs(optimizer):
        return
    inner = loss_scale.unwrapped(optimizer)
    kind = type(inner).__name__
    size, steps = model.micro_batch_size, model.gradient_accumulation_steps
    workers = strategies.worker_index(model.distribute_strategy)[1]
    clips = {
        name: value
        for name in ("clipnorm", "clipvalue", "global_clipnorm")
        if (value := getattr(inner, name)) is not None
    }
    is_dynamic = optimizer is not inner
    for is_wrong, rule, received, advice in (
        (
            not isinstance(size, int),
            "`micro_batch_size` must be an int",
            f"micro_batch_size={size!r}",
            "Batch the data into the batch of one update and say how many "
            "examples a replica holds at once.",
        ),
        (
            not model.accumulation_schedule.is_always_one,
            "`gradient_accumulation_steps` must be 1",
            f"gradient_accumulation_steps={steps}",
            "Batch the data into the batch of one update, which "
            "`micro_batch_size` cuts.",
        ),
        (
            model.on_nonfinite != "raise",
            "`on_nonfinite` must be 'raise'",
            f"on_nonfinite={model.on_nonfinite!r}",
            "Gradients that are not finite are in the moments before they are "
            "found.",
        ),
        (
            is_dynamic or isinstance(model.loss_scale, GroupLossScale),
            "`loss_scale` must be None or a fixed number",
            f"loss_scale={model.loss_scale!r}"
            + ", a dynamic scale" * is_dynamic,
            "A scale that moves needs updates that are skipped. Use a number, "
            "or mixed_bfloat16.",
        ),
        (
            model.adasum is not None,
            "`replica_reduction` must be 'mean'",
            f"replica_reduction={model.replica_reduction}",
            "Gradients of replicas are not there to be combined.",
        ),
        (
            model.gradient_freeze is not None,
            "`gradient_freeze` must be None",
            f"gradient_freeze={model.gradient_freeze}",
            "Use keras.optimizers.Adam.",
        ),
        (
            bool(clips),
            "`optimizer` must not clip",
            f"optimizer={inner.name} with {clips}",
            "The gradient of the window is never there. Use "
            "keras.optimizers.Adam.",
        ),
        (
            workers > 1,
            "The model must have one worker",
            f"{workers} workers",
            "A window that one of them stops has to leave no trace. Use "
            "keras.optimizers.Adam.",
        ),
    ):
        if is_wrong:
            raise ValueError(
                f"{rule} with {kind}. Received: {received}. {advice}"
            )
