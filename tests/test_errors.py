import copy
import pickle

import pytest

from attention_residuals import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name.endswith("Error")])
def test_an_error_survives_copying_and_another_process(name):
    error = getattr(errors, name)(got="a", expected="b", do="c")
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error) == "got: a\nexpected: b\ndo: c"
