"""DimReduce: BFGS with a line search in a few directions, momentum in the rest.

With the rows of P the directions of a basis, g the gradient of the window and
f the loss of its last micro-batch:

    g_k = P g,  y = g_k - g_last,  c = y s
    where c > 1e-20:  B <- (I - s y' / c) B (I - y s' / c) + s s' / c
    d = -B g_k
    t: the first of 1, rho, rho^2, .. with
       f(w + t P' d) < f(w) + sigma t g_k d;   s <- t d,  g_last <- g_k
       where there is none: t = 0, and B and g_last as before the update
    m <- gamma m + (g - P' P g)
    w <- w + t P' d - alpha m

Source: Li, Tan, Huang, Tao, Liu and Huang, Low Dimensional Landscape
Hypothesis is True: DNNs can be Trained in Tiny Subspaces (2021),
arXiv:2103.11154, P+-BFGS; residual momentum, number of trials and names as in
`DimReduce` of MindSpore's `boost`.
"""

import math
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfaccum import reduction
from tfaccum.batching import check_count
from tfaccum.boost.basis import Basis, Subspace, stored_digest

FALLBACKS = ("zero", "smallest")
# Below it, the change of the gradient says nothing about the curvature.
_LEAST_CURVATURE = 1e-20


@keras.saving.register_keras_serializable("tfaccum")
class DimReduce(keras.optimizers.Optimizer):
    """An optimizer for the second part of a training, in a small subspace.

    ```
    basis = principal_basis("trajectory", 32).save("basis.npz")
    model.compile(DimReduce("basis.npz"), loss, gradient_accumulation_steps=8)
    ```

    Trains with `tfaccum.Model.fit` only: each update runs the forward pass of
    the window's last micro-batch again, once with the old weights and at most
    `trials` times with new ones. They leave no trace in moving statistics,
    seeds and metrics, and see the same dropout masks.

    Constraints are applied once, to the new weights, as by any optimizer of
    Keras; the trials are without them, and without the step along m.
    Variables that have no gradient in a window stay as they are.

    Args:
        basis: a `Basis`, or the path of a saved one, of exactly the variables
            that are trained. It is read again when the optimizer is loaded,
            and is no part of a checkpoint.
        rho: by what the step shrinks from trial to trial, in (0, 1).
        gamma: momentum outside of the subspace, in [0, 1).
        alpha: learning rate outside of the subspace, >= 0, or a schedule; it
            is the `learning_rate` of this optimizer. 0: the weights move in
            the subspace only, as in the paper.
        sigma: which part of the decrease that the slope promises is asked
            for, in (0, 1).
        trials: how many step sizes are tried, >= 1.
        fallback: what is done where none of them is accepted. "zero": no step
            in the subspace. "smallest": the smallest, if its loss is finite.
        sharded: whether each replica keeps ceil(n / replicas) directions
            instead of all. An update then adds up two tensors of the
            gradient's size over the replicas.
        name: of the optimizer.

    State: by variable `m`, in the variable's dtype; B [n, n], s and g_last
    [n], and `step_size`, the t of the last update, float32 or the widest
    dtype of the variables. They are saved with the optimizer.

    Raises:
        TypeError: if `basis` is neither, or `trials` no int.
        ValueError: if an argument is out of its range.
        ValueError: when it is built, if the basis is of other variables.

    Source: Li et al. (2021), arXiv:2103.11154.
    """

    def __init__(
        self,
        basis: Basis | str | os.PathLike,
        rho: float = 0.55,
        gamma: float = 0.9,
        alpha: Any = 0.001,
        sigma: float = 0.4,
        *,
        trials: int = 2,
        fallback: str = "zero",
        sharded: bool = False,
        name: str = "dim_reduce",
    ):
        check_numbers(rho, gamma, alpha, sigma)
        if isinstance(alpha, numbers.Real):
            alpha = float(alpha)
        check_count("trials", trials)
        rule = f"be one of {', '.join(map(repr, FALLBACKS))}"
        _check("fallback", fallback, fallback in FALLBACKS, rule)
        if not isinstance(basis, Basis | str | os.PathLike):
            raise TypeError(
                "`basis` must be a tfaccum.boost.Basis or the path of one. "
                f"Received: basis={basis!r} of type {type(basis).__name__}."
            )
        if not isinstance(basis, Basis):
            basis, digest = os.fspath(basis), stored_digest(basis)
        else:
            digest = basis.digest
        super().__init__(learning_rate=alpha, name=name)
        self.basis, self.basis_digest = basis, digest
        self.rho, self.gamma, self.sigma = rho, gamma, sigma
        self.trials, self.fallback, self.sharded = trials, fallback, sharded
        self._home = tf.distribute.get_strategy()

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the state, and puts the basis on the replicas.

        Args:
            variables: that are trained, in any order.

        Raises:
            ValueError: if the basis is of other variables, by path and shape.
        """
        variables = list(variables)
        basis = self.basis
        if not isinstance(basis, Basis):
            basis = Basis.load(basis)
        with self._home.scope():
            # No attribute that Keras or TensorFlow would save.
            self.subspace = Subspace(basis, variables, sharded=self.sharded)
            super().build(variables)
            n, dtype = basis.num_directions, self.subspace.dtype.name
            self.residuals = self.add_optimizer_variables(variables, "residual")
            self.inverse_hessian = self.add_variable(
                (n, n), keras.initializers.Identity(), dtype, name="hessian"
            )
            self.last_step = self.add_variable((n,), dtype=dtype, name="step")
            self.last_gradient = self.add_variable(
                (n,), dtype=dtype, name="gradient"
            )
            self.step_size = self.add_variable((), dtype=dtype, name="size")
        self._places = {v.path: i for i, v in enumerate(variables)}

    def apply(self, grads: Any, trainable_variables: Any = None) -> NoReturn:
        """Refuses: a line search needs losses, which only a window has.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "DimReduce must be used with `tfaccum.Model.fit`: it looks at the "
            "loss while it makes a step."
        )

    def apply_with_losses(
        self,
        strategy: tf.distribute.Strategy,
        gradients: Any,
        variables: Sequence[keras.Variable],
        losses: Callable[[], tf.Tensor],
    ) -> None:
        """One update.

        Args:
            strategy: under which the optimizer was built.
            gradients: per-replica list, one tensor or IndexedSlices for each
                variable, reduced, unscaled, the same on every replica.
            variables: in the order of `gradients`.
            losses: gives the mean loss of the window's last micro-batch over
                all replicas with the present weights, float scalar.

        Context: cross-replica, under `fit` in a traced function.
        """
        dtype = self.subspace.dtype
        variables = list(variables)
        before = tf.cast(losses(), dtype)
        found = strategy.run(self._directions, args=(gradients, variables))
        slope = strategy.experimental_local_results(found["slope"])[0]
        sizes = tf.constant([self.rho**k for k in range(self.trials)], dtype)

        def attempt(trial: tf.Tensor, *_: tf.Tensor) -> tuple:
            size = sizes[trial]
            strategy.run(_move, args=(variables, found, size))
            loss = tf.cast(losses(), dtype)
            is_accepted = loss < before + self.sigma * size * slope
            return trial + 1, size, loss, is_accepted

        _, size, loss, is_accepted = tf.while_loop(
            lambda trial, size, loss, is_accepted: (
                (trial < self.trials) & ~is_accepted
            ),
            attempt,
            (tf.constant(0), sizes[0], before, tf.constant(False)),
        )
        if self.fallback == "smallest":
            is_accepted |= tf.math.is_finite(loss)
        strategy.run(self._settle, args=(variables, found, size, is_accepted))
        self.iterations.assign_add(1)

    # --- In replica context ------------------------------------------------

    def _directions(
        self, gradients: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> dict[str, Any]:
        """What the update needs, from the gradient and the state."""
        dense = {
            v.path: tf.convert_to_tensor(g)  # Slices are added up.
            for v, g in zip(variables, gradients, strict=True)
        }
        gradient = self.subspace.project(dense)
        hessian = _bfgs(
            tf.convert_to_tensor(self.inverse_hessian),
            tf.convert_to_tensor(self.last_step),
            gradient - self.last_gradient,
        )
        direction = -tf.linalg.matvec(hessian, gradient)
        lifted = self.subspace.lift(tf.stack([direction, gradient]), variables)
        residuals = []
        for variable, inside in zip(variables, lifted, strict=True):
            outside = tf.cast(dense[variable.path], inside.dtype) - inside[1]
            momentum = tf.cast(self._residual(variable).value, inside.dtype)
            residuals.append(self.gamma * momentum + outside)
        return {
            "weights": [_wide(v) for v in variables],
            "lifted": [inside[0] for inside in lifted],
            "residuals": residuals,
            "hessian": hessian,
            "gradient": gradient,
            "direction": direction,
            "slope": tf.tensordot(gradient, direction, 1),
        }

    def _settle(
        self,
        variables: Sequence[keras.Variable],
        found: dict[str, Any],
        size: tf.Tensor,
        is_accepted: tf.Tensor,
    ) -> None:
        """The new weights and state, from the chosen step."""
        for variable, weight, lifted, residual in zip(
            variables,
            found["weights"],
            found["lifted"],
            found["residuals"],
            strict=True,
        ):
            # 0 times infinity is not 0.
            step = tf.where(
                is_accepted, tf.cast(size, weight.dtype) * lifted, 0
            )
            alpha = tf.cast(self.learning_rate, weight.dtype)
            _assign(variable, weight + step - alpha * residual)
            _assign(self._residual(variable), residual)
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        for variable, value in (
            (self.inverse_hessian, found["hessian"]),
            (self.last_gradient, found["gradient"]),
            (self.last_step, size * found["direction"]),
        ):
            variable.assign(tf.where(is_accepted, value, variable.value))
        self.step_size.assign(tf.where(is_accepted, size, 0))

    def _residual(self, variable: keras.Variable) -> keras.Variable:
        return self.residuals[self._places[variable.path]]

    # --- Saved and loaded --------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """The arguments, with the basis by its path.

        Raises:
            NotImplementedError: if the basis has none.
        """
        path = self.basis.path if isinstance(self.basis, Basis) else self.basis
        if path is None:
            raise NotImplementedError(
                "`basis` must be in a file before DimReduce can be saved. "
                'Write DimReduce(basis.save("basis.npz")).'
            )
        return {
            "name": self.name,
            "basis": path,
            "basis_digest": self.basis_digest,
            "rho": self.rho,
            "gamma": self.gamma,
            "alpha": super().get_config()["learning_rate"],
            "sigma": self.sigma,
            "trials": self.trials,
            "fallback": self.fallback,
            "sharded": self.sharded,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "DimReduce":
        """As in Keras.

        Raises:
            ValueError: if the file of the basis is not what it was.
        """
        config = dict(config)
        digest = config.pop("basis_digest")
        if isinstance(config["alpha"], dict):
            config["alpha"] = keras.saving.deserialize_keras_object(
                config["alpha"], custom_objects=custom_objects
            )
        made = cls(**config)
        if made.basis_digest != digest:
            raise ValueError(
                "`basis` must be the file with which the optimizer was saved. "
                f"Received: basis={config['basis']!r} with digest "
                f"{made.basis_digest}, before {digest}."
            )
        return made


def check_numbers(rho: float, gamma: float, alpha: Any, sigma: float) -> None:
    """Refuses what is out of its range.

    Raises:
        ValueError: naming the argument.
    """
    _check("rho", rho, 0 < rho < 1, "be in (0, 1)")
    _check("gamma", gamma, 0 <= gamma < 1, "be in [0, 1)")
    _check("sigma", sigma, 0 < sigma < 1, "be in (0, 1)")
    if isinstance(alpha, numbers.Real):  # Otherwise a schedule.
        is_usable = 0 <= float(alpha) < math.inf
        _check("alpha", alpha, is_usable, "be finite and at least 0")


def _bfgs(hessian: tf.Tensor, s: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """The inverse Hessian B, [n, n], after a step s changed the gradient by y.

    Before the first accepted step s is zero, so that nothing changes.
    """
    c = tf.tensordot(y, s, 1)
    is_usable = c > _LEAST_CURVATURE
    c = tf.where(is_usable, c, 1)
    shear = tf.eye(s.shape[0], dtype=s.dtype) - tf.tensordot(y, s / c, 0)
    sheared = tf.matmul(shear, tf.matmul(hessian, shear), transpose_a=True)
    return tf.where(is_usable, sheared + tf.tensordot(s, s / c, 0), hessian)


def _move(
    variables: Sequence[keras.Variable], found: dict[str, Any], size: tf.Tensor
) -> None:
    """A trial step from the old weights."""
    for variable, weight, lifted in zip(
        variables, found["weights"], found["lifted"], strict=True
    ):
        _assign(variable, weight + tf.cast(size, weight.dtype) * lifted)


def _wide(variable: keras.Variable) -> tf.Tensor:
    dtype = reduction.accumulator_dtype(variable.dtype)
    return tf.cast(tf.identity(variable.value), dtype)


def _assign(variable: keras.Variable, value: tf.Tensor) -> None:
    variable.assign(tf.cast(value, variable.dtype))


def _check(name: str, value: Any, is_right: bool, rule: str) -> None:
    if not is_right:
        raise ValueError(f"`{name}` must {rule}. Received: {name}={value!r}.")
