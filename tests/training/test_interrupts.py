"""The first signal is noted, the second ends things as usual, and the handlers of before come back."""

import signal
import threading

import pytest

from redline.training.interrupts import stop_requests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_a_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_requests() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop_requests():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_nothing_is_listened_to() -> None:
    seen = []

    def work() -> None:
        with stop_requests() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]
