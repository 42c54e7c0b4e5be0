"""MODEL of the command line: a function in a file or module that builds the model and its example inputs."""

# pyright: basic

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar.errors import BadArgument

SPELLING = "write file.py:function or package.module:function"


@dataclass(frozen=True)
class Example:
    """What the factory built: a model and one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def build(text: str) -> Example:
    """Call the factory that `text` names. Raises BadArgument where the name, the code or the result is wrong."""
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise BadArgument(f"MODEL {text!r} names no function; {SPELLING}")
    is_file = where.endswith(".py") or "/" in where
    folder = Path(where).resolve().parent if is_file else Path.cwd()
    with _importing_from(folder):
        module = _from_file(Path(where), text) if is_file else _from_module(where, text)
        function = getattr(module, name, None)
        if not callable(function):
            known = _functions(module)
            told = f"its functions are {', '.join(known)}" if known else "it defines no function"
            raise BadArgument(f"{where} has no function {name!r}; {told}")
        if isinstance(function, nn.Module):
            raise BadArgument(
                f"{text} is a module, not a function; name a function that returns it with its inputs: (model, args)"
            )
        _check_callable_bare(function, text)
        with _telling(f"{text} failed", where):
            built = function()
    return _checked(built, text)


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """As when a script of that folder runs: its neighbours can be imported."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _telling(what: str, where: str) -> Iterator[None]:
    """Errors of the user's code become one sentence with the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            line = f"{error.filename}:{error.lineno}"
        else:
            frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
            theirs = [frame for frame in frames if frame.filename.endswith(where)]
            line = f"{(theirs or frames)[-1].filename}:{(theirs or frames)[-1].lineno}" if frames else where
        reason = " ".join(str(error).split())[:300]
        raise BadArgument(f"{what} at {line}: {type(error).__name__}: {reason}{_instead(error)}") from error


def _instead(error: BaseException) -> str:
    """What to do about it, where that is known."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; a file by itself is in no package: go to where the package lies, and give package.module:function"
    if isinstance(error, SystemExit):
        return "; the file runs as a script does: put what reads the command line behind `if __name__ == '__main__':`"
    return ""


def _from_file(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise BadArgument(f"file {str(path)!r} of MODEL {text!r} does not exist in {Path.cwd()}; {SPELLING}")
    name = f"autopar_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadArgument(f"{str(path)!r} of MODEL {text!r} is no Python file; {SPELLING}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _telling(f"importing {path} failed", str(path)):
        spec.loader.exec_module(module)
    return module


def _from_module(name: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise BadArgument(f"there is no module {error.name!r} for MODEL {text!r}; {SPELLING}") from error
        raise BadArgument(
            f"importing {name} failed: {error}; install it, or run in the environment of the model"
        ) from error
    except (Exception, SystemExit) as error:
        with _telling(f"importing {name} failed", f"{name.replace('.', '/')}.py"):
            raise
        raise AssertionError from error


def _functions(module: ModuleType) -> list[str]:
    """The public functions that the module itself defines, in the order of the file."""
    return [
        name for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip


def _check_callable_bare(function: Any, text: str) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise BadArgument(
            f"{text} cannot be called without arguments: {error}; give its parameters defaults"
        ) from error
    except ValueError:
        pass  # something builtin that does not tell its signature


def _checked(built: Any, text: str) -> Example:
    """The parts of what a factory returned."""
    wanted = "it must return (model, args) or (model, args, kwargs)"
    if isinstance(built, nn.Module):
        raise BadArgument(f"{text} returned a model without example inputs; {wanted}")
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        count = f" of {len(built)}" if isinstance(built, tuple) else ""
        raise BadArgument(f"{text} returned a {type(built).__name__}{count}; {wanted}")
    model, args, kwargs = built if len(built) == 3 else (*built, {})
    if not isinstance(model, nn.Module):
        raise BadArgument(f"{text} returned a {type(model).__name__} in the place of the model; {wanted}")
    if not isinstance(args, tuple):
        hint = "keywords, write (model, (), kwargs)" if isinstance(args, dict) else "one input, write (model, (x,))"
        raise BadArgument(f"{text} returned a {type(args).__name__} in the place of args, a tuple; for {hint}")
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise BadArgument(f"{text} returned a {type(kwargs).__name__} in the place of kwargs, a dict by argument name")
    return Example(model, args, kwargs)
