"""The dict of `AutoBoost`: its sections and keys, checked."""

import dataclasses
import difflib
import os
from typing import Any

ALGORITHMS = (
    "less_bn",
    "grad_freeze",
    "adasum",
    "grad_accumulation",
    "dim_reduce",
    "loss_scale_group",
)
MODES = ("auto", "manual", "enable_all", "disable_all")

_BOOL, _INT, _NUMBER = "a bool", "an int", "a number"
_PATH, _SPLIT = "a path or None", "an int, a list of ints or None"


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the dict.

    Attributes:
        default: where the dict does not have it.
        kind: what it has to be, in words.
        not_needed: why it changes nothing here; empty where it does.
    """

    default: Any
    kind: str
    not_needed: str = ""


# By section, as in MindSpore; those of an algorithm have its name.
SECTIONS: dict[str, dict[str, Key]] = {
    "boost": {
        "mode": Key("auto", f"one of {', '.join(MODES)}"),
        **{name: Key(False, _BOOL) for name in ALGORITHMS},
    },
    "common": {
        "gradient_split_groups": Key(
            None, _SPLIT, "gradients of one dtype travel in one packed group"
        ),
        "device_number": Key(
            8, _INT, "the strategy knows the replicas of each worker"
        ),
    },
    "less_bn": {
        "fn_flag": Key(True, _BOOL),
        "gc_flag": Key(True, _BOOL),
    },
    "grad_freeze": {
        "param_groups": Key(10, _INT),
        "freeze_type": Key(1, _INT),
        "freeze_p": Key(0.7, _NUMBER),
        "total_steps": Key(65536, _INT),
    },
    "grad_accumulation": {"grad_accumulation_step": Key(1, _INT)},
    "dim_reduce": {
        "rho": Key(0.55, _NUMBER),
        "gamma": Key(0.9, _NUMBER),
        "alpha": Key(0.001, _NUMBER),
        "sigma": Key(0.4, _NUMBER),
        "n_components": Key(32, _INT),
        "pca_mat_path": Key(None, _PATH),
        "weight_load_dir": Key(None, _PATH),
        "timeout": Key(
            1800, _NUMBER, "no worker waits for the file of another"
        ),
    },
}


def check_config(config: Any) -> None:
    """Refuses what has no place, and values of a wrong type.

    Raises:
        TypeError: if `config` or a section is no dict, or a value of a wrong
            type.
        ValueError: if a section, a key or the mode does not exist, or a key
            stands in the wrong section.
    """
    if not isinstance(config, dict):
        raise TypeError(
            "`config` must be a dict of dicts. Received: config="
            f"{config!r} of type {type(config).__name__}."
        )
    for section, keys in config.items():
        if section not in SECTIONS:
            raise ValueError(
                "`config` must have sections that exist. Received: section "
                f"{section!r}. {_hint(section, SECTIONS)}"
            )
        if not isinstance(keys, dict):
            raise TypeError(
                f"`config[{section!r}]` must be a dict. Received: {keys!r} of "
                f"type {type(keys).__name__}."
            )
        for name, value in keys.items():
            _check_value(section, name, value)


def _check_value(section: str, name: str, value: Any) -> None:
    if name not in SECTIONS[section]:
        raise ValueError(
            "`config` must have keys that exist, in their sections. Received: "
            f"key {name!r} in section {section!r}. "
            f"{_hint(name, SECTIONS[section])}"
        )
    kind = SECTIONS[section][name].kind
    if name == "mode" and value not in MODES:
        raise ValueError(
            f"`mode` must be {kind}. Received: mode={value!r}. "
            f"{_nearest(value, MODES)}"
        )
    if name != "mode" and not _is(kind, value):
        raise TypeError(
            f"`{name}` of section {section!r} must be {kind}. Received: "
            f"{name}={value!r} of type {type(value).__name__}."
        )


def _is(kind: str, value: Any) -> bool:
    """Whether the value is of a kind that `Key` names."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    is_list = isinstance(value, list) and all(_is(_INT, v) for v in value)
    return {
        _BOOL: isinstance(value, bool),
        _INT: is_int,
        _NUMBER: is_int or isinstance(value, float),
        _PATH: value is None or isinstance(value, str | os.PathLike),
        _SPLIT: value is None or is_int or is_list,
    }[kind]


def _hint(name: Any, known: Any) -> str:
    """Where a key or section belongs, or what it may have been meant for."""
    for section, keys in SECTIONS.items():
        if name in keys:
            return f"It belongs in section {section!r}."
    return _nearest(name, known)


def _nearest(name: Any, known: Any) -> str:
    found = difflib.get_close_matches(str(name), list(known), 1, cutoff=0)
    return f"Did you mean {found[0]!r}? There are {', '.join(known)}."
