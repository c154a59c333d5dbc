"""Configs as JSON and back: frozen dataclasses, each stored with the name of its type."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attention_residuals.errors import ConfigError, nearest

__all__ = ["decode", "encode"]


def encode(config: Any) -> Any:
    """Turns a config, and the configs inside it, into what JSON can hold.

    Example:
        >>> from attention_residuals.layers.residual import AttnRes
        >>> encode(AttnRes(sublayers_per_block=4))["sublayers_per_block"]
        4
    """
    if is_dataclass(config) and not isinstance(config, type):
        values = {field.name: encode(getattr(config, field.name)) for field in fields(config)}
        return {"type": type(config).__name__, **values}
    return [encode(item) for item in config] if isinstance(config, tuple) else config


def decode(data: Any, known: Mapping[str, type]) -> Any:
    """Turns what ``encode`` gave back into the config, and refuses whatever it does not know.

    Args:
        data: As read from JSON.
        known: The types that may occur, by name.

    Raises:
        ConfigError: An unknown type or field, a missing field, or a value of the wrong type or range.

    Example:
        >>> from attention_residuals.layers.residual import AttnRes
        >>> decode({"type": "AttnRes", "sublayers_per_block": 4}, {"AttnRes": AttnRes})
        AttnRes(sublayers_per_block=4, key_eps=1e-06, source_dtype=None)
    """
    if not isinstance(data, Mapping):
        return data
    name = str(data.get("type"))
    if name not in known:
        raise ConfigError(got=f"a config of type {name!r}", expected="a known type", do=nearest(name, known))
    config_type = known[name]
    hints = get_type_hints(config_type)
    accepted = {field.name: field for field in fields(config_type) if field.init}
    values = {
        key: tuple(_item(item, known) for item in value)  # JSON has lists
        if isinstance(value, list)
        else decode(value, known)
        for key, value in data.items()
        if key != "type"
    }
    for key, value in values.items():
        if key not in accepted:
            raise ConfigError(
                got=f"{name} with {key!r}", expected="only known fields", do=nearest(key, accepted)
            )
        if not _fits(value, hints[key]):
            raise ConfigError(
                got=f"{name}.{key}={value!r}",
                expected=getattr(hints[key], "__name__", str(hints[key])),
                do="correct the value",
            )
    missing = [
        key
        for key, field in accepted.items()
        if key not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(got=f"{name} without {', '.join(missing)}", expected="every field", do="add them")
    return config_type(**values)


def _item(item: Any, known: Mapping[str, type]) -> Any:
    """Turns one of a list into its config; what is none of the known ones is left for its own reader."""
    return decode(item, known) if isinstance(item, Mapping) and item.get("type") in known else item


def _fits(value: Any, hint: Any) -> bool:
    """Checks numbers, texts and choices of them; what is more than that, the config's own checks see."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)
