"""Rows survive being written as CSV, byte for byte the same on every system."""

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.csv_text import csv_text

CELLS = st.text(st.sampled_from("ab ,;\"'\n\té☃"), max_size=8)


@given(st.lists(st.lists(CELLS, min_size=1, max_size=4), max_size=4))
def test_what_is_written_is_read_again(rows):
    assert list(csv.reader(io.StringIO(csv_text(rows), newline=""), strict=True)) == rows


@given(st.floats(allow_nan=False))
def test_numbers_keep_all_their_digits(number):
    assert float(csv_text([(number,)])) == number


def test_lines_end_alike_everywhere_and_quotes_are_where_they_must_be():
    rows = [("arm", "loss"), ("full, static", 1.5), ('say "so"', -1), ("two\nlines", True), (" ", None)]
    assert csv_text(row for row in rows) == (
        'arm,loss\n"full, static",1.5\n"say ""so""",-1\n"two\nlines",True\n ,\n'
    )
    assert csv_text([]) == ""
