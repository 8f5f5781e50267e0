"""The base of all parts of the configuration."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from cgplan.config.messages import explain


class _TypedErrors(ModelMetaclass):
    """Makes ``Input(...)`` and the like raise ConfigError, as the file does; validation inside pydantic is as ever."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (of a metaclass)
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise explain(error, kwargs, cls.__name__, cast(type[BaseModel], cls)) from None


class Section(BaseModel, metaclass=_TypedErrors):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
