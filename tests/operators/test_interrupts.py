"""The delay of Ctrl-C while the state of a device is changed."""

from __future__ import annotations

import signal
import threading

import pytest

from moegraft.operators.interrupts import Uninterrupted


def test_ctrl_c_is_delayed_and_a_second_one_is_not() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("first")
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Uninterrupted():
        pass
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    worker = threading.Thread(target=Uninterrupted().__enter__)
    worker.start()
    worker.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
