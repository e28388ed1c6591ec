"""The error tree: its drawing is true, and errors arrive whole in another process."""

from __future__ import annotations

import pickle
import re
import typing

import pytest

from cb_ray import errors
from cb_ray.errors import CbRayError, nearest

CLASSES = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, CbRayError)]
SAMPLES: dict[object, object] = {str: "what happened", int: 7, float: 1.5, tuple[str, ...]: ("a", "b"), str | None: "top_p"}


def make(cls: type[CbRayError]) -> CbRayError:
    """An error of this class with every argument given."""
    if "__init__" not in vars(cls):
        return cls("what happened")
    hints = typing.get_type_hints(cls.__init__)
    return cls(*(SAMPLES[hint] for name, hint in hints.items() if name != "return"))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling(cls: type[CbRayError]) -> None:
    """Between Ray processes an error is pickled: its text and every field must come out as they went in."""
    error = make(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert str(error)
    assert vars(copy) == vars(error)


def test_the_drawing_is_the_tree() -> None:
    """The tree at the top of errors.py names every class, what else it is, and its HTTP status."""
    drawn = {
        (name, other or None, int(status))
        for name, other, status in re.findall(r"[├└]── (\w+)(?: \((\S+)\))? +(\d+) ", errors.__doc__ or "")
    }

    def other_base(cls: type) -> str | None:
        (*_, last) = cls.__bases__
        if last is CbRayError:
            return None
        return last.__name__ if last.__module__ == "builtins" else f"{last.__module__.lstrip('_')}.{last.__name__}"

    real = {(cls.__name__, other_base(cls), cls.http_status) for cls in CLASSES if cls is not CbRayError}
    assert drawn == real


def test_a_misspelt_name_is_helped() -> None:
    """The closest known name where there is one, all of them where there is none."""
    assert nearest("page_sise", ["page_size", "num_blocks"]) == "did you mean 'page_size'?"
    assert nearest("zzz", ["page_size", "num_blocks"]) == "known: num_blocks, page_size"
