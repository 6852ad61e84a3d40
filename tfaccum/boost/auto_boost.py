"""AutoBoost: MindSpore's one switch for the algorithms of this package.

The dict that its users have is read as it is; what it asks for becomes a model
and the arguments of `compile`.

Source: `AutoBoost` of MindSpore's `boost`.
"""

import warnings
from typing import Any

import keras

from tfaccum import keras_private
from tfaccum import strategy as strategies
from tfaccum.adasum import AdaSum
from tfaccum.batching import check_count
from tfaccum.boost.config import ALGORITHMS, SECTIONS, check_config
from tfaccum.boost.dim_reduce import DimReduce, check_numbers
from tfaccum.boost.gradient_centralization import centralized, kernels
from tfaccum.boost.gradient_freeze import GradientFreeze
from tfaccum.boost.less_bn import with_less_bn
from tfaccum.boost.trajectory import principal_basis
from tfaccum.group_loss_scale import GroupLossScale
from tfaccum.model import Model

_DIM_REDUCE_NUMBERS = ("rho", "gamma", "alpha", "sigma")
LEVELS = {
    "O0": (),
    "O1": ("less_bn", "grad_freeze"),
    "O2": ("less_bn", "grad_freeze", "adasum"),
}
# (what stays on, what it switches off, why); any other two work together.
PRECEDENCE = (
    (
        "dim_reduce",
        "less_bn",
        "the basis belongs to the weights of the model as it is",
    ),
    (
        "dim_reduce",
        "grad_freeze",
        "a step along the basis moves all weights",
    ),
    (
        "dim_reduce",
        "adasum",
        "the line search needs one gradient, that of the loss it looks at",
    ),
    (
        "loss_scale_group",
        "adasum",
        "AdaSum needs one loss scale for all layers",
    ),
)


class AutoBoost:
    """Which algorithms are on, from a level and MindSpore's dict.

    ```
    auto = AutoBoost("O1", {"grad_freeze": {"param_groups": 5}})
    print(auto.describe())
    model, arguments = auto.apply(model, keras.optimizers.SGD(0.1))
    model.compile(loss=loss, **arguments)
    ```

    Levels: "O0" nothing; "O1" `less_bn` and `grad_freeze`; "O2" these and
    `adasum`. What `config["boost"]["mode"]` makes of them:

    | mode | on |
    |---|---|
    | auto (default) | those of the level; flags in the dict are ignored |
    | manual | those of the level, overwritten by the flags in the dict |
    | enable_all, disable_all | all; none |

    Of those that are on, some switch others off:

    | stays on | switched off | why |
    |---|---|---|
    | dim_reduce | less_bn | its basis belongs to the weights as they are |
    | dim_reduce | grad_freeze | a step along the basis moves all weights |
    | dim_reduce | adasum | the line search needs the gradient of its loss |
    | loss_scale_group | adasum | AdaSum needs one loss scale for all layers |
    | any other two | | they work together |

    Args:
        level: "O0", "O1" or "O2".
        config: MindSpore's `boost_config_dict`: a dict by section of dicts by
            key, all of them optional. Default: none.

    Attributes:
        level: as given.
        mode: as given.
        enabled: the names of what is on, in the order of `ALGORITHMS`.
        switched_off: why, by name: what was on and something else excludes.
        settings: of each section with all of its keys.

    Raises:
        TypeError: if `config` or a section is no dict, or a value of the
            wrong type.
        ValueError: if the level, the mode, a section or a key does not exist,
            or a key stands in the section of another; the message names the
            nearest.
        ValueError: if a value of an algorithm that is on is out of its range.
    """

    def __init__(
        self, level: str = "O0", config: dict[str, dict[str, Any]] | None = None
    ):
        if level not in LEVELS:
            raise ValueError(
                f"`level` must be one of {', '.join(LEVELS)}. Received: "
                f"level={level!r}."
            )
        config = {} if config in (None, "") else config  # "" in MindSpore.
        check_config(config)
        self._given = {name: dict(keys) for name, keys in config.items()}
        self.level = level
        self.settings = {
            section: {
                name: self._given.get(section, {}).get(name, key.default)
                for name, key in keys.items()
            }
            for section, keys in SECTIONS.items()
        }
        self.mode = self.settings["boost"]["mode"]
        wanted = self._wanted()
        self.switched_off = {
            loser: f"by {winner}: {why}"
            for winner, loser, why in reversed(PRECEDENCE)
            if winner in wanted and loser in wanted
        }
        self.enabled = tuple(
            name
            for name in ALGORITHMS
            if name in wanted and name not in self.switched_off
        )
        self._check()

    def _wanted(self) -> set[str]:
        """What the level, the mode and the flags ask for."""
        if self.mode == "enable_all":
            return set(ALGORITHMS)
        if self.mode == "disable_all":
            return set()
        flags = dict.fromkeys(LEVELS[self.level], True)
        if self.mode == "manual":
            flags |= self._flags()
        return {name for name, is_on in flags.items() if is_on}

    def _flags(self) -> dict[str, bool]:
        """Those that stand in the dict."""
        given = self._given.get("boost", {})
        return {name: given[name] for name in ALGORITHMS if name in given}

    def _check(self) -> None:
        """Looks at the ranges of what is on."""
        if "grad_accumulation" in self.enabled:
            check_count("grad_accumulation_step", self._steps)
        if "grad_freeze" in self.enabled:
            self._freeze()
        if "dim_reduce" in self.enabled:
            self._check_dim_reduce()

    def _check_dim_reduce(self) -> None:
        settings = self.settings["dim_reduce"]
        check_numbers(**{name: settings[name] for name in _DIM_REDUCE_NUMBERS})
        check_count("n_components", settings["n_components"])
        paths = [settings[name] for name in ("pca_mat_path", "weight_load_dir")]
        if not any(paths):
            raise ValueError(
                "`config` must say where dim_reduce has its basis from. "
                f"Received: pca_mat_path={paths[0]!r}, weight_load_dir="
                f"{paths[1]!r}. Give the file of a `Basis.save`, or the "
                "directory of a `RecordTrajectory`."
            )

    # --- What it says ------------------------------------------------------

    def describe(self) -> str:
        """What is on, with its settings, and what is not and why.

        Returns:
            Lines of text, without a newline at the end.
        """
        lines = [f"AutoBoost {self.level}, mode {self.mode}"]
        lines += [f"on: {self._described(name)}" for name in self.enabled]
        lines += [
            f"off: {name}, {why}" for name, why in self.switched_off.items()
        ]
        off = [
            name
            for name in ALGORITHMS
            if name not in self.enabled and name not in self.switched_off
        ]
        lines += [f"off: {', '.join(off)}"] * bool(off)
        return "\n".join(lines + self._without_effect())

    __str__ = describe

    def _described(self, name: str) -> str:
        settings = ", ".join(
            f"{key}={value}"
            for key, value in self.settings.get(name, {}).items()
            if not self._not_needed(name, key)
        )
        text = f"{name} ({settings})" if settings else name
        if name == "grad_accumulation" and self._steps == 1:
            text += ": an update from each batch, as without it"
        return text

    def _without_effect(self) -> list[str]:
        """Lines about keys of the dict that change nothing."""
        lines = []
        for section, keys in self._given.items():
            for name, value in keys.items():
                text = f"{section}.{name}={value}"
                if why := self._not_needed(section, name):
                    lines.append(f"not needed here: {text}: {why}")
                elif section in ALGORITHMS and section not in self.enabled:
                    lines.append(f"ignored: {text}: {section} is off")
                elif name in ALGORITHMS and self.mode != "manual":
                    lines.append(f"ignored: {text}: the mode is {self.mode}")
        return lines

    def _not_needed(self, section: str, name: str) -> str | None:
        """Why a key changes nothing where its section is on; or nothing."""
        has_basis = self.settings["dim_reduce"]["pca_mat_path"]
        if has_basis and name in ("n_components", "weight_load_dir"):
            return "the file of pca_mat_path has the directions"
        return SECTIONS[section][name].not_needed

    # --- What it does ------------------------------------------------------

    def apply(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | str | None = None,
    ) -> tuple[Model, dict[str, Any]]:
        """The model to train, and how.

        Args:
            model: functional and built, made under its strategy. It stays as
                it is.
            optimizer: not built. Not used under `dim_reduce`, which is an
                optimizer itself. Default: the one that `compile` is given.

        Returns:
            (model, arguments): the model as a `tfaccum.Model`, a copy where
            `less_bn` is on, and arguments for its `compile`, of which each
            stands there only where something is on that needs it: "optimizer",
            "gradient_freeze", "replica_reduction", "loss_scale",
            "gradient_accumulation_steps".

        Raises:
            TypeError: if `less_bn` is on and the model not functional.
            ValueError: if gradients are to be centralized and there is no
                optimizer; if the model has fewer blocks than `param_groups`,
                no Dense layer at its output for `fn_flag`, or not one
                `GroupLossScale` for `loss_scale_group`.
            ValueError: if AdaSum is to combine a number of replicas that is
                no power of two. Of one replica there is nothing to combine:
                a warning says so.
        """
        with model.distribute_strategy.scope():
            if "less_bn" in self.enabled:
                fn_flag = self.settings["less_bn"]["fn_flag"]
                model, _ = with_less_bn(model, normalized_head=fn_flag)
            if not isinstance(model, Model):
                model = Model.from_keras(model)
            arguments = {
                "optimizer": self._optimizer(model, optimizer),
                "gradient_freeze": self._freeze(model),
                "replica_reduction": self._adasum(model),
                "loss_scale": self._loss_scale(model),
                "gradient_accumulation_steps": (
                    self._steps if "grad_accumulation" in self.enabled else None
                ),
            }
        return model, {k: v for k, v in arguments.items() if v is not None}

    @property
    def _steps(self) -> int:
        return self.settings["grad_accumulation"]["grad_accumulation_step"]

    def _optimizer(self, model: Model, optimizer: Any) -> Any:
        if "dim_reduce" in self.enabled:
            return self._dim_reduce()
        if optimizer is not None:
            optimizer = keras.optimizers.get(optimizer)
        centralizes = self.settings["less_bn"]["gc_flag"]
        if "less_bn" not in self.enabled or not centralizes:
            return optimizer
        if optimizer is None:
            raise ValueError(
                "`optimizer` must be given where gradients are centralized. "
                "Received: optimizer=None with less_bn.gc_flag=True. Write "
                "`apply(model, optimizer)`, or set gc_flag to False."
            )
        return centralized(optimizer, kernels(model))

    def _dim_reduce(self) -> DimReduce:
        settings = self.settings["dim_reduce"]
        basis = settings["pca_mat_path"]
        if basis is None:
            basis = principal_basis(
                settings["weight_load_dir"], settings["n_components"]
            )
        return DimReduce(
            basis, **{name: settings[name] for name in _DIM_REDUCE_NUMBERS}
        )

    def _freeze(self, model: Model | None = None) -> GradientFreeze | None:
        if "grad_freeze" not in self.enabled:
            return None
        settings = self.settings["grad_freeze"]
        freeze = GradientFreeze(
            groups=settings["param_groups"],
            freeze_type=settings["freeze_type"],
            freeze_p=settings["freeze_p"],
            total_updates=settings["total_steps"],
        )
        if model is not None:
            freeze.frozen(model, 0)  # Are there blocks enough?
        return freeze

    def _adasum(self, model: Model) -> AdaSum | None:
        """Of workers, or of the replicas of the one worker."""
        if "adasum" not in self.enabled:
            return None
        strategy = model.distribute_strategy
        if strategies.num_replicas(strategy) == 1:
            warnings.warn(
                "AutoBoost has switched adasum off: it combines replicas, and "
                "there is one.",
                stacklevel=3,
            )
            return None
        _, workers = strategies.worker_index(strategy)
        adasum = AdaSum(form="delta", hierarchical=workers > 1)
        adasum.check(strategy)
        return adasum

    def _loss_scale(self, model: Model) -> GroupLossScale | None:
        if "loss_scale_group" not in self.enabled:
            return None
        found = [
            layer
            for layer in keras_private.all_layers(model)
            if isinstance(layer, GroupLossScale)
        ]
        if len(found) != 1:
            raise ValueError(
                "`model` must have one tfaccum.GroupLossScale for "
                f"loss_scale_group. Received: model={model.name} with "
                f"{len(found)}. It cannot be put in from outside: call it at "
                "the borders between groups of layers, where MindSpore's "
                "GroupLossScaleManager stands."
            )
        return found[0]
