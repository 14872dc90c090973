"""The page for coding assistants is short and complete; test_blocks.py runs its code."""

import re

from pages import DOCS

MOST_LINES = 120
TEXT = (DOCS / "SKILL.md").read_text()


def test_it_is_short():
    assert TEXT.count("\n") <= MOST_LINES


def test_it_has_a_name_and_a_description():
    assert re.match(r"---\nname: dalijax\ndescription: >-\n( {2}\S.*\n)+---\n", TEXT)


def test_it_lists_ten_mistakes():
    table = TEXT.partition("## The ten most common mistakes")[2].partition("\n\nAlso")[0]
    assert len(re.findall(r"^\| ", table, re.MULTILINE)) == 2 + 10  # heading and rule
