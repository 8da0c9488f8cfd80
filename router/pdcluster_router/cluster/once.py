"""A property that is worked out when it is first asked for, and kept in the object's `__dict__`.

`functools.cached_property` takes a lock for that, which for the small sums of a view costs more than the sum. Only for objects of one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> once[T]: ...

    @overload
    def __get__(self, owner: object, kind: type[Any]) -> T: ...

    def __get__(self, owner: object | None, kind: type[Any]) -> T | once[T]:
        """Asked only while the object's own `__dict__` has no such name: this is no data descriptor."""
        if owner is None:
            return self
        value = owner.__dict__[self._name] = self._work(owner)
        return value
