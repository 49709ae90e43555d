"""Check that each exhausted resource of the machine has its own code, at any depth of the chain of errors."""

from __future__ import annotations

import errno

import pytest

from policy import errors


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as e:
        return e


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, errors.DiskFullError),
        (errno.EDQUOT, errors.DiskFullError),
        (errno.EMFILE, errors.DescriptorsExhaustedError),
        (errno.ENFILE, errors.DescriptorsExhaustedError),
        (errno.ENOMEM, errors.MemoryExhaustedError),
    ],
)
def test_number_of_kernel_is_told_by_its_cause(number: int, kind: type[errors.ExhaustedError]) -> None:
    plain = errors.exhausted(OSError(number, "No space", "/a/b"))
    assert type(plain) is kind
    assert plain.where == "/a/b"
    assert plain.hint
    wrapped = raised(errors.LedgerError("the audit record could not be written", where="/log"), OSError(number, "x"))
    found = errors.exhausted(wrapped)
    assert type(found) is kind
    assert (found.message, found.where) == ("the audit record could not be written", "/log")


def test_anything_else_is_left_as_it_is() -> None:
    assert errors.exhausted(OSError(errno.EACCES, "no")) is None
    assert errors.exhausted(ValueError("no")) is None
    assert errors.exhausted(raised(errors.LedgerError("no"), OSError(errno.EIO, "x"))) is None
    # An agent's own memory is not the machine's.
    assert errors.exhausted(errors.OutOfMemoryError("no")) is None
    assert type(errors.exhausted(MemoryError())) is errors.MemoryExhaustedError


def test_it_does_not_go_round_for_ever() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert errors.exhausted(one) is None
