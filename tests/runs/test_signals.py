"""Stopping when asked to."""

import contextlib
import os
import signal
import threading

import pytest

from torchemo.runs.signals import GracefulStop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_sets_the_flag_and_decides_the_exit_code(number, code):
    with GracefulStop() as stop:
        assert (stop.requested, stop.exit_code) == (None, 0)
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.exit_code) == (number, code)


def test_a_second_interrupt_raises_at_once_and_the_first_signal_decides():
    for first, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with GracefulStop() as stop:
            os.kill(os.getpid(), first)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == code


def test_repeated_terminations_change_nothing():
    with GracefulStop() as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested == signal.SIGINT


def test_the_handlers_from_before_are_put_back_also_after_an_error():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with contextlib.suppress(KeyError), GracefulStop():
        assert [signal.getsignal(number) for number in numbers] != before
        raise KeyError
    assert [signal.getsignal(number) for number in numbers] == before


def test_blocks_may_be_nested():
    with GracefulStop() as outer:
        with GracefulStop() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (outer.requested, inner.requested) == (None, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.requested == signal.SIGTERM


def test_outside_the_main_thread_the_flag_is_never_set():
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
