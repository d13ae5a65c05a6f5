"""The catalogue of errors: names, built-in bases, facts as attributes, pickling."""

import builtins
import pickle

import pytest

from outrider.scheduler import errors

pytestmark = pytest.mark.fast

CATALOGUE = sorted(name for name in errors.__all__)


def kind(name):
    return getattr(errors, name)


@pytest.mark.parametrize("name", CATALOGUE)
def test_survives_pickle_with_all_fields(name):
    fields = {field: [field, index] for index, field in enumerate(kind(name)._fields)}
    error = kind(name)("what happened, and what to do", **fields)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind(name)
    assert str(again) == "what happened, and what to do"
    assert again.fields() == fields
    assert {field: getattr(again, field) for field in fields} == fields


@pytest.mark.parametrize("name", CATALOGUE)
def test_belongs_to_the_catalogue(name):
    assert name.endswith("Error")
    assert issubclass(kind(name), errors.OutriderError)
    assert kind(name).__doc__
    if name != "OutriderError":
        others = [base for base in kind(name).__mro__ if getattr(builtins, base.__name__, None) is base]
        assert any(base not in (Exception, BaseException, object) for base in others)


@pytest.mark.parametrize("name", CATALOGUE)
def test_unset_fields_are_none_and_unknown_ones_refused(name):
    assert set(kind(name)("text").fields().values()) <= {None}
    with pytest.raises(TypeError, match="nonsense"):
        kind(name)("text", nonsense=1)


def test_every_class_of_the_module_is_listed():
    declared = {n for n, item in vars(errors).items() if isinstance(item, type) and issubclass(item, BaseException)}
    assert declared == set(CATALOGUE)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InputNotFoundError", ValueError),
        ("DtypeMismatchError", TypeError),
        ("RunTimeoutError", TimeoutError),
        ("OutOfMemoryError", MemoryError),
        ("UnknownOptionError", TypeError),
        ("UnknownOptionError", ValueError),
        ("UnsupportedOptionError", NotImplementedError),
        ("UnsupportedOpError", NotImplementedError),
    ],
)
def test_builtin_base(name, builtin):
    assert issubclass(kind(name), builtin)
