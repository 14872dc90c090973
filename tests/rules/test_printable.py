"""Untrusted file names cannot control a terminal, forge log lines or hide text."""

import pytest

from dalijax.core.messages.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat 7.jpg", "cat 7.jpg"),
        ("Größe/日本　語.jpg", "Größe/日本　語.jpg"),
        (b"latin\xe9.jpg", "latin\\xe9.jpg"),
        ("a\x1b[31mb.jpg", "a\\x1b[31mb.jpg"),
        ("a\nERROR: b\r.jpg", "a\\nERROR: b\\r.jpg"),
        ("\x9b31m\x7f\0\t", "\\x9b31m\\x7f\\x00\\t"),
        ("gpj\u202e.exe\u2066\u2028", "gpj\\u202e.exe\\u2066\\u2028"),
        ("\ud800\udc80\U000e0001", "\\ud800\\x80\\U000e0001"),
        ("", ""),
    ],
)
def test_control_characters_are_escaped(name, shown):
    assert printable(name) == shown
    shown.encode()  # a lone surrogate would raise


def test_a_message_keeps_its_lines():
    assert printable_lines("first\nsecond\x1b[2J\n") == "first\nsecond\\x1b[2J\n"
