"""Checks of public parameters against their annotations, where a program gives a value.

Otherwise a wrong value would show up far from the line that gave it, in an error of a driver or of Python, and on one
store only. `checked` is for functions that are called once per batch, claim or command; functions that are called for
every job check their arguments themselves. Text and numbers that a database cannot hold are refused.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from itertools import chain
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from uuid import UUID

from fairlane.errors import ConfigurationError, FairlaneError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
Test = Callable[[Any], bool]

LONGEST_SHOWN = 100
LONGEST_TEXT = 2_000
"""Enough for names, reasons and addresses; longer text would fill logs with its own error."""
LARGEST = 1 << 62
"""Beyond any sensible setting, and within the range of database integers."""
WORDS = {
    bool: "True or False",
    bytes: "bytes",
    datetime: "a datetime with a timezone, such as datetime.now(UTC)",
    float: "a number",
    int: "a whole number",
    str: "text",
    timedelta: "a timedelta",
    type: "a class",
    type(None): "None",
    UUID: "a UUID",
}
MANY = {int: "whole numbers", str: "names", UUID: "UUIDs"}
DURATION = "a duration, such as 90, '1m30s' or timedelta(…)"


def shown(value: object) -> str:
    """A value for an error message: as it would be written in code, cut if it is long."""
    try:
        text = repr(value[: LONGEST_SHOWN * 2] if isinstance(value, str | bytes) else value)
    except Exception:  # an object of the program's whose own repr fails, or a number of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def refuse_unknown_options(what: str, given: Iterable[str], known: Collection[str], remedy: str = "") -> None:
    """Refuse unknown options, with the one that is probably meant or with the remedy."""
    for name in given:
        if name not in known:
            similar = get_close_matches(name, known, n=1)
            meant = f"did you mean {similar[0]}=?" if similar else remedy.format(name)
            raise ConfigurationError(f"{what}: there is no option {name}=; {meant or 'there are ' + ', '.join(known)}")


def is_storable(text: str) -> bool:
    """Whether every database can hold it: no NUL, no lone surrogates."""
    return (text.isascii() and "\0" not in text) or not any(
        sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in text
    )


def checked(
    *,
    error: type[FairlaneError] = ConfigurationError,
    unchecked: Collection[str] = (),
    any_text: Collection[str] = (),
    called: str = "",
) -> Callable[[F], F]:
    """Refuse arguments that are not what their annotations say.

    Parameters in `unchecked` are left to the function; text in `any_text` need not be storable as it is. `called` is
    what errors call the function, instead of its own name.
    """

    def decorate(function: F) -> F:
        _unpack_options(function)
        what, options = called or _called(function), _options(function)
        kinds = inspect.Parameter
        parameters = inspect.signature(function).parameters.values()
        placed = [each.name for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        variadic = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        looked_at = {each.name for each in parameters if each.kind not in variadic}.difference(unchecked)

        # Read at the first call: annotations may name what is defined further down.
        @functools.cache
        def hints() -> dict[str, Any]:
            return {name: hint for name, hint in get_type_hints(function).items() if name in looked_at}

        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if options is not None:
                refuse_unknown_options(what, kwargs, options)
            known = hints()
            for name, value in chain(zip(placed, args, strict=False), kwargs.items()):
                if name in known:
                    check_value(what, name, value, known[name], error=error, any_text=name in any_text)

        return _preceded(function, check)

    return decorate


def known_options(function: F) -> F:
    """Refuse unknown options of a function, with the one that is probably meant. Type checkers see it unchanged.

    For a class: options of its constructor.
    """
    if inspect.isclass(function):
        kind: Any = function
        kind.__init__ = known_options(kind.__init__)
        return function
    what, known = _called(function), _options(function)
    assert known is not None, f"{what} takes any option"
    return _preceded(function, lambda _, kwargs: refuse_unknown_options(what, kwargs, known))


def _preceded(function: F, check: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> F:
    """The function with this check before it."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return await function(*args, **kwargs)

    return cast(F, async_wrapper if inspect.iscoroutinefunction(function) else wrapper)


def _called(function: Callable[..., Any]) -> str:
    """The name of a function in errors; for a constructor, that of its class."""
    owner, _, name = function.__qualname__.rpartition(".")
    return owner if name == "__init__" else name


def _options(function: Callable[..., Any]) -> dict[str, None] | None:
    """The parameters that can be given by name; `None` if any can."""
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is kinds.VAR_KEYWORD for each in parameters):
        return None
    named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    return {each.name: None for each in parameters if each.kind in named and each.name != "self"}


def checked_methods(kind: C) -> C:
    """`checked` for every public method of a class. Errors call one of `Limits` `limits.set`."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, checked(called=f"{kind.__name__.lower()}.{name}")(method))
    return kind


def _unpack_options(function: Any) -> None:
    """Show the options of `**options: Unpack[…]` as parameters of their own. As in stubs, `...` stands for defaults."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if parameters and str(parameters[-1].annotation).startswith("Unpack["):
        last = parameters.pop()
        unpacked = get_type_hints(types.SimpleNamespace(__annotations__={"of": last.annotation}), function.__globals__)
        options = get_type_hints(get_args(unpacked["of"])[0])
        function.__annotations__ = {**function.__annotations__, **options}
        del function.__annotations__[last.name]
        named = [inspect.Parameter(name, last.KEYWORD_ONLY, default=..., annotation=options[name]) for name in options]
        function.__signature__ = signature.replace(parameters=[*parameters, *named])


def check_value(
    what: str,
    name: str,
    value: object,
    kind: Any,
    *,
    error: type[FairlaneError] = ConfigurationError,
    any_text: bool = False,
) -> None:
    """Check one value; `kind` is what an annotation would say."""
    if not _test(kind, any_text)(value):
        raise _refusal(what, name, value, kind, error)


def check_fields(record: object, what: str, error: type[FairlaneError] = ConfigurationError) -> None:
    """Check the fields of an object that a program has just made; `what` is its name in errors."""
    kinds: Any = type(record)
    for name, hint in _fields_of(kinds).items():
        check_value(what, name, getattr(record, name), hint, error=error)


_fields_of = functools.cache(get_type_hints)


def check_whole(
    what: str, value: object, least: int, most: int, remedy: str, error: type[FairlaneError] = ConfigurationError
) -> int:
    """Refuse what is not a whole number within these bounds; `what` is its name, and may say where it was given."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise error(f"{what}={shown(value)} is not a whole number from {least:,} to {most:,}; {remedy}")
    return value


def _refusal(what: str, name: str, value: object, kind: Any, error: type[FairlaneError]) -> FairlaneError:
    remedy, alternatives = f"give {_words(kind)}", {*_alternatives(kind)}
    if isinstance(value, str) and str in alternatives:
        remedy = (
            f"give text of at most {LONGEST_TEXT:,} characters, without NUL and lone surrogates, which no database "
            "stores"
        )
    elif isinstance(value, int | float) and {int, float} & alternatives and not -LARGEST < value < LARGEST:
        remedy += " that is finite and not as large"
    return error(f"{what}: {name}={shown(value)} cannot be used; {remedy}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


@functools.cache
def _test(kind: Any, any_text: bool = False) -> Test:
    """A function that says whether a value matches an annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    own = origin or kind
    if kind in (Any, object) or isinstance(kind, TypeVar):
        return lambda value: True
    if origin in (Union, types.UnionType):
        tests = [_test(each, any_text) for each in arguments]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if kind is str:
        return lambda value: (
            isinstance(value, str) and (any_text or (len(value) <= LONGEST_TEXT and is_storable(value)))
        )
    if kind in (int, float):
        numbers = (int, kind)
        return lambda value: isinstance(value, numbers) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    if origin in (type, _CALLABLE):
        return inspect.isclass if origin is type else callable
    if origin is not None and issubclass(origin, Mapping):
        names, values = (_test(each, any_text) for each in arguments)
        return lambda value: (
            isinstance(value, Mapping) and all(names(name) and values(each) for name, each in value.items())
        )
    if origin is not None and issubclass(origin, Iterable):
        return functools.partial(_is_many, origin, _test(arguments[0], any_text))
    if getattr(own, "_is_protocol", False):
        members = [name for name in dir(own) if not name.startswith("_")]
        return lambda value: not inspect.isclass(value) and all(hasattr(value, name) for name in members)
    return lambda value: isinstance(value, own)


_CALLABLE = get_origin(Callable[[], None])


def _is_many(origin: type, test: Test, value: Any) -> bool:
    """Whether it is many of something. An iterator, which can be consumed only once, is not looked into."""
    if isinstance(value, Collection):
        return not isinstance(value, str | bytes | Mapping) and all(map(test, value))
    return isinstance(value, Iterable) and not issubclass(origin, Collection)


def _words(kind: Any) -> str:
    """What to give, from the annotation."""
    alternatives = list(_alternatives(kind))
    words: list[str] = []
    if {str, float} <= {*alternatives}:  # a `timedelta` besides, where programs give it and not files
        words.append(DURATION)
        alternatives = [each for each in alternatives if each not in (str, float, timedelta)]
    words += [_word(each) for each in alternatives]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _word(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in WORDS:
        return WORDS[kind]
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is _CALLABLE:
        return "a function"
    if origin is type:
        return "a class"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping of names to values, such as {'account': 'acme'}"
    if origin is not None and issubclass(origin, Iterable):
        return f"a list of {MANY.get(arguments[0]) or _words(arguments[0])}"
    name = (origin or kind).__name__
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"
