"""A call of a task as bytes, and back: JSON `[args, kwargs]`, read by the task's own annotations.

What JSON cannot say (dates, UUIDs, decimals, dataclasses, `msgspec` and `pydantic` models …) is written in its usual
JSON form and becomes itself again through the annotation. A parameter without an annotation gets plain JSON values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import PurePath
from typing import Any, Protocol, get_type_hints

import msgspec

from fairlane.errors import (
    ConfigurationError,
    FairlaneError,
    InvalidJob,
    InvalidValue,
    PayloadTooLarge,
    UndecodablePayload,
)
from fairlane.parameters import checked, shown

LONGEST_KEY = 512
"""Bytes of a key of the key-value store."""


class PayloadCodec(Protocol):
    """Compresses or encrypts arguments and results before they are stored."""

    def encode(self, document: bytes) -> bytes:
        """The bytes to store for this JSON document."""
        ...

    def decode(self, stored: bytes) -> bytes:
        """The JSON document of these stored bytes. If it raises, the job is dead, with that error."""
        ...


_AS_IS = (bool, float, int, str)
"""Types that survive JSON unchanged: a value that already has the type needs no conversion."""


_payload_types: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}


@checked()
def payload_type(kind: type, *, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Allow values of a class as arguments and results: `encode` returns what to store, and `decode` reads it back.

    For classes without a JSON form of their own. A parameter of this class must be annotated with it.
    """
    _payload_types[kind] = (encode, decode)


def _registered(kind: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    known = (_payload_types[each] for each in getattr(kind, "__mro__", ()) if each in _payload_types)
    return next(known, None)


def _encode_other(value: Any) -> Any:
    if (registered := _registered(type(value))) is not None:
        return registered[0](value)
    if isinstance(value, PurePath):
        return str(value)
    if callable(dump := getattr(value, "model_dump", None)):
        # As it is validated from: by aliases where there are any, and without what is computed.
        return dump(mode="json", by_alias=True, round_trip=True)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _decode_other(kind: Any, value: Any) -> Any:
    if (registered := _registered(kind)) is not None:
        return registered[1](value)
    if callable(validate := getattr(kind, "model_validate", None)):
        return validate(value)
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return kind(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ValueError(f"JSON cannot be read as {kind!r}")


_encode = msgspec.json.Encoder(enc_hook=_encode_other).encode
_encode_sorted = msgspec.json.Encoder(enc_hook=_encode_other, order="sorted").encode
_decode = msgspec.json.Decoder().decode


def _convert(value: Any, kind: Any) -> Any:
    # Lenient, because JSON has fewer types than Python: "3" and 3.0 are an int where an int is asked for.
    return msgspec.convert(value, kind, strict=False, str_keys=True, dec_hook=_decode_other)


class Codec:
    """Encodes and decodes the calls and results of one function."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        local_names: Mapping[str, Any] | None = None,
        stored_as: PayloadCodec | None = None,
    ) -> None:
        self.name = name
        self._its_result = f"task {name!r}: its result"
        self._stored_as = stored_as
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"task {name!r}: {function!r} does not say which parameters it has; write a function that calls it"
            ) from None
        self._function = function
        self._local_names = local_names
        kinds, every = inspect.Parameter, self.signature.parameters.values()
        positional = [each for each in every if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        named = [*positional, *(each for each in every if each.kind is kinds.KEYWORD_ONLY)]
        self._var_args = "".join(each.name for each in every if each.kind is kinds.VAR_POSITIONAL)
        self._var_kwargs = "".join(each.name for each in every if each.kind is kinds.VAR_KEYWORD)
        self._positional = tuple(each.name for each in positional)
        self._by_name = frozenset(each.name for each in named if each.kind is not kinds.POSITIONAL_ONLY)
        self._defaults = {each.name: each.default for each in named}
        self._required = {name for name, default in self._defaults.items() if default is kinds.empty}
        self._given = [frozenset(self._positional[:count]) for count in range(len(self._positional) + 1)]
        self._is_plain = not self._var_args and not self._var_kwargs
        self._places = {name: place for place, name in enumerate(self._positional)}

        self.parameters = frozenset(self._defaults)
        """Names of parameters that keys can be taken from."""

    # The producer's side.

    def check_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse a call that the function itself would refuse, where the call is made."""
        # The usual shapes are decided without `bind`, which takes longer than all the rest of an enqueue.
        if self._is_plain and len(args) <= len(self._positional):
            if not kwargs:
                if self._required <= self._given[len(args)]:
                    return
            elif kwargs.keys() <= self._by_name:
                given = self._given[len(args)]
                if given.isdisjoint(kwargs) and self._required <= (given | kwargs.keys()):
                    return
        if unknown := [] if self._var_kwargs else [name for name in kwargs if name not in self._by_name]:
            similar = get_close_matches(unknown[0], self._by_name, n=1)
            meant = f"did you mean {similar[0]!r}?" if similar else f"its parameters are {self.signature}"
            raise InvalidJob(f"task {self.name!r}: got an unexpected keyword argument {unknown[0]!r}; {meant}")
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidJob(f"task {self.name!r}: {error}; its parameters are {self.signature}") from None

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a parameter in a call that was checked, or its default."""
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name, self._defaults[name])

    @property
    def is_sealed(self) -> bool:
        """Whether stored payloads can be read by this app only."""
        return self._stored_as is not None

    def unsealed_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """A call as plain JSON, to be shown and not stored."""
        return _encode((args, kwargs))

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> bytes:
        try:
            payload = _as_json((args, kwargs), stored_as=self._stored_as)
        except FairlaneError:
            raise
        except Exception as error:
            raise InvalidJob(self._blame(args, kwargs, error)) from None
        if len(payload) > max_bytes:
            what, remedy = f"task {self.name!r}: its arguments take", "store the data elsewhere and pass its address"
            raise _too_large(what, payload, max_bytes, remedy)
        return payload

    def _blame(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
        named = [(self._positional[n] if n < len(self._positional) else f"#{n + 1}", v) for n, v in enumerate(args)]
        for name, value in [*named, *kwargs.items()]:
            try:
                _as_json(value)
            except Exception as reason:
                kind = type(value).__name__
                return f"task {self.name!r}: argument {name!r} ({kind}) cannot be stored as JSON: {reason}"
        return f"task {self.name!r}: its arguments cannot be stored as JSON: {error}"

    # The worker's side.

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self._function, localns=dict(self._local_names or {}), include_extras=True)
        except NameError as error:
            raise ConfigurationError(
                f"task {self.name!r}: an annotation cannot be resolved: {error}; "
                f"import the type where the task is defined, not only under TYPE_CHECKING"
            ) from None

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        kinds = {name: self._hints.get(name, Any) for name in self.signature.parameters}
        return {name: kind for name, kind in kinds.items() if kind is not Any}

    @cached_property
    def _result_kind(self) -> Any:
        return self._hints.get("return", Any)

    def check_types(self) -> None:
        """Refuse annotations that no argument or result could ever be read as."""
        for name, kind in [*self._kinds.items(), ("return", self._result_kind)]:
            try:
                msgspec.json.Decoder(kind, dec_hook=_decode_other)
            except TypeError as error:
                what = "its result" if name == "return" else f"parameter {name!r}"
                raise ConfigurationError(f"task {self.name!r}: {what} cannot be read from JSON: {error}") from None

    def decode_call(self, payload: bytes) -> tuple[Sequence[Any], dict[str, Any]]:
        """The call, by the annotations of the function; `UndecodablePayload` if it cannot be read."""
        return self._call_in(payload, self._kinds)

    def plain_call(self, payload: bytes) -> tuple[list[Any], dict[str, Any]]:
        """The call in plain JSON values, to be shown or passed on; `UndecodablePayload` if it cannot be read."""
        return self._call_in(payload, {})

    def _call_in(self, payload: bytes, kinds: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        try:
            args, kwargs = _decode(payload if self._stored_as is None else self._stored_as.decode(payload))
            if not isinstance(args, list) or not isinstance(kwargs, dict):
                raise TypeError("not a list of arguments and a mapping of them")
            if kinds:
                self._read_arguments(args, kwargs, kinds)
            self.check_call(args, kwargs)
        except Exception as error:
            raise UndecodablePayload(f"the arguments do not fit task {self.name!r}: {error}") from error
        return args, kwargs

    def _read_arguments(self, args: list[Any], kwargs: dict[str, Any], kinds: Mapping[str, Any]) -> None:
        names = self._positional
        for place, value in enumerate(args):
            name = names[place] if place < len(names) else self._var_args
            kind = kinds.get(name)
            if kind is not None and (type(value) is not kind or kind not in _AS_IS):
                args[place] = self._read(name, value, kind)
        for name, value in kwargs.items():
            kind = kinds.get(name if name in self._by_name else self._var_kwargs)
            if kind is not None and (type(value) is not kind or kind not in _AS_IS):
                kwargs[name] = self._read(name, value, kind)

    def _read(self, name: str, value: Any, kind: Any) -> Any:
        try:
            return _convert(value, kind)
        except Exception as error:
            raise ValueError(f"argument {name!r}: {error}") from error

    def encode_result(self, value: Any, max_bytes: int) -> bytes | None:
        """The result as it is stored; `None` is stored as nothing."""
        if value is None:
            return None
        remedy = "store the data elsewhere and return its address"
        return _stored_json(self._its_result, value, max_bytes, remedy, stored_as=self._stored_as)

    def encode_context(self, context: Mapping[str, Any], max_bytes: int) -> str:
        """The context that a producer gives with a job."""
        what, remedy = f"task {self.name!r}: its context", "give only what the policy asks for"
        return _stored_json(what, dict(context), max_bytes, remedy).decode()

    def decode_result(self, encoded: bytes | None) -> Any:
        if encoded is None:
            return None
        document = encoded if self._stored_as is None else self._stored_as.decode(encoded)
        value, kind = _decode(document), self._result_kind
        if kind is Any or (type(value) is kind and kind in _AS_IS):
            return value
        try:
            return _convert(value, kind)
        except Exception as error:
            raise UndecodablePayload(f"the stored result does not fit task {self.name!r}: {error}") from error


def checked_key(key: object) -> str:
    """The key, if it is valid; otherwise `InvalidValue`."""
    if not isinstance(key, str):
        raise InvalidValue(f"the key {shown(key)} is not text; give text, such as 'orders/42'")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"the key {shown(key)} cannot be written in UTF-8: {error.reason}; encode what it holds"
        ) from None
    if not 1 <= size <= LONGEST_KEY:
        raise InvalidValue(f"the key {key[:40]!r} takes {size} bytes; 1 to {LONGEST_KEY} are possible")
    if "\0" in key:
        raise InvalidValue(f"the key {shown(key)} holds a NUL, which PostgreSQL cannot store; leave it out")
    return key


def encode_value(key: str, value: Any, max_bytes: int) -> bytes:
    """A value of the key-value store as bytes. Equal values have equal bytes, whatever the order of their keys."""
    what, remedy = f"the value of key {key!r}", "store the data elsewhere and put its address here"
    try:
        return _stored_json(what, value, max_bytes, remedy, _encode_sorted)
    except InvalidJob as error:
        raise InvalidValue(str(error)) from None


def decode_value(encoded: bytes) -> Any:
    """A value of the key-value store, in plain JSON types."""
    return _decode(encoded)


def _as_json(value: Any, encode: Callable[[Any], bytes] = _encode, stored_as: PayloadCodec | None = None) -> bytes:
    """A value as it is stored. JSON has no NaN and no infinity; they would silently turn into null, so they are
    refused."""
    encoded = encode(value)
    if b"null" in encoded and _has_unsayable_float(value):
        raise ValueError("NaN and infinity have no JSON form")
    return encoded if stored_as is None else stored_as.encode(encoded)


def _stored_json(
    what: str,
    value: Any,
    most: int,
    remedy: str,
    encode: Callable[[Any], bytes] = _encode,
    stored_as: PayloadCodec | None = None,
) -> bytes:
    """A value as it is stored, in at most so many bytes; `what` is its name in errors."""
    try:
        encoded = _as_json(value, encode, stored_as)
    except Exception as error:
        raise InvalidJob(f"{what} ({type(value).__name__}) cannot be stored as JSON: {error}") from None
    if len(encoded) > most:
        raise _too_large(f"{what} takes", encoded, most, remedy)
    return encoded


def _too_large(what: str, encoded: bytes, most: int, remedy: str) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{what} {len(encoded):,} bytes, more than the {most:,} allowed; {remedy}, or raise App(max_payload=…)"
    )


def _has_unsayable_float(value: Any) -> bool:
    match value:
        case float():
            return not math.isfinite(value)
        case list() | tuple() | set() | frozenset():
            return any(map(_has_unsayable_float, value))
        case dict():
            return any(map(_has_unsayable_float, value.values()))
    return False
